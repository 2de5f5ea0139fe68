"""Stages that hold other stages: chain, sum, split, graft, transform, trust, coordinates of a partner."""

"""Stages that hold other stages: chain, sum, split, graft, transform, coordinates of a partner."""

"""Stages that hold other stages: chain, sum, transform, graft, and chains in other coordinates."""

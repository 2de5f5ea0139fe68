"""Stages that contain other stages: chain, sum, transform, graft, and chains in other coordinates."""

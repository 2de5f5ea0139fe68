"""Stages that contain chains of other stages: named chains, sums, grafting, and chains in other coordinates."""

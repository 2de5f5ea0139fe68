"""Plans without processes: the blocks, state, work and messages that each rank would have."""

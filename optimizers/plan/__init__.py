"""Plans: the blocks, state, work and messages that each rank would have, computed without starting processes."""

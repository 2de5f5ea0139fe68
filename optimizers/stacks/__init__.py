"""From routes to owners: parameters into blocks, blocks into stacks, and a rank for each block."""

"""From parameters to stacks: placement of each parameter, owners of its blocks, and stacks with their state."""

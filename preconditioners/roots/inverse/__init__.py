"""Solvers of inverse roots A^(-1/p) of stacks of symmetric matrices."""

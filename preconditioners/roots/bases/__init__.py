"""Solvers of eigenvector bases of stacks of symmetric matrices."""

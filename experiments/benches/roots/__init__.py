"""Bench of inverse-root solvers: error, residual, time."""

"""Bench of magnitudes: the norm of the update of each chain over block shapes."""

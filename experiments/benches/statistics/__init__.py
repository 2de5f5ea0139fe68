"""Bench of statistics: the distance of their Kronecker product from the full second moment."""

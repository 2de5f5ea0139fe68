"""The bench of statistics: distance of their Kronecker product from the full second moment."""

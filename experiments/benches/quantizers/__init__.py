"""The bench of quantizers: error of a stored factor and of its root, bytes and time."""

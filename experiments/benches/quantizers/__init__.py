"""Bench of quantizers: what is lost of a factor and of its root, bytes, time."""

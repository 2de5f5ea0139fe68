"""Formats: quantizers for any numbers, which do not use that a slot is, for example, a symmetric matrix."""

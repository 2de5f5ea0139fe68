"""Formats: ways to store the numbers of a slot that do not depend on the meaning of the numbers."""

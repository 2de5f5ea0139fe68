"""Strict loading of state dicts, and state dicts of which each rank holds its part."""

"""Formats: how the numbers of a slot are stored, whatever they mean."""

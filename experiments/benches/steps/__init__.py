"""Measurement of complete optimizer steps: candidates, sets of parameters, times, least times, and ranks."""

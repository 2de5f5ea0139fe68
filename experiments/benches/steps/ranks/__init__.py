"""Waiting of ranks for each other: critical paths of real processes beside those of counted work."""

"""Bench of storage: the time of a step with coded slots against the same step without."""

"""The bench of storage: time of a step with coded slots over the same step without."""

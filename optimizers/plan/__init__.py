"""Plans without processes: what each rank would own, hold, compute and send."""

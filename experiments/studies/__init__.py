"""Studies: many runs at once, their plan, the processes that do them, searches, and the studies that are shipped."""

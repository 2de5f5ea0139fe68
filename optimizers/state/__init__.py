"""All parameter sets of an optimizer, and their state as torch is shown it."""

"""All parameter sets of an optimizer, and their state in `optimizer.state`."""

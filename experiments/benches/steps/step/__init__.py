"""The bench of steps: recipes and other libraries' optimizers in turn on the same gradients, against their floor."""

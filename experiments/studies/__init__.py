"""Many experiments at once: axes, seeds, and the pool that runs them. The shipped studies lie beside the code."""

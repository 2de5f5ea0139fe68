"""Published and measured claims as checks that can fail."""

"""Published and measured claims about components, as checks that can fail."""

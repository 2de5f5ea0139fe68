"""Steps of entry-wise updates where parameters lie, chunk by chunk, without stacks. Parameter sets come in here."""

"""Who owns which block, what a block costs, and what ranks agree on in a step."""

"""Placement of parameters and owners of blocks, what a block costs, and what ranks check."""

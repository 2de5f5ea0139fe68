"""Inspection of an optimizer: what its state and its last watched step say, as a table. It changes nothing."""

"""Figures of a report that are made of its panels: differences from the baseline, and the optimizer's internals."""

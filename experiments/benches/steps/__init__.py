"""Benches of whole steps of optimizers: against others and the arithmetic, by storage, over ranks."""

"""Constraints and averagings that only `track3` and `track3_kfac` use. A reader of the package may skip them.

There is one module for each family. The components keep the contract of their family, are registered like all others,
and can be used in any recipe. `eigengraft.optimizers.write` exports their classes.
"""

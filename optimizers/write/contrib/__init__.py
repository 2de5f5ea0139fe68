"""Constraints and averagings of only two shipped recipes, `track3` and `track3_kfac`, and components of no shipped
recipe. A reader of the package may skip them.

The recipes are entries of track 3 of the modded-nanogpt speedrun. There is one module for each family. The components
keep the contract of their family, are registered like all others, and can be used in any recipe.
`eigengraft.optimizers.write` exports their classes.
"""

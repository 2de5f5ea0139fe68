"""Constraints and an averaging that only the recipe `track3` uses: same laws, same registry; a reader may skip them.

One module for each family. Their kinds work in recipes as all others do, and their classes are exported by
`eigengraft.optimizers.write`.
"""

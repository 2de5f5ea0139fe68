"""Components that no shipped recipe and no paper of this repository uses; a first reader may skip them.

There is one module for each family. The components work in recipes as all others do, satisfy the same laws, and are
exported by `eigengraft.preconditioners`.
"""

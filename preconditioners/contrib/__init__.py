"""Components that no shipped recipe and no paper of this repository uses; a first reader may skip them.

There is one module for each family. The components work in recipes as all others do, pass the same tests of
`eigengraft.testing`, and are exported by `eigengraft.preconditioners`.
"""

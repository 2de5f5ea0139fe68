"""Components that no shipped recipe and no paper names: same laws, same registry; a reader may skip them.

One module for each family. Their kinds work in recipes as all others do, and their classes are exported by
`eigengraft.preconditioners`.
"""

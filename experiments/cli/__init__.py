"""The command line: one file for each group of commands, with the tables and progress bars of these commands.

Within the library only `eigengraft.__main__`, which starts the program, imports this package.
"""

"""The command line: one file for each group of commands, with its tables and progress bars. Nothing imports it."""

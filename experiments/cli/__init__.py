"""The command line: one file per group of commands, their tables and progress bars. Nothing imports it."""

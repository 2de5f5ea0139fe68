"""One step of the parameters, in one process or on several ranks. It checks gradients, gathers blocks, runs the program
of each stack of blocks, and writes the updates.
"""

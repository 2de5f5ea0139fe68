"""Stacks: equal blocks of many parameters as one tensor `[N, *block]`, with the state of their update.

This package finds the ranks on which each parameter is placed, chooses the rank that updates each block (its owner),
and builds the stacks of the blocks that this rank owns.
"""

"""One step of an optimizer, in one process or on several ranks.

A step checks the gradients, copies equal blocks of parameters into stacks `[N, *block]`, computes the updates of one
stack after another, and writes them into the parameters.
"""

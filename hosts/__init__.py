"""Recipes in the training loops of other libraries. There is one module for each library, and the module imports that
library.
"""

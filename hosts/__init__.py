"""Recipes in the training loops of other libraries: one module for each library, which it imports."""

"""Structures: a matrix of a known kind turned into fewer numbers, which a format stores."""

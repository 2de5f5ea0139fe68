"""Structures: a matrix of a known kind, such as a symmetric one, is reduced to fewer numbers, which a format stores."""

"""The gradient-spike study: the size of updates after one gradient that is 1e4 times too large, with its results."""

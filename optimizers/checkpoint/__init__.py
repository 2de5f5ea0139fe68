"""State as torch and checkpoints see it: parameter sets by group, strict loads, pickles, state divided over ranks."""

"""State as checkpoints hold it: strict loads, pickles, copies, state divided over ranks."""

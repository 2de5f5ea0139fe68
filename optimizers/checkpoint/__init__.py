"""State in checkpoints: strict loads, pickles and copies of optimizers, and state that is sharded over ranks."""

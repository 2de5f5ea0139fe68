"""One training run: from an experiment file to a trained model in a run directory, on one process or many."""

"""From an experiment file to a trained model in a run directory."""

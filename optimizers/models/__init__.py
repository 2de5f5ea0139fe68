"""An optimizer together with its model: `compose`, and signals that need a forward or a backward."""

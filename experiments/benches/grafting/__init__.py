"""The bench of magnitudes: norm of the update of each chain over block shapes."""

"""Linear algebra along the axes of stacked blocks, shared by all stages; no stage is defined here."""

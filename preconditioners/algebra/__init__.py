"""Linear algebra on stacked blocks, shared by all stages. No stage is defined here."""

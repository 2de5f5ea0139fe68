"""Training on several ranks: DDP, FSDP2 and HSDP, and the process group of a run."""

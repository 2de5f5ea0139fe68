"""Training on several ranks: DDP, FSDP2 and HSDP, the process group of a run, and its small collectives."""

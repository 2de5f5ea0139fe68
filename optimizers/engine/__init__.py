"""One step of a parameter set: check gradients, gather blocks, run the chain of stages, deliver updates."""

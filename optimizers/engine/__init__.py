"""Parameter sets and one step of them: check gradients, gather blocks, run the chain of stages, deliver updates."""

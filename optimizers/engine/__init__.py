"""One step of one set of parameters: build its stacks, check its gradients, run the chain, deliver the updates."""

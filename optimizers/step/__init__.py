"""One step of parameters, in one process or on ranks: check gradients, gather blocks, run their program, write."""

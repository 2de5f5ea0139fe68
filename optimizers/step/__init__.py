"""One step of parameters: look at gradients, gather blocks, run the program of each stack, write. Ranks too."""

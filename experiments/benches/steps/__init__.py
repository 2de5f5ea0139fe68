"""Steps of whole optimizers: cases, sets of parameters, rounds, the floor, a loop by hand, processes of ranks."""

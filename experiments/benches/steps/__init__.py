"""Steps of complete optimizers: candidates, sets of parameters, rounds of measurement, the floor, and processes of
ranks.
"""

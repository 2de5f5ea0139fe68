"""The laptop track: a benchmark in which recipes, its entries, race to a target loss on small fixed tasks.

The package has the rules of the track, the scores of entries, and the page of results.
"""

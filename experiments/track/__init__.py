"""The laptop track: fixed tasks and losses to reach, entries that are recipes, their scores, and a table of them."""

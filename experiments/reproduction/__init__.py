"""Claims of a paper as data, their verdicts from measured runs, and the pages that are generated from them."""

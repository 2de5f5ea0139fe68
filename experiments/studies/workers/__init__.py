"""Several workers on one study: which run is whose, and jobs of a cluster."""

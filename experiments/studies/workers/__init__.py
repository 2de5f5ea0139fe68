"""Several workers on one study: leases that give each run to one worker, exchange of results, and jobs of a cluster."""

"""Many runs at once: a study, its plan, the pool of processes that runs it, and the shipped studies."""

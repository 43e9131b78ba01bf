"""Running a plan: the user's step evaluated on shards with explicit collectives, on stock JAX."""

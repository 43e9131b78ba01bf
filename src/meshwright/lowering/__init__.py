"""A plan and a program as what a device runs: local programs on shards, with explicit collectives. Needs no device."""

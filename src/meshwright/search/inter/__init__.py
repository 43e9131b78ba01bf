"""Inter-operator parallelism as numbers: which layers on which submesh, by dynamic programming."""

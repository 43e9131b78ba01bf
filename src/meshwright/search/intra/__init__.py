"""Intra-operator parallelism: the layouts of one stage as an optimisation problem, solved within a limit of memory."""

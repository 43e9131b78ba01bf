"""Seconds and bytes: what compute and collectives cost. Imports no JAX."""

"""Seconds and bytes: what compute, collectives and memory cost. Imports no JAX."""

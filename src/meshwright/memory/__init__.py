"""The memory of a lowered program before it is compiled: lifetimes of its buffers, and their peak. Imports no JAX."""

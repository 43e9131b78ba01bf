"""Running a plan: its local programs compiled and issued on devices, values moved between them, on stock JAX."""

"""Whether compilers mind barriers."""

from __future__ import annotations

import jax


def barriers_hold(platform: str) -> bool:
    """Whether a compiler minds barriers. Up to JAX 0.10 XLA's CPU backend forgets them before it orders kernels: what
    is rematerialised starts early, and of two equal gathers there is one."""
    return platform != "cpu" or jax.__version_info__ >= (0, 11)

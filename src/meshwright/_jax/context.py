"""Code of our own under the configuration it was written for, whatever the code around a call has set for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import jax
import numpy as np
from jax._src import core
from jax.sharding import Mesh


@contextmanager
def own_context(*, x64: bool | None = None) -> Iterator[None]:
    """No mesh set, so that any devices may be computed on; small numbers may be sent to devices; programs compiled, and
    what they make not looked at: a NaN that is moved is no error.

    Args:
      x64: whether there are numbers of 64 bits; None for what is set here. Threads do not inherit it.
    """
    wide = has_x64() if x64 is None else x64
    with (
        jax.set_mesh(_no_mesh()), jax.transfer_guard("allow"), jax.disable_jit(False), jax.enable_x64(wide),
        jax.debug_nans(False), jax.debug_infs(False),
    ):  # fmt: skip
        yield


def is_tracing() -> bool:
    """Whether this is called while a function is traced, by `jax.jit` or another transformation."""
    return not core.trace_state_clean()


def has_x64() -> bool:
    """Whether arrays made here may have elements of 64 bits."""
    return bool(jax.config.jax_enable_x64)


@cache
def _no_mesh() -> Mesh:
    return Mesh(np.empty((), dtype=object), ())

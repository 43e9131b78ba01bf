"""Code of our own under the configuration it was written for, whatever the code around a call has set for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.mesh import get_concrete_mesh, use_abstract_mesh  # 0.10 to 0.12
from jax.sharding import Mesh

# The mesh that the user has set around a call of ours: abstract, and with devices where it has some.
_users: ContextVar[tuple[Any, Any] | None] = ContextVar("users", default=None)


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


@contextmanager
def no_mesh() -> Iterator[None]:
    """No mesh set (`jax.set_mesh`), since a plan has meshes of its own. What the user writes is traced under the user's
    all the same: `as_user` enters it again.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> with jax.set_mesh(mesh), no_mesh():
    ...     assert jax.sharding.get_abstract_mesh().empty
    ...     with as_user()():
    ...         jax.sharding.get_abstract_mesh().axis_names
    ('data',)
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        yield
        return
    token = _users.set((abstract, get_concrete_mesh()))
    try:
        with use_abstract_mesh(_no_mesh().abstract_mesh) if is_tracing() else jax.set_mesh(_no_mesh()):
            yield
    finally:
        _users.reset(token)


def as_user() -> Callable[[], AbstractContextManager[None]]:
    """A context manager that sets again the mesh, if any, that the user had set when `no_mesh` was entered. It can be
    entered more than once, also after `no_mesh` has been left."""
    users = _users.get()

    @contextmanager
    def entered() -> Iterator[None]:
        if users is None:
            yield
            return
        abstract, concrete = users
        with use_abstract_mesh(abstract) if concrete.empty or is_tracing() else jax.set_mesh(concrete):
            yield

    return entered


def is_tracing() -> bool:
    """Whether this is called while a function is traced, by `jax.jit` or another transformation."""
    return not core.trace_state_clean()


def has_x64() -> bool:
    """Whether arrays made here may have elements of 64 bits."""
    return bool(jax.config.jax_enable_x64)


@cache
def _no_mesh() -> Mesh:
    return Mesh(np.empty((), dtype=object), ())

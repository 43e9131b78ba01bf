"""Arrays on meshes of which this process may have all, some or no devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from .._jax.random import is_key
from ..errors import PlanError


def is_mine(mesh: Mesh) -> bool:
    """Whether this process has a device of a mesh."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.flat)


def ghost(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> jax.Array:
    """An array on devices of other processes: what this process has of it is its shape."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def put(x: Any, sharding: Sharding) -> jax.Array:
    """An array that this process has whole, laid out on a mesh.

    Every process of the mesh has the same array and puts its own blocks on its own devices; nothing is sent.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if is_key(jax.typeof(x)) and isinstance(sharding, NamedSharding):
        data = put(jax.random.key_data(x), NamedSharding(sharding.mesh, sharding.spec))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def check_not_donated(x: Any, name: str) -> None:
    """Refuse an argument whose buffers an earlier step took over: XLA's CPU backend ends the process when it meets one.

    Args:
      x: a leaf of the arguments.
      name: its path.

    Raises:
      PlanError: if it is gone.
    """
    if isinstance(x, jax.Array) and x.is_deleted():
        raise PlanError(
            refused="an argument of the step", got=f"{name}, already donated",
            needed="the state that the last step returned: a step takes over the buffers of the one it is given",
            where=name, try_="state, metrics = step(state, batch), or donate=() for a step that takes over nothing",
        )  # fmt: skip

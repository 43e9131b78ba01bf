"""Shardings that split every array of a tree as evenly as its dims allow over the same devices.

Arrays of pipeline stages lie on different devices, and JAX combines arrays of one set of devices only. Moved to these
shardings (`meshwright.reshard`), a whole tree can be read by one `jax.jit`, and saved and restored by libraries that
want every array on devices of every process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def spread_shardings(tree: Any, devices: Sequence[jax.Device] | None = None) -> Any:
    """For each leaf of a tree a sharding over the same devices, in blocks as small as its dims allow.

    Args:
      tree: arrays or `ShapeDtypeStruct`s.
      devices: all devices of the run by default.

    Returns:
      a tree of `NamedSharding`s, all of one mesh, for `meshwright.reshard` or a checkpoint's target.

    >>> import jax.numpy as jnp
    >>> spread_shardings({"w": jnp.ones((4, 2))}, jax.devices()[:1])["w"].shard_shape((4, 2))
    (4, 2)
    """
    found = jax.devices() if devices is None else devices
    return jax.tree.map(lambda x: spread_sharding(np.shape(x), found), tree)


def spread_sharding(shape: Sequence[int], devices: Sequence[jax.Device], whole: Collection[int] = ()) -> NamedSharding:
    """A sharding of one array over devices, in blocks as small as its dims allow.

    The mesh has an axis for each prime factor of the number of devices, so that it is the same for every array; each
    axis, largest first, splits the first dim that it divides, or nothing.

    Args:
      shape: of the array.
      devices: in the order of the mesh.
      whole: dims that are not to be split.
    """
    sizes = _factors(len(devices))
    names = tuple(f"spread{i}" for i in range(len(sizes)))
    mesh = Mesh(np.array(devices, dtype=object).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    left, dims = list(shape), [[] for _ in shape]
    for name, size in zip(names, sizes, strict=True):
        dim = next((d for d, n in enumerate(left) if d not in whole and n and n % size == 0), None)
        if dim is not None and size > 1:
            left[dim] //= size
            dims[dim].append(name)
    return NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in dims)))


def _factors(count: int) -> tuple[int, ...]:
    """Prime factors, largest first; one for a single device."""
    found, rest, prime = [], count, 2
    while rest > 1:
        while rest % prime == 0:
            found.append(prime)
            rest //= prime
        prime += 1
    return tuple(reversed(found)) or (1,)

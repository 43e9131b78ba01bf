"""What the programs traced on an array know of its place: its memory (the devices' or the host's), and how it lies on a
mesh of Explicit axes, which is in its type (`jax.typeof(x).sharding`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

# Of the host, reachable from a device; what JAX calls `jax.memory.Space.Host`.
HOST_MEMORY = "pinned_host"


def placement(x: Any) -> Sharding | None:
    """The place of an array, or of a shape that has a sharding, as far as a program knows it; None for the memory of
    devices and axes that are not Explicit.

    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    >>> x = jax.device_put(jax.numpy.ones((2, 2)), NamedSharding(mesh, PartitionSpec("data")))
    >>> tuple(placement(x).spec), placement(untyped(x))
    (('data', None), None)
    >>> placement(jax.device_put(x, untyped(x).sharding.with_memory_kind("pinned_host"))).memory_kind
    'pinned_host'
    """
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return None
    kind = HOST_MEMORY if _in_host_memory(sharding) else None
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        spec = PartitionSpec(*sharding.spec, *(None,) * (len(x.shape) - len(sharding.spec)))
        return NamedSharding(sharding.mesh.abstract_mesh, spec, memory_kind=kind)
    return _host() if kind is not None else None


def _host() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.local_devices()[0], memory_kind=HOST_MEMORY)


def in_host(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of an array in the host's memory."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type, sharding=_host())


def _in_host_memory(sharding: Sharding) -> bool:
    kind = sharding.memory_kind
    if kind is None or "host" not in kind:
        return False
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        return True
    # Where the host is the device, its memory may be called the host's.
    return kind != next(iter(sharding.device_set)).default_memory().kind


def in_host_memory(x: Any) -> bool:
    """Whether an array, or a shape with such a sharding, is in the host's memory."""
    place = placement(x)
    return place is not None and place.memory_kind is not None


def cut_placement(sharding: Sharding | None, shape: tuple[int, ...]) -> Sharding | None:
    """The place of an array of another shape that lies like this one: not split where the extent does not divide."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    sizes = sharding.mesh.shape
    dims = []
    for extent, entry in zip(shape, sharding.spec, strict=True):
        names = entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        dims.append(entry if extent % prod(sizes[name] for name in names) == 0 else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*dims), memory_kind=sharding.memory_kind)


def placed(function: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """The function that gets those of its arguments which are in the host's memory in it: traced on shapes JAX puts all
    of them into the devices'.

    Args:
      function: of arrays.
      args: its arguments, as arrays or shapes.
    """
    hosted = [in_host_memory(x) for x in jax.tree.leaves(tuple(args))]
    if not any(hosted):
        return function

    def on_placed(*given: Any) -> Any:
        leaves, tree = jax.tree.flatten(given)
        moved = [
            jax.device_put(x, jax.memory.Space.Host) if is_one else x for x, is_one in zip(leaves, hosted, strict=True)
        ]
        return function(*jax.tree.unflatten(tree, moved))

    return on_placed


def is_host_typed(aval: Any) -> bool:
    """Whether the type of a value says that it is in the host's memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def untyped(x: Any) -> Any:
    """The same array, in the same buffers, on axes that its type does not name."""
    sharding = x.sharding if isinstance(x, jax.Array) else None
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)  # of Auto axes
    return jax.device_put(x, NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind))

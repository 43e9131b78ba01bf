"""What the planner is told of JAX's arrays: layouts from shardings, the network from devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import jax
from jax.sharding import Sharding

from ...resharding import DeviceMesh, Host, Layout, Network, Nic, ReshardError
from ...resharding.layout import Box

# Of a NIC, where nobody says: only what unequal NICs have to each other matters, and the latency to all of them.
_NIC_BYTES_PER_SECOND = 12.5e9
_LATENCY_SECONDS = 3e-5


@lru_cache(maxsize=4096)
def layout_of(sharding: Sharding, shape: tuple[int, ...]) -> Layout:
    """Where the blocks of an array lie, whatever kind of sharding says so.

    Args:
      sharding: of the array.
      shape: of the array.

    Raises:
      ReshardError: the blocks are no grid of equal ones.
    """
    boxes = block_boxes(sharding, shape)
    devices_of: dict[Box, list[Any]] = {}
    for device, box in boxes.items():
        devices_of.setdefault(box, []).append(device)
    # Blocks of no extent are one block.
    splits = tuple(len({box[dim] for box in devices_of}) for dim in range(len(shape)))
    ordered = sorted(devices_of)
    replicas = {len(devices) for devices in devices_of.values()}
    if len(ordered) != prod(splits) or len(replicas) != 1:
        raise ReshardError(
            refused="a sharding", got=f"{sharding} for shape {shape}, whose blocks are no grid",
            needed="each dim cut into equal blocks, each block on as many devices", where="reshard",
            try_="a NamedSharding",
        )  # fmt: skip
    axes = (*(f"dim{d}" for d in range(len(shape))), "replica")
    devices = tuple(device.id for box in ordered for device in devices_of[box])
    mesh = DeviceMesh(devices=devices, shape=(*splits, replicas.pop()), axes=axes)
    return Layout(mesh=mesh, spec=tuple((axis,) if k > 1 else () for axis, k in zip(axes, splits, strict=False)))


def block_boxes(sharding: Sharding, shape: Sequence[int]) -> dict[Any, Box]:
    """The box of the array that each device of a sharding holds, in the order of the sharding's devices."""
    return {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(tuple(shape)).items()
    }


def boxes_by_id(sharding: Sharding, shape: Sequence[int]) -> dict[int, Box]:
    """The same by device id."""
    return {device.id: box for device, box in block_boxes(sharding, shape).items()}


def holds(outer: Box | None, inner: Box) -> bool:
    """Whether a box, if there is one, has all of another."""
    return outer is not None and all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def network_of(devices: Iterable[jax.Device]) -> Network:
    """The machines of devices: each process is a domain, which a byte needs to enter once, with a NIC of its own."""
    of_process: dict[int, list[int]] = {}
    for device in sorted(devices, key=lambda d: d.id):
        of_process.setdefault(device.process_index, []).append(device.id)
    nic = Nic(send_rate=_NIC_BYTES_PER_SECOND, receive_rate=_NIC_BYTES_PER_SECOND)
    hosts = tuple(Host(devices=tuple(ids), nics=(nic,)) for _, ids in sorted(of_process.items()))
    return Network(hosts=hosts, latency_seconds=_LATENCY_SECONDS)

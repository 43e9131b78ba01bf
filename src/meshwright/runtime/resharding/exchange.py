"""Buffers of words between the devices of several processes: one `ppermute` for each group of disjoint pairs.

All devices that send or receive are one mesh, and all buffers of one size, so that a program is known by its pairs and
their longest message, and few programs serve all rounds. Every process with a device of the mesh calls `run`, all in
one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .blocks import zeros

_AXIS = "device"
_SPEC = PartitionSpec(_AXIS)


class Exchange:
    """Buffers of one size on every device of a move.

    Args:
      devices: of both sides, in an order that all processes agree on.
      words: in a buffer.
      dtype: of a word.
    """

    def __init__(self, devices: Sequence[Any], words: int, dtype: Any) -> None:
        self._devices = tuple(devices)
        self._mesh = Mesh(np.array(devices, dtype=object), (_AXIS,), axis_types=(AxisType.Auto,))
        self._words = words
        self._place = {device.id: number for number, device in enumerate(devices)}
        self._mine = [d for d in devices if d.process_index == jax.process_index()]
        self._sharding = NamedSharding(self._mesh, _SPEC)
        # Virtual CPU devices share a few threads, and a collective holds one for each device until all have come: what
        # it waits for must not need one.
        self._wait = devices[0].platform == "cpu"
        self.buffers: dict[int, jax.Array] = {d.id: zeros((words,), dtype, d) for d in self._mine}

    def run(self, pairs: Sequence[tuple[int, int]], words: int) -> Mapping[int, jax.Array]:
        """Send the buffers of the first of each pair to the second; what each device of this process received.

        Args:
          pairs: device ids, no sender and no receiver twice.
          words: how much of each buffer.
        """
        if not self._mine:
            return {}
        whole = jax.make_array_from_single_device_arrays(
            (self._words * len(self._devices),), self._sharding, [self.buffers[d.id] for d in self._mine]
        )
        places = tuple((self._place[sender], self._place[receiver]) for sender, receiver in pairs)
        if self._wait:
            jax.block_until_ready(whole)
        moved = _permuted(self._mesh, places, words)(whole)
        if self._wait:
            jax.block_until_ready(moved)
        return {shard.device.id: shard.data for shard in moved.addressable_shards}


@lru_cache(maxsize=1024)
def _permuted(mesh: Mesh, pairs: tuple[tuple[int, int], ...], words: int) -> Any:
    def permute(block: jax.Array) -> jax.Array:
        return lax.ppermute(block[:words], _AXIS, pairs)

    return jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=_SPEC, out_specs=_SPEC, check_vma=False))

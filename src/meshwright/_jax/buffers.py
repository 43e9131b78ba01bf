"""Which buffers an array is made of.

Used of JAX's arrays beyond what is public, the same in JAX 0.10 to 0.12: `_arrays`, the blocks on the devices of this
process, and `_base_array` of a key array. Their public forms (`addressable_shards`, `jax.random.key_data`) make objects
on every call, which takes five to a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax


def addresses(x: jax.Array) -> list[int]:
    """Where the blocks of an array begin, on the devices of this process, in any order. Devices may have equal
    addresses: what differs here is not shared, and what is equal may be (`located`). None for an array without
    elements.

    >>> x = jax.numpy.ones(4)
    >>> addresses(x) == addresses(jax.device_put(x, x.sharding)), addresses(x) == addresses(jax.numpy.copy(x))
    (True, False)
    """
    return [block.unsafe_buffer_pointer() for block in _blocks(x)] if x.size else []


def located(x: jax.Array) -> frozenset[Hashable]:
    """The buffers of an array on the devices of this process: equal for one memory alone."""
    return frozenset((block.device, block.unsafe_buffer_pointer()) for block in _blocks(x)) if x.size else frozenset()


def block_type(x: jax.Array) -> Hashable:
    """Shape and dtype of the blocks of an array: arrays that share a buffer have the same."""
    x = getattr(x, "_base_array", x)
    return x.sharding.shard_shape(x.shape), x.dtype


def _blocks(x: Any) -> Sequence[Any]:
    x = getattr(x, "_base_array", x)
    blocks = getattr(x, "_arrays", None)
    return [shard.data for shard in x.addressable_shards] if blocks is None else blocks

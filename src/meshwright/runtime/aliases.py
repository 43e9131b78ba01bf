"""Arrays that share a buffer, copied before one of them is donated.

A buffer that XLA takes over at two places of a call, or takes over at one and reads at another, is memory used twice:
wrong numbers at best, and the end of the process on CPU devices. Arrays share buffers more often than their program
says: averages and target networks begin as the parameters themselves, and `jax.device_put` gives the blocks that are in
place already another array and no other memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax

from .._jax.buffers import addresses, located


class Unshared:
    """Copies of the donated arguments of a program that share a buffer with something else.

    About a microsecond for each argument where nothing is shared. What is found, and copied, are blocks of this process
    alone, so processes need not agree on it.

    >>> import jax.numpy as jnp
    >>> w = jnp.ones(4)
    >>> state = Unshared(donated=[0, 1])([w, w])
    >>> state[0] is w, state[1] is w
    (True, False)

    Args:
      donated: positions of the arguments whose buffers the program may take over.
      constants: arrays that it holds.
    """

    def __init__(self, donated: Collection[int], constants: Sequence[Any] = ()) -> None:
        self._donated = sorted(donated)
        self._taken = frozenset(donated)
        self._constants = [x for x in constants if isinstance(x, jax.Array) and not x.is_deleted()]

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments. What is donated first of several that share a buffer, and what is not donated, stays what it
        is."""
        found = list(leaves)
        if not self._donated:
            return found
        kept = [x for i, x in enumerate(leaves) if i not in self._taken and isinstance(x, jax.Array)]
        owners: dict[int, list[jax.Array]] = {}
        for x in (*self._constants, *kept):
            _enter(owners, x)
        for i in self._donated:
            x = found[i]
            if isinstance(x, jax.Array):
                if _shares(owners, x):
                    found[i] = copied(x)
                else:
                    _enter(owners, x)
        return found


def _enter(owners: dict[int, list[jax.Array]], x: jax.Array) -> None:
    for address in addresses(x):
        owners.setdefault(address, []).append(x)


def _shares(owners: dict[int, list[jax.Array]], x: jax.Array) -> bool:
    """Whether an array has a buffer of another one: equal addresses may be those of several devices."""
    others = {id(other): other for address in addresses(x) for other in owners.get(address, ())}
    if not others:
        return False
    mine = located(x)
    return any(not mine.isdisjoint(located(other)) for other in others.values())


def copied(x: jax.Array) -> jax.Array:
    """The same array in buffers of its own, copied block by block."""
    blocks = [jax.numpy.copy(shard.data) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks, dtype=x.dtype)

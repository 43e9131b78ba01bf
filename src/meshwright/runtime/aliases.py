"""Arrays that share a buffer, copied before one of them is donated.

A buffer that XLA takes over at two places of a call, or takes over at one and reads at another, is memory used twice:
wrong numbers at best, and the end of the process on CPU devices. Arrays share buffers more often than their program
says: averages and target networks begin as the parameters themselves, and `jax.device_put` gives the blocks that are in
place already another array and no other memory.

To ask an array for its buffers makes an object for each of them, tens of microseconds for an array on eight devices. So
what a step returned is remembered: no two results of a program share a buffer, and another array shares one with them
only if its blocks are of the same shape and dtype, in which case they are compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax

from .._jax.buffers import addresses, block_type, located


class Unshared:
    """Copies of the donated arguments of a program that share a buffer with something else.

    What is found, and copied, are blocks of this process alone, so processes need not agree on it.

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
        self._constants = [x for x in constants if isinstance(x, jax.Array) and not x.is_deleted()]
        self._returned: dict[int, weakref.ref[jax.Array]] = {}

    def remember(self, results: Iterable[Any]) -> None:
        """The arrays that the program has just returned, which share no buffers."""
        if self._donated:
            self._returned = {id(x): weakref.ref(x) for x in results if isinstance(x, jax.Array)}

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments. What is donated first of several that share a buffer, and what is not donated, stays what it
        is."""
        if not self._donated or not self._may_share([x for x in leaves if isinstance(x, jax.Array)]):
            return list(leaves)
        found = list(leaves)
        taken_over = set(self._donated)
        kept = [x for i, x in enumerate(leaves) if i not in taken_over and isinstance(x, jax.Array)]
        taken = {buffer for x in (*self._constants, *kept) for buffer in located(x)}
        for i in self._donated:
            if isinstance(x := found[i], jax.Array):
                if taken.isdisjoint(mine := located(x)):
                    taken |= mine
                else:
                    found[i] = copied(x)
        return found

    def _may_share(self, arrays: Sequence[jax.Array]) -> bool:
        """Whether any two of the arguments may share a buffer, or one with a constant."""
        if len({id(x) for x in arrays}) < len(arrays):
            return True
        others = [x for x in arrays if not self._was_returned(x)]
        beside = [address for x in (*others, *self._constants) for address in addresses(x)]
        if len(set(beside)) < len(beside):
            return True
        dtypes = {x.dtype for x in others}
        alike = [x for x in arrays if x.dtype in dtypes and self._was_returned(x)]
        kinds = {block_type(x) for x in others} if alike else set()
        known = {address for x in alike if block_type(x) in kinds for address in addresses(x)}
        return not known.isdisjoint(beside)

    def _was_returned(self, x: jax.Array) -> bool:
        known = self._returned.get(id(x))
        return known is not None and known() is x


def copied(x: jax.Array) -> jax.Array:
    """The same array in buffers of its own, copied block by block."""
    blocks = [jax.numpy.copy(shard.data) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks, dtype=x.dtype)

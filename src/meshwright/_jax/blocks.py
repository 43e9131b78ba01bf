"""Arrays taken apart into blocks and put together from them, for what does so thousands of times: the public ways
compare everything each time, which takes longer than to move some kilobytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.array import ArrayImpl
from jax._src.core import ShapedArray
from jax.sharding import Sharding


def local_devices_in_order(sharding: Sharding) -> tuple[jax.Device, ...]:
    """The devices of this process in the order of their blocks."""
    return tuple(sharding._addressable_device_assignment)


def blocks_of(array: jax.Array) -> Sequence[jax.Array]:
    """The blocks on devices of this process, in the order of these.

    Raises RuntimeError if the array was deleted or donated.
    """
    array._check_if_deleted()
    return array._arrays


class Assembly:
    """Puts arrays of one shape, dtype and layout together.

    Args:
      shape: of the array.
      dtype: of the array.
      sharding: of the array.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> None:
        self._aval, self._sharding = ShapedArray(shape, dtype), sharding

    def __call__(self, blocks: Sequence[Any]) -> jax.Array:
        """The array.

        Args:
          blocks: arrays of this process, each of the block's shape, in the order of `local_devices_in_order`. They are
            not looked at.
        """
        return ArrayImpl(self._aval, self._sharding, list(blocks), committed=True, _skip_checks=True)

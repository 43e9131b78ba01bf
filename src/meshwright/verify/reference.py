"""The step on one device, as the user wrote it, and with its sums in other orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._jax.reordered import reordered
from ..targets import LoadedTarget
from .numbers import numbers_of

# Rotations of the sums; sizes are seldom multiples of these, which would change nothing.
_ROTATIONS = (1, 7, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A few steps on one device; arrays as `numbers_of` gives them, by leaf of the step's results.

    Args:
      start: the state before the first step.
      wanted: the results of the last.
      reordered: the results of the last with sums in other orders, each from the same start.
      following: the arguments of the step after.
    """

    start: list[np.ndarray]
    wanted: list[np.ndarray]
    reordered: list[list[np.ndarray]]
    following: tuple[Any, ...]


class OneDevice:
    """A step on one device, compiled once as it is and once with its sums reordered.

    Args:
      target: the step.
      num_state: how many of its leading leaves are state, that is, come back as the leading results.
      steps: that are run from each start.
    """

    def __init__(self, target: LoadedTarget, num_state: int, steps: int) -> None:
        self._num_state, self._steps = num_state, steps
        tree = jax.tree.structure(tuple(target.example_args))
        self._tree = tree
        self._plain = jax.jit(lambda *flat: jax.tree.leaves(target.step(*jax.tree.unflatten(tree, flat))))
        self._reordered = jax.jit(reordered(target.step, *target.example_args))

    def run(self, args: tuple[Any, ...]) -> Reference:
        """All of it, from one start.

        Args:
          args: arguments of the step, which are not donated.
        """
        leaves = jax.tree.leaves(args)
        start = [numbers_of(leaf) for leaf in map(jax.numpy.asarray, leaves[: self._num_state])]
        out = self._results(leaves, ())
        others = [[numbers_of(leaf) for leaf in self._results(leaves, (np.int32(r),))] for r in _ROTATIONS]
        following = jax.tree.unflatten(self._tree, [*out[: self._num_state], *leaves[self._num_state :]])
        return Reference(
            start=start, wanted=[numbers_of(leaf) for leaf in out], reordered=others, following=following
        )  # fmt: skip

    def _results(self, leaves: Sequence[Any], rotation: tuple[Any, ...]) -> list[Any]:
        step = self._reordered if rotation else self._plain
        state, rest = leaves[: self._num_state], leaves[self._num_state :]
        out: list[Any] = []
        for _ in range(self._steps):
            out = step(*rotation, *state, *rest)
            state = out[: self._num_state]
        return out

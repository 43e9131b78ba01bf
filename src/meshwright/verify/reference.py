"""The step on one device, as the user wrote it, and where that is needed with its sums in other orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from .._jax.reordered import reordered
from ..targets import LoadedTarget
from .numbers import numbers_of

# Where sums are cut in two.
_CUTS = (0.25, 0.5, 0.75)

# The reordered program has twice the products and runs a few times: on a CPU this compiles in a fraction of the time.
_QUICKLY = {"cpu": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A few steps on one device; arrays as `numbers_of` gives them, by leaf of the step's results.

    Args:
      start: the state before the first step.
      wanted: the results of the last.
      following: the arguments of the step after.
    """

    start: list[np.ndarray]
    wanted: list[np.ndarray]
    following: tuple[Any, ...]


class OneDevice:
    """A step on one device, compiled once as it is, and once with its sums reordered when that is first asked for.

    Args:
      target: the step.
      num_state: how many of its leading leaves are state, that is, come back as the leading results.
      steps: that are run from each start.
    """

    def __init__(self, target: LoadedTarget, num_state: int, steps: int) -> None:
        self._target, self._num_state, self._steps = target, num_state, steps
        tree = jax.tree.structure(tuple(target.example_args))
        self._tree = tree
        self._plain = jax.jit(lambda *flat: jax.tree.leaves(target.step(*jax.tree.unflatten(tree, flat))))

    def run(self, args: tuple[Any, ...]) -> Reference:
        """The step as it is, from one start.

        Args:
          args: arguments of the step, which are not donated.
        """
        leaves = jax.tree.leaves(args)
        start = [numbers_of(leaf) for leaf in map(jax.numpy.asarray, leaves[: self._num_state])]
        out = self._results(leaves, ())
        following = jax.tree.unflatten(self._tree, [*out[: self._num_state], *leaves[self._num_state :]])
        return Reference(start=start, wanted=[numbers_of(leaf) for leaf in out], following=following)

    def reordered(self, args: tuple[Any, ...]) -> list[list[np.ndarray]]:
        """The results of the last step with sums in other orders, each from the same start.

        Args:
          args: as of `run`.
        """
        leaves = jax.tree.leaves(args)
        return [[numbers_of(leaf) for leaf in self._results(leaves, (np.float32(cut),))] for cut in _CUTS]

    @cached_property
    def _reordered(self) -> Any:
        target = self._target
        options = _QUICKLY.get(jax.default_backend())
        return jax.jit(reordered(target.step, *target.example_args), compiler_options=options)

    def _results(self, leaves: Sequence[Any], cut: tuple[Any, ...]) -> list[Any]:
        step = self._reordered if cut else self._plain
        state, rest = leaves[: self._num_state], leaves[self._num_state :]
        out: list[Any] = []
        for _ in range(self._steps):
            out = step(*cut, *state, *rest)
            state = out[: self._num_state]
        return out

"""The arguments of a step, as they come from the user, made ready for its programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._jax.jaxpr import consts_of
from .._jax.placement import untyped
from ..program.trace import Program
from .aliases import Unshared
from .placing import check_not_donated


class Arguments:
    """What is done to the leaves of a step's arguments before they are placed.

    Args:
      program: the step.
    """

    def __init__(self, program: Program) -> None:
        self._names = program.input_names
        self._unshared = Unshared(program.donated, consts_of(program.outer))

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves: those that are donated in buffers of their own, and none of a type that names a mesh.

        Raises:
          PlanError: if an earlier step has taken one over.
        """
        for x, name in zip(leaves, self._names, strict=True):
            check_not_donated(x, name)
        return [untyped(x) for x in self._unshared(leaves)]

    def remember(self, results: Sequence[Any]) -> None:
        """What the step has returned, in the next call the state."""
        self._unshared.remember(results)

"""What each choice of an operator and of a parameter costs: one number for each choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .choices import ParameterChoice
from .spec_row import SpecRow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorPrices:
    """What is known of all operators that are alike.

    Args:
      choices: how they can be run.
      operands: of each operand, the spec that each choice reads.
      results: of each result, the spec that each choice makes.
      forward_seconds: of one run of each choice; like the next, the same whether it is rematerialised or not.
      backward_seconds: the same.
      weight_seconds: of these, what computes gradients of parameters.
    """

    choices: tuple[Any, ...]
    operands: tuple[SpecRow, ...]
    results: tuple[SpecRow, ...]
    forward_seconds: np.ndarray
    backward_seconds: np.ndarray
    weight_seconds: np.ndarray
    in_step: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def seconds(self, forward_runs: int, times: int) -> np.ndarray:
        """Of so many times in a step so many runs forward and one backward, of each choice; not to be changed."""
        key = forward_runs, times
        if key not in self.in_step:
            self.in_step[key] = times * (forward_runs * self.forward_seconds + self.backward_seconds)
        return self.in_step[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterPrices:
    """Of each choice of a parameter; arrays have one number for each.

    Args:
      choices: its layouts.
      synchronise_seconds: of its gradient over devices, unless it is scattered, and of fetching it as it is used.
      fixed_seconds: its share of what the start of the one sum of all gradients costs.
      update_seconds: of the optimizer.
      scatter_seconds: of scattering its gradient, for each microbatch.
      accumulate_seconds: of adding up gradients, for each of several microbatches.
      held_bytes: of the parameter, its gradient and optimizer state on one device.
      stacked_bytes: of a gradient whose rows a loop scatters, beside the sum that it is added to.
    """

    choices: tuple[ParameterChoice, ...]
    synchronise_seconds: np.ndarray
    fixed_seconds: np.ndarray
    update_seconds: np.ndarray
    scatter_seconds: np.ndarray
    accumulate_seconds: np.ndarray
    held_bytes: np.ndarray
    stacked_bytes: np.ndarray

    @cached_property
    def uses(self) -> SpecRow:
        """Of each choice, the spec that readers see."""
        return SpecRow(choice.use for choice in self.choices)

    def seconds(self, microbatches: int) -> np.ndarray:
        """Of a step."""
        once = self.synchronise_seconds + self.update_seconds
        return once + microbatches * self.each_seconds(microbatches)

    def each_seconds(self, microbatches: int) -> np.ndarray:
        """Of each of so many microbatches."""
        return self.scatter_seconds + self.accumulate_seconds if microbatches > 1 else self.scatter_seconds

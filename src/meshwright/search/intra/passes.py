"""What the two passes of a solved problem take, apart: a pipeline's transfers and memory lie between them.

The forward pass is priced by itself, from the same prices: of each operator its forward kernels, and of each conversion
its forward collectives. What remains of the problem's objective is the backward pass, rematerialisation
included, once what happens once a step (gradient synchronisation, the optimizer's update) is taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cost.compute import elementwise_seconds
from ...solve.flat import FlatNodes
from ..prices.spec_row import SpecRow
from .problem import IntraOpProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Where the seconds of a step go.

    Args:
      forward: of one microbatch.
      backward: of one microbatch.
      weight: of that, the gradients of parameters, which nobody waits for.
      synchronise: of the gradients, once a step.
      update: of the optimizer, once a step.
    """

    forward: float
    backward: float
    weight: float
    synchronise: float
    update: float


class Passes:
    """The passes of one problem, for any of its solutions.

    Args:
      problem: whose operators, parameters and conversions these are.
    """

    def __init__(self, problem: IntraOpProblem) -> None:
        self._problem = problem

    def seconds(self, picked: Sequence[int], objective: float) -> PassSeconds:
        """What a solution takes, pass by pass; all of it together is the objective.

        Args:
          picked: its choice of each node.
          objective: its seconds in a step.
        """
        choices = np.array(picked, dtype=int)
        microbatches = self._problem.microbatches
        nodes, once = self._parameters
        synchronise, update, accumulate = once.sum(choices[nodes]).tolist()
        made, weight = self._operators(picked)
        written = sum(row.item(picked[node]) for node, row in self._inputs)
        moved = sum(times * once.item(picked[u], picked[v]) for u, v, times, once in self._conversions)
        forward = made + written + moved
        backward = max(0.0, (objective - synchronise - update) / microbatches - forward)
        accumulate *= microbatches > 1
        return PassSeconds(
            forward=forward, backward=backward, weight=min(backward, weight + accumulate),
            synchronise=max(0.0, synchronise), update=update,
        )  # fmt: skip

    @cached_property
    def _inputs(self) -> list[tuple[int, np.ndarray]]:
        """Nodes of inputs that are no parameters, with what each choice takes to write in a microbatch."""
        problem, found = self._problem, []
        write = elementwise_seconds(1.0, problem.prices.device)
        for position, value in enumerate(problem.graph.inputs):
            if position not in problem.graph.parameters:
                node = problem.input_node[value]
                shards = problem.prices.shards(SpecRow(problem.choices[node]))
                found.append((node, write * problem.graph.values[value].bytes / shards))
        return found

    @cached_property
    def _conversions(self) -> list[tuple[int, int, float, np.ndarray]]:
        """Of each move its nodes, how often a microbatch makes it, and what it takes forward. A problem has few
        solutions that anybody asks for: numbers are taken out of the tables that there are."""
        problem, found = self._problem, []
        for move in problem.moves:
            value = problem.graph.values[move.value]
            once = problem.prices.forward_table(
                move.sources, move.targets, value.bytes, differentiated=value.differentiated
            )
            found.append((move.source, move.target, move.times, once))
        return found

    @cached_property
    def _parameters(self) -> tuple[np.ndarray, FlatNodes]:
        """Nodes of parameters; of each what synchronising, the update and adding up gradients takes."""
        prices = self._problem.parameter_prices
        known = prices.values()
        return np.array(list(prices), dtype=int), FlatNodes(
            [one.synchronise_seconds for one in known], [one.update_seconds for one in known],
            [one.accumulate_seconds for one in known],
        )  # fmt: skip

    def _operators(self, picked: Sequence[int]) -> tuple[float, float]:
        """Of one microbatch forward, and of the backward pass what computes gradients of parameters."""
        problem = self._problem
        prices, nodes = problem.operator_prices, problem.operator_node
        forward = weight = 0.0
        for operator in problem.operators:
            known, number = prices[operator.index], picked[nodes[operator.index]]
            forward += operator.repeats * known.forward_seconds.item(number)
            weight += operator.repeats * known.weight_seconds.item(number)
        return forward, weight

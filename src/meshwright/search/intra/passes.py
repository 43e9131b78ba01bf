"""The seconds of a solution by pass: a pipeline's transfers and memory lie between the passes.

The forward pass is priced by itself, from the same tables: each operator's forward kernels and each conversion's
forward collectives. The rest of the objective, less what runs once a step (gradient synchronisation and the optimizer's
update), is the backward pass, rematerialisation included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        # Not the problem itself, which may hold these: it is freed with whoever built it.
        self._microbatches, self._operators = problem.microbatches, problem.operators
        self._operator_prices, self._operator_node = problem.operator_prices, problem.operator_node
        self._inputs, self._conversions = _inputs_of(problem), _conversions_of(problem)
        known = problem.parameter_prices.values()
        # The nodes of parameters, each with its seconds of synchronisation, update and gradient accumulation.
        self._parameters = np.array(list(problem.parameter_prices), dtype=int), FlatNodes(
            [one.synchronise_seconds for one in known], [one.update_seconds for one in known],
            [one.each_seconds(problem.microbatches) for one in known],
        )  # fmt: skip

    def seconds(self, picked: Sequence[int], objective: float) -> PassSeconds:
        """The seconds of a solution by pass; together they are the objective.

        Args:
          picked: its choice of each node.
          objective: its seconds in a step.
        """
        choices = np.array(picked, dtype=int)
        microbatches = self._microbatches
        nodes, once = self._parameters
        synchronise, update, accumulate = once.sum(choices[nodes]).tolist()
        made, weight = self._made(picked)
        written = sum(row.item(picked[node]) for node, row in self._inputs)
        moved = sum(times * once.item(picked[u], picked[v]) for u, v, times, once in self._conversions)
        forward = made + written + moved
        backward = max(0.0, (objective - synchronise - update) / microbatches - forward)
        return PassSeconds(
            forward=forward, backward=backward, weight=min(backward, weight + accumulate),
            synchronise=max(0.0, synchronise), update=update,
        )  # fmt: skip

    def _made(self, picked: Sequence[int]) -> tuple[float, float]:
        """Seconds of one microbatch: of the forward pass, and of the backward pass's gradients of parameters."""
        prices, nodes = self._operator_prices, self._operator_node
        forward = weight = 0.0
        for operator in self._operators:
            known, number = prices[operator.index], picked[nodes[operator.index]]
            forward += operator.repeats * known.forward_seconds.item(number)
            weight += operator.repeats * known.weight_seconds.item(number)
        return forward, weight


def _inputs_of(problem: IntraOpProblem) -> list[tuple[int, np.ndarray]]:
    """The nodes of inputs that are no parameters, each with the seconds in which its choices write a microbatch."""
    found = []
    write = elementwise_seconds(1.0, problem.prices.device)
    for position, value in enumerate(problem.graph.inputs):
        if position not in problem.graph.parameters:
            node = problem.input_node[value]
            shards = problem.prices.shards(SpecRow(problem.choices[node]))
            found.append((node, write * problem.graph.values[value].bytes / shards))
    return found


def _conversions_of(problem: IntraOpProblem) -> list[tuple[int, int, float, np.ndarray]]:
    """The nodes of each conversion, how often a microbatch makes it, and its forward seconds. Few solutions of a
    problem are split by pass, so only the pairs that they choose are looked up."""
    found = []
    for move in problem.moves:
        value = problem.graph.values[move.value]
        once = problem.prices.conversion_table(
            move.sources, move.targets, value.bytes, forward_runs=1, differentiated=value.differentiated,
            backward=False, exposure=problem.prices.exposure(problem.graph, move.value),
        )  # fmt: skip
        found.append((move.source, move.target, move.times, once))
    return found

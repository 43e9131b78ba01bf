"""What the two passes of a solved problem take, apart: a pipeline's transfers and memory lie between them.

The forward pass is priced by itself, from the same prices: of each operator its forward kernels, and of each conversion
its forward collectives. What remains of the problem's objective is the backward pass, rematerialisation
included, once what happens once a step (gradient synchronisation, the optimizer's update) is taken off.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost.compute import elementwise_seconds
from ..program.graph import Operator
from ..sharding import Spec
from .intra_op import IntraOpProblem, IntraOpSolution


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


def pass_seconds(problem: IntraOpProblem, chosen: IntraOpSolution) -> PassSeconds:
    """What a solution of a problem takes, pass by pass; all of it together is the objective."""
    synchronise = update = accumulate = 0.0
    for info, position, choice in zip(problem.parameters, problem.graph.parameters, chosen.parameters, strict=True):
        size = problem.graph.values[problem.graph.inputs[position]].bytes
        both, _ = problem.parameter_price(size, info, choice)
        shards = choice.storage.shards(problem.sizes)
        mine = elementwise_seconds((2 * info.optimizer_bytes + 3 * size) / shards, problem.prices.device)
        added = problem.accumulate_seconds(size, choice)
        synchronise += both - mine - added
        update += mine
        accumulate += added / problem.microbatches
    forward = _forward_seconds(problem, chosen)
    backward = max(0.0, (chosen.solution.objective - synchronise - update) / problem.microbatches - forward)
    return PassSeconds(
        forward=forward, backward=backward, weight=min(backward, _weight_seconds(problem, chosen) + accumulate),
        synchronise=max(0.0, synchronise), update=update,
    )  # fmt: skip


def _forward_seconds(problem: IntraOpProblem, chosen: IntraOpSolution) -> float:
    """Of one microbatch."""
    graph, prices = problem.graph, problem.prices
    total = 0.0
    spec_of: dict[int, Spec] = dict(zip(graph.inputs, chosen.inputs, strict=True))
    for position, value in enumerate(graph.inputs):
        if position not in graph.parameters:
            total += elementwise_seconds(
                graph.values[value].bytes / spec_of[value].shards(problem.sizes), prices.device
            )
    for operator, choice in zip(graph.operators, chosen.operators, strict=True):
        if choice is None:
            continue
        total += operator.repeats * _operator_passes(problem, chosen, operator)[0]
        spec_of.update({v: choice.algorithm.results[i] for i, v in enumerate(operator.results) if v is not None})
    for value, target in chosen.settled.items():
        maker = graph.operators[graph.producer[value][0]]
        total += problem.trips(maker, value) * _moved_seconds(problem, value, spec_of[value], target)
        spec_of[value] = target
    for operator, choice in zip(graph.operators, chosen.operators, strict=True):
        if choice is None:
            continue
        for position, value in enumerate(operator.operands):
            if value is not None and value in spec_of:
                seconds = _moved_seconds(problem, value, spec_of[value], choice.algorithm.operands[position])
                total += operator.operand_repeats[position] * seconds
    for value in graph.outputs:
        if value is not None and value in spec_of:
            total += _moved_seconds(problem, value, spec_of[value], Spec(spec_of[value].dims))
    return total


def _weight_seconds(problem: IntraOpProblem, chosen: IntraOpSolution) -> float:
    """Of the backward pass of one microbatch, what computes gradients of parameters."""
    return sum(
        operator.repeats * _operator_passes(problem, chosen, operator)[1]
        for operator, choice in zip(problem.graph.operators, chosen.operators, strict=True)
        if choice is not None
    )


def _operator_passes(problem: IntraOpProblem, chosen: IntraOpSolution, operator: Operator) -> tuple[float, float]:
    """Seconds of one run of an operator forward, and of the backward pass what computes gradients of parameters."""
    known = problem.operator_prices[operator.index]
    number = chosen.solution.choices[problem.operator_node[operator.index]]
    if number not in known.passes:
        algorithm = known.choices[number].algorithm
        known.passes[number] = problem.prices.operator_passes(problem.graph, operator, algorithm, problem.of_parameters)
    return known.passes[number]


def _moved_seconds(problem: IntraOpProblem, value: int, source: Spec, target: Spec) -> float:
    """Of the forward collectives of one conversion."""
    array = problem.graph.values[value]
    if not array.differentiated:
        source, target = source.without_broadcast(), target.without_broadcast()
    return problem.prices.moved_seconds(array.bytes, source, target)

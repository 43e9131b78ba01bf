"""What one device does in a solved stage: kernels and collectives with how often each runs, forward and backward.

The list holds no prices but what prices need, so one solved stage can be priced under many efficiency profiles
(`cost.efficiency`): fitting a profile solves nothing anew. Kernels are those of `search.prices.kernels`, collectives
those of `search.intra.account`: each conversion of a value once for readers that want it in the same spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from meshwright.cost.kernels import Kernel
from meshwright.search.intra.account import conversions
from meshwright.search.intra.problem import IntraOpSolution
from meshwright.search.stages.problem import StageProblem
from meshwright.sharding import Spec, convert

_Thing = TypeVar("_Thing", Kernel, "Movement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """How often something runs for one microbatch.

    Args:
      forward: in the forward pass.
      again: in the backward pass, because it is rematerialised.
      backward: for the derivative.
      in_loop: whether it is part of a loop over layers.
    """

    forward: float = 0.0
    again: float = 0.0
    backward: float = 0.0
    in_loop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """A collective.

    Args:
      kind: see `cost.collective`.
      size_bytes: its buffer, as `cost.collective` counts it.
      axes: it spans.
      weights: whether it moves parameters or their gradients, which can run ahead of or behind compute.
    """

    kind: str
    size_bytes: float
    axes: tuple[str, ...]
    weights: bool


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """All of a stage.

    Args:
      kernels: with their runs a microbatch.
      movements: with their runs a microbatch.
      synchronise: once a step: of gradients before the update.
      fetch: once a step: of parameters after the update.
      update_bytes: that the optimizer reads and writes.
    """

    kernels: tuple[tuple[Kernel, Runs], ...]
    movements: tuple[tuple[Movement, Runs], ...]
    synchronise: tuple[Movement, ...]
    fetch: tuple[Movement, ...]
    update_bytes: float


def stage_work(problem: StageProblem, chosen: IntraOpSolution) -> StageWork:
    """What a solution of a stage's problem does."""
    synchronise, fetch, update = _parameters(problem, chosen)
    return StageWork(
        kernels=_merged(_kernels(problem, chosen)), movements=_merged(_movements(problem, chosen)),
        synchronise=synchronise, fetch=fetch, update_bytes=update,
    )  # fmt: skip


def _merged(found: Iterable[tuple[_Thing, Runs]]) -> tuple[tuple[_Thing, Runs], ...]:
    total: dict[tuple[_Thing, bool], Runs] = {}
    for one, runs in found:
        have = total.get((one, runs.in_loop), Runs())
        total[one, runs.in_loop] = Runs(
            forward=have.forward + runs.forward, again=have.again + runs.again, backward=have.backward + runs.backward,
            in_loop=runs.in_loop,
        )  # fmt: skip
    return tuple((one, runs) for (one, _), runs in total.items())


def _kernels(problem: StageProblem, chosen: IntraOpSolution) -> Iterator[tuple[Kernel, Runs]]:
    graph = problem.graph
    for operator, choice in zip(graph.operators, chosen.operators, strict=True):
        if choice is None or operator.is_link:
            continue
        if operator.name == "convert_element_type" and operator.operands[0] in problem.of_parameters:
            continue  # software that trains in two bytes keeps its parameters in two, too
        again = problem.forward_runs(operator) - 1
        found = problem.prices.kernels(graph, operator, choice.algorithm)
        n, in_loop = operator.repeats, len(operator.path) > 1
        for kernel in (found.forward, *found.copies):
            yield kernel, Runs(forward=n, again=n * again, in_loop=in_loop)
        for gradient in found.gradients:
            yield gradient.kernel, Runs(backward=n * gradient.runs, in_loop=in_loop)


def _movements(problem: StageProblem, chosen: IntraOpSolution) -> Iterator[tuple[Movement, Runs]]:
    graph, sizes = problem.graph, problem.sizes
    for conversion, value, forward_runs, count in conversions(problem, chosen):
        array = graph.values[value]
        if prod(array.shape) == 1:
            continue
        weights = value in problem.of_parameters
        for step in conversion:
            size = array.bytes * step.buffer_fraction(sizes)
            if step.forward is not None:
                runs = Runs(forward=count, again=(forward_runs - 1) * count)
                yield _movement(step.forward, size, step.axes, weights), runs
            if step.backward is not None and array.differentiated:
                yield _movement(step.backward, size, step.axes, weights), Runs(backward=count)
    for operator, choice in zip(graph.operators, chosen.operators, strict=True):
        if choice is None:
            continue
        again = problem.forward_runs(operator) - 1
        for inner in problem.prices.inner_collectives(graph, operator, choice.algorithm):
            n = operator.repeats
            runs = Runs(forward=n * inner.forward, again=n * again * inner.forward, backward=n * float(inner.backward))
            yield _movement(inner.kind, inner.size_bytes, inner.axes, False), runs


def _movement(kind: str, size: float, axes: Sequence[str], weights: bool) -> Movement:
    return Movement(kind=kind, size_bytes=size, axes=tuple(axes), weights=weights)


def _parameters(
    problem: StageProblem, chosen: IntraOpSolution
) -> tuple[tuple[Movement, ...], tuple[Movement, ...], float]:
    """Collectives of gradients and of updated parameters, once a step; those of one kind and axes together."""
    graph, sizes = problem.graph, problem.sizes
    totals: tuple[dict[tuple[str, tuple[str, ...]], float], ...] = ({}, {})
    update = 0.0
    for info, position, choice in zip(problem.parameters, graph.parameters, chosen.parameters, strict=True):
        size = graph.values[graph.inputs[position]].bytes
        gradient = convert(Spec(choice.use.dims, partial=choice.use.broadcast), choice.storage)
        fetch = convert(choice.storage, Spec(choice.use.dims))
        assert gradient is not None
        assert fetch is not None
        for total, conversion in zip(totals, (gradient, fetch), strict=True):
            for step in conversion:
                if step.forward is not None:
                    key = step.forward, tuple(step.axes)
                    total[key] = total.get(key, 0.0) + size * step.buffer_fraction(sizes)
        shards = choice.storage.shards(sizes)
        update += (2 * info.optimizer_bytes + 3 * size) / shards
    both = tuple(
        tuple(_movement(kind, size, axes, True) for (kind, axes), size in sorted(total.items())) for total in totals
    )
    return both[0], both[1], update

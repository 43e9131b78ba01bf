"""The collectives and FLOPs of a solution: the collectives that the runtime will issue, counted as it issues them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from ...plan import Collective
from ...sharding import Conversion, Spec, convert
from ..prices.choices import loop_rows
from ..prices.parameters import central_messages
from .problem import IntraOpProblem, IntraOpSolution


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A collective that one device issues `count` times in a step.

    Args:
      kind: as of `plan.Collective`.
      axes: of the mesh that it runs over; over axes of one device nothing moves.
      size_bytes: of its buffer, as `cost.collective` defines it.
      count: in a step.
      when: "forward" or "backward" for each microbatch (what is rematerialised runs again in the backward pass), or
        "step": once a step, for a gradient or a parameter.
      strided: as of `sharding.conversion.Step`.
      starts: how much of the cost of a start it pays (`search.prices.exposure`).
    """

    kind: str
    axes: tuple[str, ...]
    size_bytes: float
    count: int
    when: Literal["forward", "backward", "step"]
    strided: bool = False
    starts: float = 1.0


@dataclass(slots=True)
class Account:
    """Totals of one step on one device."""

    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    flops: float = 0.0
    traffic: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, kind: str, size_bytes: float, seconds: float, count: int) -> None:
        """Count `count` collectives of `size_bytes`, `seconds` each."""
        have = self.traffic.get(kind, (0, 0.0))
        self.traffic[kind] = (have[0] + count, have[1] + count * size_bytes)
        self.communication_seconds += count * seconds

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The traffic by kind."""
        return tuple(Collective(kind=k, count=c, bytes=b) for k, (c, b) in sorted(self.traffic.items()))


def account(problem: IntraOpProblem, chosen: IntraOpSolution) -> Account:
    """Totals of a solution. Collectives on single elements are left out: they carry no bytes worth counting."""
    total = Account()
    for one in issued(problem, chosen):
        seconds = problem.prices.collective(one.kind, one.size_bytes, one.axes, strided=one.strided)
        seconds -= (1 - one.starts) * problem.prices.collective(one.kind, 1.0, one.axes)
        total.add(one.kind, one.size_bytes, seconds, one.count)
    _compute(problem, chosen, total)
    return total


def issued(problem: IntraOpProblem, chosen: IntraOpSolution) -> Iterator[Issued]:
    """The collectives of a solution, in no particular order; those on single elements are left out."""
    for conversion, value, forward_runs, count in conversions(problem, chosen):
        yield from _of_conversion(problem, conversion, value, forward_runs, problem.microbatches * count)
    yield from _of_operators(problem, chosen)
    yield from _of_parameters(problem, chosen)


def _of_conversion(
    problem: IntraOpProblem, conversion: Conversion, value: int, forward_runs: int, count: int
) -> Iterator[Issued]:
    array = problem.graph.values[value]
    if prod(array.shape) == 1:
        return
    starts = problem.prices.exposure(problem.graph, value).starts
    for step in conversion:
        size = array.bytes * step.buffer_fraction(problem.sizes)
        if step.forward is not None:
            yield Issued(
                kind=step.forward, axes=step.axes, size_bytes=size, count=count, when="forward", strided=step.strided,
                starts=starts,
            )  # fmt: skip
            if forward_runs > 1:
                yield Issued(
                    kind=step.forward, axes=step.axes, size_bytes=size, count=(forward_runs - 1) * count,
                    when="backward", strided=step.strided, starts=starts,
                )  # fmt: skip
        if step.backward is not None and array.differentiated:
            yield Issued(
                kind=step.backward, axes=step.axes, size_bytes=size, count=count, when="backward", strided=step.strided,
                starts=starts,
            )  # fmt: skip


def conversions(problem: IntraOpProblem, chosen: IntraOpSolution) -> Iterator[tuple[Conversion, int, int, int]]:
    """The conversions that the runtime makes in a microbatch: readers of one value in one spec and one scope share one.

    Yields:
      The conversion, the value, how often it runs forward for each time it is made (twice where it is rematerialised),
      and how often it is made.
    """
    graph = problem.graph
    spec_of: dict[int, Spec] = dict(zip(graph.inputs, chosen.inputs, strict=True))
    for operator, choice in zip(graph.operators, chosen.operators, strict=True):
        if choice is not None:
            for position, value in enumerate(operator.results):
                if value is not None:
                    spec_of[value] = choice.algorithm.results[position]
    for value, target in chosen.resharded_once.items():
        maker = graph.operators[graph.producer[value][0]]
        runs = problem.forward_runs_of(value, maker)
        found = _plain(problem, value, spec_of[value], target)
        yield found, value, runs, problem.trips(maker, value)
        spec_of[value] = target
    seen: set[tuple[Any, ...]] = set()
    for operator, choice in zip(graph.operators, chosen.operators, strict=True):
        if choice is None:
            continue
        for position, value in enumerate(operator.operands):
            if value is None or value not in spec_of:
                continue
            target = choice.algorithm.operands[position]
            repeats = operator.operand_repeats[position]
            key = (value, target, operator.region, repeats)
            if key not in seen:
                seen.add(key)
                found = _plain(problem, value, spec_of[value], target)
                yield found, value, problem.forward_runs_of(value, operator), repeats
    for position, value in enumerate(graph.outputs):
        if value is not None and value in spec_of:
            spec = spec_of[value]
            target = chosen.inputs[position] if position < problem.carried else Spec(spec.dims)
            if (value, target, None, 1) not in seen:
                yield _plain(problem, value, spec, target), value, 1, 1


def _plain(problem: IntraOpProblem, value: int, source: Spec, target: Spec) -> Conversion:
    if not problem.graph.values[value].differentiated:
        source, target = source.without_broadcast(), target.without_broadcast()
    conversion = convert(source, target)
    assert conversion is not None, (source, target)
    return conversion


def _compute(problem: IntraOpProblem, chosen: IntraOpSolution, total: Account) -> None:
    graph, m, prices = problem.graph, problem.microbatches, problem.prices
    for operator, choice in zip(graph.operators, chosen.operators, strict=True):
        if choice is None:
            continue
        runs = problem.forward_runs(operator)
        compute, _ = prices.operator(graph, operator, choice.algorithm, forward_runs=runs)
        total.compute_seconds += m * operator.repeats * compute
        if operator.matmul:
            kernels = prices.kernels(graph, operator, choice.algorithm)
            flops = runs * kernels.forward.flops + sum(one.runs * one.kernel.flops for one in kernels.gradients)
            total.flops += m * operator.repeats * flops


def _of_operators(problem: IntraOpProblem, chosen: IntraOpSolution) -> Iterator[Issued]:
    graph = problem.graph
    for operator, choice in zip(graph.operators, chosen.operators, strict=True):
        if choice is None:
            continue
        results = [graph.values[v].shape for v in operator.results if v is not None]
        if all(prod(shape) == 1 for shape in results):
            continue
        count = problem.microbatches * operator.repeats
        again = problem.forward_runs(operator) - 1
        for inner in problem.prices.inner_collectives(graph, operator, choice.algorithm):
            for runs, when in ((inner.forward, "forward"), (again * inner.forward + inner.backward, "backward")):
                if runs:
                    yield Issued(
                        kind=inner.kind, axes=inner.axes, size_bytes=inner.size_bytes, count=runs * count, when=when
                    )


def _scattered(problem: IntraOpProblem, parameter: int, gradient: Conversion) -> Iterator[Issued]:
    """Of a gradient that each microbatch scatters, row by row where a loop makes it."""
    array, rows = problem.graph.values[parameter], loop_rows(problem.graph, parameter)
    count = array.shape[rows.dim] if rows is not None else 1
    starts = problem.prices.exposure(problem.graph, rows.row if rows is not None else parameter).starts
    for step in gradient:
        if step.forward is not None and prod(array.shape) > 1:
            yield Issued(
                kind=step.forward, axes=step.axes, size_bytes=array.bytes / count * step.buffer_fraction(problem.sizes),
                count=problem.microbatches * count, when="backward", strided=step.strided, starts=starts,
            )  # fmt: skip


def _of_parameters(problem: IntraOpProblem, chosen: IntraOpSolution) -> Iterator[Issued]:
    graph = problem.graph
    central: dict[tuple[tuple[str, ...], str], float] = {}
    for position, choice in zip(graph.parameters, chosen.parameters, strict=True):
        value = graph.values[graph.inputs[position]]
        gradient = convert(Spec(choice.use.dims, partial=choice.use.broadcast), choice.storage)
        fetch = convert(choice.storage, Spec(choice.use.dims))
        assert gradient is not None
        assert fetch is not None
        # Plain sums of all gradients run as one collective.
        plain = len(gradient) == 1 and gradient[0].forward == "all_reduce"
        joined = problem.prices.exposure(graph, value.index).starts
        if choice.scattered:
            yield from _scattered(problem, value.index, gradient)
            gradient = ()
        for conversion, starts in ((gradient, 1 / len(graph.parameters) if plain else joined), (fetch, joined)):
            for step in conversion:
                size = value.bytes * step.buffer_fraction(problem.sizes)
                if step.forward == "all_reduce" and problem.gradient_exchange == "central":
                    central[step.axes, value.dtype] = central.get((step.axes, value.dtype), 0.0) + size
                elif step.forward is not None and prod(value.shape) > 1:
                    yield Issued(
                        kind=step.forward, axes=step.axes, size_bytes=size, count=1, when="step", strided=step.strided,
                        starts=starts,
                    )  # fmt: skip
    # What goes to the server goes in one buffer.
    for (axes, _), size in sorted(central.items()):
        yield Issued(
            kind="permute", axes=axes, size_bytes=size, count=central_messages(axes, problem.sizes), when="step"
        )

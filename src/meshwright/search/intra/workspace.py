"""Bytes on a device while the backward pass of a microbatch runs, beside the activations that are kept for it.

They are the largest at the worst moment: the rematerialised values of the current segment that are still to be read,
the cotangents around one operator, and the gradient of a weight before it is added to those of earlier microbatches.
Where several moments are equally bad the mean counts, since layers are laid out alike. How much of it lies on one
device follows from the splits of values, as for all bytes.

What is not rematerialised computes again what is cheap (the argument of a product that an activation function makes),
where it is read: programs are written so that compilers find that order (`lowering.pipeline.stage_program`). Where both
passes are one program, what is not kept (`residuals.kept_in_one_program`) is made inside the kernels that read it.

Compilers for accelerators write of a chain of elementwise operators only what `fused.Writes` names: around an operator
are the cotangents at both ends of its chain, and of what was computed again the values at the heads of chains.

Known limits: the worst moment is chosen on whole arrays, and another one may be worse once they are split. Compilers
fuse more than is counted here of the scores of a large vocabulary (up to twice too much for a stage that has little
else), and a tenth of those of attention; the derivative of a pooling needs several times its operand, of which half is
counted; buffers of collectives are not counted, nor cotangents that wait while a branch runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from ...program.graph import Graph, Operator
from ...program.parameter_values import values_of_parameters
from ...program.residuals import kept_in_one_program, kept_values, read_by_backward, regions
from .fused import Writes

# What a weight passes through on its way to a matrix product.
_SAME_WEIGHT = frozenset(
    {"convert_element_type", "copy", "reshape", "scan_const", "scan_slice", "squeeze", "transpose"}
)  # fmt: skip

# Moments at which this much less is there than at the worst are as bad.
AS_BAD = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The backward pass of one operator.

    Args:
      operator: its index.
      around: how often each value that it reads and makes is there, cotangents included, beside the following.
      again: how often others are there: those computed again and still to be read, of a loop's body in one trip, and
        cotangents at the ends of the operator's chain.
    """

    operator: int
    around: Mapping[int, float]
    again: Mapping[int, float]

    def bytes(self, graph: Graph) -> float:
        """Of all devices together."""
        around = sum(times * graph.values[value].bytes for value, times in self.around.items())
        return around + sum(times * graph.values[value].bytes for value, times in self.again.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What the backward pass of a stage makes.

    Args:
      moments: the worst, of which the mean counts.
      weight: the input with the largest gradient, by its value; None where nothing has to be added to it.
      gradient_bytes: of that gradient, and a cast of the weight where there is one, of all devices together.
      stacks: of whose rows a loop reads what it makes of parameters, and how often they are there beside the parameter
        and its gradient.
      gradients: stacks of parameters of whose rows a loop makes all gradients before they are added to those of earlier
        microbatches, where it scatters them (`_jax.accumulate`); which lasts, and counts for the whole step.
      weights: the largest that the backward pass of one program reads outside loops: reader and operand. Where they
        are gathered, one of them is there at least.
      bytes: of it all, of all devices together.
    """

    moments: tuple[Moment, ...]
    weight: int | None
    gradient_bytes: float
    stacks: Mapping[int, float]
    gradients: frozenset[int]
    weights: tuple[tuple[int, int], ...]
    bytes: float


def held_together(held: Iterable[tuple[float, float]]) -> float:
    """Bytes of stages that share a device: they run in turn, and the largest workspace does for all.

    >>> held_together([(3.0, 1.0), (2.0, 2.0)])
    7.0

    Args:
      held: of each what is there without its workspace, and that.
    """
    own, workspaces = zip(*held, strict=True)
    return sum(own) + max(workspaces)


def workspace_of(graph: Graph, *, microbatches: int, is_one_program: bool = False, platform: str = "cpu") -> Workspace:
    """The workspace of a stage.

    Args:
      graph: of the stage, with what is rematerialised marked.
      microbatches: in a step.
      is_one_program: whether its forward and its backward pass are one program.
      platform: of the devices, as `Device.compiler`.
    """
    moments = worst_moments(graph, is_one_program=is_one_program, platform=platform)
    weight, gradient_bytes = _largest_gradient(graph) if microbatches > 1 else (None, 0.0)
    stacks = _stacks(graph, platform)
    gradients = _stacked_gradients(graph) if microbatches > 1 else frozenset[int]()
    total = gradient_bytes + sum(moment.bytes(graph) for moment in moments) / max(len(moments), 1)
    total += sum(times * graph.values[value].bytes for value, times in stacks.items())
    return Workspace(
        moments=moments, weight=weight, gradient_bytes=gradient_bytes, stacks=stacks, gradients=gradients,
        weights=_largest_weights(graph) if is_one_program else (), bytes=total,
    )  # fmt: skip


def worst_moments(graph: Graph, *, is_one_program: bool = False, platform: str = "cpu") -> tuple[Moment, ...]:
    """The moments of the backward pass at which the most is there: the worst of each rematerialised segment and of each
    loop, which computes what it does not keep again before anything else, and operators outside, as far as they are as
    bad as the worst of all."""
    inputs = frozenset(graph.inputs)
    kept = kept_in_one_program(graph, platform) if is_one_program else kept_values(graph)
    writes = None if platform == "cpu" else Writes(graph, platform)
    # A weight's cast is made where it is read, but a loop makes all of them before anything else.
    outside = inputs | values_of_parameters(graph)
    # What one program does not keep has no copy: it is made inside the kernels that read it.
    without_copy = frozenset(range(len(graph.values))) if is_one_program else kept
    found = _plain_moments(graph, without_copy, outside, writes)
    for region in (*regions(graph).values(), *_bodies(graph).values()):
        others = inputs if _is_inner(region[0]) else outside
        read = {v for operator in region for v in read_by_backward(graph, operator)}
        if writes is not None:
            read = writes.heads(read, kept | others, region)
        read -= kept | others
        # Of stages the stacks are arguments of the backward program, which lie as they are given.
        turned = writes.turned(region, kept) if writes is not None and is_one_program else {}
        again, again_bytes, worst = set[int](), 0.0, -1.0
        moment: Moment | None = None
        for operator in region:
            for value in operator.results:
                if value in read and value not in again and not graph.values[value].constant:
                    again.add(value)
                    again_bytes += graph.values[value].bytes
            one = _moment(graph, operator, again, kept, others, writes)
            size = again_bytes + one.bytes(graph)
            if size > worst:
                worst = size
                there = Counter(turned)
                there.update(again)
                there.update(one.again)
                moment = Moment(operator=operator.index, around=one.around, again=there)
        found += [moment] if moment is not None else []
    most = max((moment.bytes(graph) for moment in found), default=0.0)
    return tuple(one for one in found if most > 0 and one.bytes(graph) >= AS_BAD * most)


def _plain_moments(graph: Graph, kept: frozenset[int], outside: frozenset[int], writes: Writes | None) -> list[Moment]:
    """The worst moments of what is neither rematerialised nor in a loop: what is cheap to make is made again where it
    is read."""
    none = frozenset[int]()
    plain = [op for op in graph.operators if op.region is None and not _is_inner(op)]
    moments = [_moment(graph, op, none, kept, outside, writes) for op in plain]
    sizes = [moment.bytes(graph) for moment in moments]
    most = max(sizes, default=0.0)
    return [moment for moment, size in zip(moments, sizes, strict=True) if size >= AS_BAD * most]


def _moment(
    graph: Graph, operator: Operator, again: Set[int], kept: frozenset[int], others: frozenset[int],
    writes: Writes | None,
) -> Moment:  # fmt: skip
    """What is there around an operator, beside what has been computed again."""
    around = (
        _around(graph, operator, again, kept, others)
        if writes is None
        else {v: times for v, times in writes.around(operator, again, kept).items() if v not in others}
    )
    own = {*operator.operands, *operator.results}
    return Moment(
        operator=operator.index,
        around={value: times for value, times in around.items() if value in own},
        again={value: times for value, times in around.items() if value not in own},
    )


def _is_inner(operator: Operator) -> bool:
    """Whether it is in the body of a loop."""
    return len(operator.path) > 1 and not operator.is_link


def _bodies(graph: Graph) -> dict[int, list[Operator]]:
    """The operators of each loop that nothing rematerialises, in program order."""
    found: dict[int, list[Operator]] = {}
    for operator in graph.operators:
        if operator.region is None and _is_inner(operator):
            found.setdefault(operator.path[0], []).append(operator)
    return found


def _around(
    graph: Graph, operator: Operator, again: Set[int], kept: frozenset[int], others: frozenset[int]
) -> dict[int, float]:
    """Around an operator there is a cotangent of each value but others, and of what is neither kept nor there again a
    copy."""
    around: dict[int, float] = {}
    if operator.differentiated and not operator.is_link:
        for value in dict.fromkeys((*operator.operands, *operator.results)):
            if value is None or value in others or not graph.values[value].differentiated:
                continue
            around[value] = 1.0 + float(value not in kept and value not in again)
    return around


def _stacked_gradients(graph: Graph) -> frozenset[int]:
    """Stacks of parameters, or of what is made of them, of which a loop reads rows."""
    read = (operator.operands[0] for operator in graph.operators if operator.name == "scan_slice")
    stacks = (v for v in read if v is not None and graph.values[v].differentiated)
    return values_of_parameters(graph).intersection(stacks)


def _stacks(graph: Graph, platform: str) -> dict[int, float]:
    """Stacks of parameters, or of what is made of them, of which a loop reads rows, as far as they are there beside the
    parameters and their gradients: how often each."""
    of_parameters, found = values_of_parameters(graph), dict[int, float]()
    for operator in graph.operators:
        value = operator.operands[0] if operator.name == "scan_slice" else None
        if value is not None and value in of_parameters:
            times = _narrowed(graph, operator) if platform.startswith("tpu") else _transposed(graph, value)
            if times > 0:
                found[value] = times
    return found


def _narrowed(graph: Graph, rows: Operator) -> float:
    """Of a stack the share that all of its rows take in fewer bits: TPUs make them before a loop that reads them so. (A
    stack in another order of dims is no copy there: there is a layout for it.)"""
    made = [v for v in rows.results if v is not None]
    casts = [graph.operators[user] for v in made for user, _ in graph.consumers.get(v, ())]
    if not casts or any(one.name != "convert_element_type" for one in casts):
        return 0.0
    itemsize = max(graph.values[v].itemsize for one in casts for v in one.results if v is not None)
    share = itemsize / graph.values[made[0]].itemsize
    return share if share < 1 else 0.0


def _transposed(graph: Graph, stack: int) -> float:
    """How often a stack of parameters is there that is transposed for its loop (Flax's scans over another axis than the
    first): a copy, and its gradient, which takes the place of the parameter's where it is as large."""
    source, copied = stack, False
    while source in graph.producer and graph.operators[graph.producer[source][0]].name in _SAME_WEIGHT:
        maker = graph.operators[graph.producer[source][0]]
        copied |= maker.name == "transpose"
        (source,) = (v for v in maker.operands[:1] if v is not None)
    return (2 - graph.values[source].itemsize / graph.values[stack].itemsize) * copied


def _largest_weights(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Operators outside loops whose derivatives read weights, and which operands these are, as far as they are about as
    large as the largest."""
    found = [
        (graph.values[value].bytes, operator.index, at)
        for operator in graph.operators
        if len(operator.path) == 1 and operator.region is None
        for at, value in enumerate(operator.operands)
        if value in values_of_parameters(graph) and value in read_by_backward(graph, operator)
    ]
    most = max((size for size, _, _ in found), default=0)
    return tuple((operator, at) for size, operator, at in found if size >= AS_BAD * most)


def _largest_gradient(graph: Graph) -> tuple[int | None, float]:
    """The weight with the largest gradient that a microbatch makes, and its bytes: of what a matrix product reads, be
    it a slice or a cast of a parameter; with the cast itself, but in loops, where it has been counted. Rows that are
    looked up are added where they belong."""
    inputs = {graph.inputs[position] for position in graph.parameters}
    weights = {value: value for value in inputs if graph.values[value].differentiated}
    most, found = 0.0, None
    for operator in graph.operators:
        read = [v for v in operator.operands if v is not None and v in weights]
        if operator.matmul:
            for value in read:
                copies = 1 if value in inputs or _is_inner(operator) else 2
                if copies * graph.values[value].bytes > most:
                    most, found = float(copies * graph.values[value].bytes), weights[value]
        elif read and operator.name in _SAME_WEIGHT:
            weights |= {value: weights[read[0]] for value in operator.results if value is not None}
    return found, most

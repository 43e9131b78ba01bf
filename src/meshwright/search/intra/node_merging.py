"""Which operators share a node of the intra-operator problem, and what every node reads: independent of the mesh, so
computed once for a graph.

An operator is merged into the one large array that it reads: it takes the node, and so the layout, of what makes that
array, where its seconds follow from what it writes and it makes nothing larger. Resharding its operand costs no less
than resharding its result, which stays possible. Alpa (OSDI '22) merges operators into their operands as well; here the
merged operators have equal layouts.

A value that several operators read has a node of its own, whose layout it is resharded to once for all of them; unless
all of its readers are merged into it, or all but one: then it takes the node of its maker, if resharding the maker's
operand moves no more bytes.

Known limits: slicing an array for one of its readers, which then does less work, is not considered. Weights that stay
gathered (docs/stages.md) are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...program.graph import Graph, Operator, once_for_each
from ...program.parameter_values import values_of_parameters
from ...program.residuals import is_cheap, kept_in_one_program, kept_values, needed_again, read_by_backward
from ...sharding.deferred_sums import waiting_reads
from ..prices.kernels import is_plain


@dataclass(frozen=True, slots=True)
class Read:
    """An operand of an operator.

    Args:
      position: among the operands.
      value: that is read.
      times: in a microbatch.
      waits: whether it is a number that may be read as summands and summed at the end of a step.
      holds: what the backward pass keeps of it for this operator: "read", as it is read; "gathered", only where it was
        gathered for that; or "made", as it was made.
    """

    position: int
    value: int
    times: int
    waits: bool
    holds: Literal["", "read", "gathered", "made"]


class MergedInto(NamedTuple):
    """The operand whose node an operator can be merged into.

    Args:
      position: among its operands.
      whole: whether the operator makes as many bytes as that has, and not fewer.
    """

    position: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Shared:
    """A value that several operators read: it is resharded once for all of them, or they are merged into it.

    Args:
      value: the value.
      maker: the operator that makes it.
      users: operators that read it, and which operand it is.
      kept: whether the backward pass keeps it.
    """

    value: int
    maker: Operator
    users: tuple[tuple[int, int], ...]
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMerging:
    """The operators of a graph that have nodes, their reads, and which can be merged.

    Args:
      operators: those with a choice of layouts: all that depend on some input.
      reads: the operands of each of these, in the same order.
      shared: values with several readers.
      merged_into: by operator that can be merged into an operand's node, the operand.
    """

    operators: tuple[Operator, ...]
    reads: tuple[tuple[Read, ...], ...]
    shared: Mapping[int, Shared]
    merged_into: Mapping[int, MergedInto]


# Other names of what they read, for a matrix product at least.
_VIEWS = frozenset(["copy", "expand_dims", "reshape", "squeeze", "transpose"])


@once_for_each
def node_merging_of(graph: Graph) -> NodeMerging:
    """The merging of a graph whose backward pass is a program of its own."""
    return _node_merging(graph, kept_values(graph), casts="")


def node_merging_of_one_program(graph: Graph, platform: str = "cpu", *, in_loop: bool = False) -> NodeMerging:
    """The merging of a graph whose forward and backward pass are one program. Casts of weights are kept for the
    backward pass; on TPUs, whose products cast what they read, only where a loop runs the program: they are made
    before it.

    Args:
      graph: of the program.
      platform: of the devices, as `Device.compiler`.
      in_loop: whether it runs once for each of several microbatches.
    """
    on_tpu = platform.startswith("tpu")
    key = (platform, in_loop) if on_tpu else ("", False)
    known = _of_one_program(graph)
    if key not in known:
        kept = kept_in_one_program(graph, platform)
        known[key] = _node_merging(graph, kept, casts=("always" if in_loop else "") if on_tpu else "plain")
    return known[key]


@once_for_each
def _of_one_program(graph: Graph) -> dict[tuple[str, bool], NodeMerging]:
    """The cached results of `node_merging_of_one_program`."""
    del graph
    return {}


def _node_merging(graph: Graph, kept: Set[int], *, casts: Literal["", "plain", "always"]) -> NodeMerging:
    """The merging of a graph, given what its backward pass keeps, of casts of weights too.

    Args:
      graph: of a stage.
      kept: values that its backward pass keeps.
      casts: of which casts of weights it has an array beside the parameter: none, those that nothing rematerialised
        reads, or all.
    """
    # Parameters are at hand anyway, and so is what is made of them alone.
    kept = kept - values_of_parameters(graph)
    operators = tuple(o for o in graph.operators if not graph.is_constant(o))
    known = {operator.index for operator in operators}
    shared = {
        one.value: one for value, users in graph.consumers.items() for one in _shared(graph, known, value, users, kept)
    }
    reads = []
    held: set[int] = set()
    for operator in operators:
        found = []
        for position, value in enumerate(operator.operands):
            if value is None or graph.values[value].constant:
                continue
            holds: Any = ""
            if value in kept and value not in shared and value in graph.producer:
                holds = "read" if operator.region is None or _maker(graph, value).region == operator.region else "made"
            elif value in held:
                pass
            elif operator.region is not None:
                if casts == "always" and _reads_cast(graph, operator, value):
                    held.add(value)
                    holds = "made"
            elif reads_gathered(graph, operator, value):
                # Collectives run once, so the backward pass has no other.
                held.add(value)
                holds = "gathered"
            elif casts and _reads_cast(graph, operator, value):
                held.add(value)
                holds = "made"
            waits = (operator.index, position) in waiting_reads(graph) and value not in values_of_parameters(graph)
            found.append(Read(position, value, operator.operand_repeats[position], waits, holds))
        reads.append(tuple(found))
    merged_into = {o.index: one for o in operators if (one := _merged_into(graph, o)) is not None}
    return NodeMerging(operators=operators, reads=tuple(reads), shared=shared, merged_into=merged_into)


def _shared(
    graph: Graph, known: Set[int], value: int, users: tuple[tuple[int, int], ...], kept: Set[int]
) -> tuple[Shared, ...]:
    """The value, if several operators with nodes read it."""
    readers = tuple((user, at) for user, at in users if user in known)
    made_by = graph.producer.get(value)
    if len(readers) < 2 or made_by is None or made_by[0] not in known:
        return ()
    maker = graph.operators[made_by[0]]
    if maker.name in ("scan_const", "scan_slice"):
        return ()
    return (Shared(value, maker, readers, value in kept),)


def reads_gathered(graph: Graph, operator: Operator, value: int) -> bool:
    """Whether the derivative of an operator reads an operand as it was gathered for it."""
    return (
        not is_cheap(operator.name) and value in graph.producer
        and value not in values_of_parameters(graph) and value in read_by_backward(graph, operator)
    )  # fmt: skip


def _reads_cast(graph: Graph, operator: Operator, value: int) -> bool:
    """Whether the derivative of an operator outside loops reads what has been made of a parameter for it, such as its
    weights in fewer bits: an array beside the parameter, as it is gathered for the operator."""
    if len(operator.path) > 1 or is_cheap(operator.name) or value not in values_of_parameters(graph):
        return False
    made_by = graph.producer.get(value)
    while made_by is not None and graph.operators[made_by[0]].name in _VIEWS:
        (source, *_) = graph.operators[made_by[0]].operands
        made_by = graph.producer.get(source) if source is not None else None
    return made_by is not None and value in read_by_backward(graph, operator)


def forward_runs(graph: Graph, operator: Operator) -> int:
    """How often an operator runs for one backward pass: twice where it is rematerialised."""
    return 2 if operator.index in needed_again(graph)[0] else 1


def forward_runs_of(graph: Graph, value: int, operator: Operator) -> int:
    """How often a conversion of `value` made for (or right after) `operator` runs forward for one backward pass. What
    is kept inside a region is kept as its readers share it, or as its one reader has it."""
    if operator.region is None or value not in needed_again(graph)[1]:
        return 1
    if operator.kept and value in operator.results:
        return 1
    if value in graph.producer and (maker := _maker(graph, value)).kept and maker.region == operator.region:
        return 1 if graph.is_read_once(value) else 2
    return 2


def _maker(graph: Graph, value: int) -> Operator:
    return graph.operators[graph.producer[value][0]]


def _merged_into(graph: Graph, operator: Operator) -> MergedInto | None:
    """The operand whose node an operator can be merged into: its only operand that is as large as its result, if its
    seconds follow from what it writes."""
    if not is_plain(operator):
        return None
    made = [graph.values[v].bytes for v in operator.results if v is not None] or [0.0]
    operands = enumerate(None if v is None else graph.values[v] for v in operator.operands)
    read = [(at, value.bytes) for at, value in operands if value is not None and not value.constant]
    large = [(at, size) for at, size in read if size >= min(made)]
    if len(large) != 1 or large[0][1] < max(made):
        return None
    return MergedInto(large[0][0], whole=large[0][1] == max(made))

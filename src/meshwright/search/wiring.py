"""What the nodes of an intra-operator problem read, whatever the mesh is: found out once for a graph.

Operators that follow the one whose result they read have its node. A value that one operator makes and one reads could
be converted between the two; where what both take follows from what they write, and each reads one large array, the
conversion may as well come where such a chain begins or ends. Alpa (OSDI '22) merges them too; here a follower has to
have the same layouts.

Known limit: where a chain casts its values to a narrower type and back, a conversion in its middle can cost less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..program.graph import Graph, Operator, once_for_each
from ..program.residuals import is_cheap, kept_values, needed_again, read_by_backward
from ..sharding.deferred_sums import waiting_reads
from .choices import values_of_parameters
from .operator_kernels import is_plain
from .spec_row import SpecRow


@dataclass(frozen=True, slots=True)
class Read:
    """An operand of an operator.

    Args:
      position: among the operands.
      value: that is read.
      times: in a microbatch.
      runs: how often a conversion for it runs forward for one backward pass.
      of_parameters: whether it is made of parameters alone and read outside loops, which keep such values.
      waits: whether it is a number that may be read as summands and summed at the end of a step.
      holds: what the backward pass keeps of it for this operator: "read", as it is read, or "gathered", only where it
        was gathered for that.
    """

    position: int
    value: int
    times: int
    runs: int
    of_parameters: bool
    waits: bool
    holds: Literal["", "read", "gathered"]


@dataclass(frozen=True, slots=True)
class Shared:
    """A value that is moved once for all who read it.

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
class Wiring:
    """What is read in a graph.

    Args:
      operators: that have choices: all but those that depend on no input.
      reads: of each of these, in their order, what it reads.
      shared: in the order in which values are first read.
      followers: of each operator that another may follow, that one and which of its operands it follows.
    """

    operators: tuple[Operator, ...]
    reads: tuple[tuple[Read, ...], ...]
    shared: tuple[Shared, ...]
    followers: Mapping[int, tuple[int, int]]


class _Rows(Protocol):
    """Layouts of an operator."""

    @property
    def operands(self) -> tuple[SpecRow, ...]: ...

    @property
    def results(self) -> tuple[SpecRow, ...]: ...


def leaders(wiring: Wiring, rows: Mapping[int, _Rows]) -> dict[int, int]:
    """Of each operator the last of its chain, which is itself if none follows it.

    Args:
      wiring: of the graph.
      rows: by operator, how each choice lays out what it reads and makes.
    """
    found: dict[int, int] = {}
    for operator in reversed(wiring.operators):
        index = operator.index
        found[index] = index
        if index in wiring.followers:
            reader, at = wiring.followers[index]
            (made,) = rows[index].results
            # Rows that are equal are one object. A choice for each that the other can take, and no other one.
            if made is rows[reader].operands[at] and made.distinct:
                found[index] = found[reader]
    return found


@once_for_each
def wiring_of(graph: Graph) -> Wiring:
    """What is read in a graph."""
    operators = tuple(o for o in graph.operators if not _is_constant(graph, o))
    known = {operator.index for operator in operators}
    shared = {one.value: one for value, users in graph.consumers.items() for one in _shared(graph, known, value, users)}
    reads = []
    gathered: set[int] = set()
    for operator in operators:
        found = []
        for position, value in enumerate(operator.operands):
            if value is None or graph.values[value].constant:
                continue
            holds: Any = ""
            if value in _kept(graph) and value not in shared and value in graph.producer:
                holds = "read"
            elif value not in gathered and operator.region is None and reads_gathered(graph, operator, value):
                # Collectives run once, so the backward pass has no other.
                gathered.add(value)
                holds = "gathered"
            of_parameters = value in values_of_parameters(graph)
            again = of_parameters and len(operator.path) == 1
            waits = (operator.index, position) in waiting_reads(graph) and not of_parameters
            runs = forward_runs_of(graph, value, operator)
            found.append(Read(position, value, operator.operand_repeats[position], runs, again, waits, holds))
        reads.append(tuple(found))
    followers = {o.index: one for o in operators if (one := _follower(graph, known, o)) is not None}
    return Wiring(operators=operators, reads=tuple(reads), shared=tuple(shared.values()), followers=followers)


def _is_constant(graph: Graph, operator: Operator) -> bool:
    return all(v is None or graph.values[v].constant for v in operator.results)


@once_for_each
def _kept(graph: Graph) -> frozenset[int]:
    """Parameters are at hand anyway, and so is what is made of them alone."""
    return kept_values(graph) - values_of_parameters(graph)


def _shared(graph: Graph, known: set[int], value: int, users: tuple[tuple[int, int], ...]) -> tuple[Shared, ...]:
    """A value as one that is shared, if it is."""
    readers = tuple((user, at) for user, at in users if user in known)
    made_by = graph.producer.get(value)
    if len(readers) < 2 or made_by is None or made_by[0] not in known:
        return ()
    maker = graph.operators[made_by[0]]
    if maker.name in ("scan_const", "scan_slice"):
        return ()
    return (Shared(value, maker, readers, value in _kept(graph)),)


def reads_gathered(graph: Graph, operator: Operator, value: int) -> bool:
    """Whether the derivative of an operator reads an operand as it was gathered for it."""
    return (
        not is_cheap(operator.name) and value in graph.producer
        and value not in values_of_parameters(graph) and value in read_by_backward(graph, operator)
    )  # fmt: skip


def forward_runs(graph: Graph, operator: Operator) -> int:
    """How often an operator runs for one backward pass: twice where it is rematerialised."""
    return 2 if operator.index in needed_again(graph)[0] else 1


def forward_runs_of(graph: Graph, value: int, operator: Operator) -> int:
    """How often a conversion of `value` made for (or right after) `operator` runs forward for one backward pass."""
    return 2 if operator.region is not None and value in needed_again(graph)[1] else 1


def _follower(graph: Graph, known: set[int], operator: Operator) -> tuple[int, int] | None:
    """What may follow an operator, and the operand by which it does: it alone reads the result, and nothing else that
    is as large as what it makes."""
    if len(operator.results) != 1 or operator.results[0] is None or not _continues(graph, operator):
        return None
    value = operator.results[0]
    readers = [(user, at) for user, at in graph.consumers.get(value, ()) if user in known]
    if len(readers) != 1:
        return None
    reader = graph.operators[readers[0][0]]
    if reader.region != operator.region or value in graph.outputs:
        return None  # conversions run more often on one side, or there is one that leaves the graph
    largest = _continues(graph, reader) and graph.values[value].bytes >= _made_bytes(graph, reader)
    return readers[0] if largest else None


def _continues(graph: Graph, operator: Operator) -> bool:
    """Whether what an operator takes follows from what it writes (`is_plain`), and it reads no more than one array that
    is as large as that."""
    if not is_plain(operator):
        return False
    made = _made_bytes(graph, operator)
    operands = (graph.values[v] for v in operator.operands if v is not None)
    return sum(value.bytes >= made and not value.constant for value in operands) <= 1


def _made_bytes(graph: Graph, operator: Operator) -> float:
    return min((graph.values[v].bytes for v in operator.results if v is not None), default=0.0)

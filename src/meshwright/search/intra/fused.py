"""Which values of a backward pass compilers for accelerators write to memory: coarser than `memory.fusion`.

Arithmetic is fused into whatever reads it. A GPU writes the operand of a matrix product, but where the product only
moves or widens it, and what is dear (tanh, not exp) and read again by its own derivative. A TPU's products compute
their operands from whatever is stored. A cotangent is written where a product makes it and where branches join, on
GPUs also where a product reads it.

Cost: one pass over the operators each way, and the sets of chains' ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ..._jax.dataflow import CHEAP_ON_GPUS, MEGACORE
from ...program.graph import Graph, Operator
from ...program.residuals import (
    DEAR,
    FUSED_BEFORE,
    MOVING,
    RESULT_READ,
    is_cheap,
    is_divided_for_products,
    read_by_backward,
)

_WRITTEN_ONCE = (DEAR & RESULT_READ) - CHEAP_ON_GPUS
# The cotangent of the result is the cotangent of the operands, in another form at most.
_PASSED_ON = MOVING | {"add", "add_any", "sub"}


class Writes:
    """What a graph's backward pass writes.

    Args:
      graph: of a stage, or of a whole program.
      platform: of the devices, as `Device.compiler`; not "cpu".
    """

    def __init__(self, graph: Graph, platform: str) -> None:
        self._graph, self._on_gpu = graph, platform.startswith("gpu")
        self._has_two_cores = platform == MEGACORE
        self._written = self._find_written()
        self._joints = self._find_joints()
        self._above, self._below = self._ends()

    def around(self, operator: Operator, *there: Set[int]) -> Mapping[int, float]:
        """How often values are there while an operator's derivative runs: the cotangents at both ends of its chain, and
        copies of what the derivative reads and is written, but not `there` anyway."""
        if not operator.differentiated or operator.is_link:
            return {}
        found: dict[int, float] = {}
        sides = [(operator.results, self._below)]
        if operator.name not in _PASSED_ON and (self._on_gpu or not is_cheap(operator.name)):
            sides.append((operator.operands, self._above))
        for values, ends in sides:
            for value in values:
                if value is not None and self._graph.values[value].differentiated:
                    found |= dict.fromkeys(sorted(ends.get(value, (value,))), 1.0)
        # Few are read: joining what is there would take much longer.
        written = (read_by_backward(self._graph, operator) & self._written).difference(*there)
        for value in sorted(written):
            found[value] = found.get(value, 0.0) + 1.0
        return found

    def heads(self, read: Set[int], known: Set[int], region: Sequence[Operator]) -> set[int]:
        """What a region writes so that its derivatives can read `read`, beside what is known."""
        inside = {value: operator for operator in region for value in operator.results}
        found: set[int] = set()
        seen: set[int] = set()
        stack = list(read)
        while stack:
            value = stack.pop()
            if value in seen or value in known or value not in inside:
                continue
            seen.add(value)
            if value in self._written:
                found.add(value)
            else:
                stack.extend(v for v in inside[value].operands if v is not None)
        return found

    def turned(self, region: Sequence[Operator], kept: Set[int]) -> dict[int, float]:
        """Stacks of a loop that a GPU copies before the backward loop, in rows: those of which the body moves another
        dim of each row to the end (`_jax.liveness_adapter`)."""
        if not self._on_gpu:
            return {}
        found: dict[int, float] = {}
        for operator in region:
            value = operator.operands[0] if operator.name == "transpose" else None
            if value is not None and value in kept:
                (before,), (after,) = operator.rule.operands, operator.rule.results
                if before and before[-1] != after[-1]:
                    found[value] = float(operator.repeats)
        return found

    def _find_written(self) -> frozenset[int]:
        graph, wanted = self._graph, set[int]()
        found: set[int] = set()
        for operator in reversed(graph.operators):
            results = [v for v in operator.results if v is not None]
            if not is_cheap(operator.name):
                found.update(results)
                if self._on_gpu and operator.name not in FUSED_BEFORE:
                    wanted.update(v for v in operator.operands if v is not None)
            elif self._is_dear(operator):
                found.update(results)
            elif not wanted.isdisjoint(results):
                if operator.name in MOVING or self._widens(operator):
                    wanted.update(v for v in operator.operands if v is not None)
                else:
                    found.update(results)
        return frozenset(found)

    def _is_dear(self, operator: Operator) -> bool:
        """Whether a result is written although whoever reads it could compute it."""
        if self._on_gpu:
            return operator.name in _WRITTEN_ONCE and operator.differentiated
        return self._has_two_cores and is_divided_for_products(self._graph, operator)

    def _widens(self, operator: Operator) -> bool:
        value = self._graph.values
        return operator.name == "convert_element_type" and all(
            value[v].itemsize < value[made].itemsize
            for v, made in zip(operator.operands, operator.results, strict=True)
            if v is not None and made is not None
        )

    def _find_joints(self) -> frozenset[int]:
        """Values whose cotangents are written."""
        graph = self._graph
        found = {*graph.inputs, *(v for v in graph.outputs if v is not None)}
        for operator in graph.operators:
            cheap = is_cheap(operator.name)
            if not cheap or operator.name == "add":
                results = [v for v in operator.results if v is not None]
                found.update(v for v in results if (len(graph.consumers.get(v, ())) > 1 if cheap else self._on_gpu))
            if not cheap and operator.name not in FUSED_BEFORE:
                found.update(v for v in operator.operands if v is not None)
        return frozenset(found)

    def _ends(self) -> tuple[Mapping[int, frozenset[int]], Mapping[int, frozenset[int]]]:
        """Of each value the values at the ends of its chain, towards the inputs and towards the outputs."""
        values, own = self._graph.values, [frozenset((v.index,)) for v in self._graph.values]
        above: dict[int, frozenset[int]] = {}
        below: dict[int, frozenset[int]] = {}
        for operators, sides, ends in (
            (self._graph.operators, ("operands", "results"), above),
            (self._graph.operators[::-1], ("results", "operands"), below),
        ):
            for operator in operators:
                joined: frozenset[int] | None = None
                for value in getattr(operator, sides[1]):
                    if value is None or not values[value].differentiated:
                        continue
                    if value in self._joints:
                        ends[value] = own[value]
                        continue
                    if joined is None:
                        sources = [v for v in getattr(operator, sides[0]) if v is not None and values[v].differentiated]
                        joined = frozenset().union(*(ends.get(v, own[v]) for v in sources))
                    ends[value] = ends[value] | joined if value in ends else joined
        return above, below

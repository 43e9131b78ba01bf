"""What one device of a solved stage keeps for the backward pass, with a compiler that fuses and with one that does not.

A fusing compiler keeps what chains of cheap operations begin with and makes the rest again where it is read
(`program.residuals`). A framework that runs operations one by one keeps what each of them asks for: operands of
products, inputs of normalisations and of activations, results of softmax, and where dropout is used its masks
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, whose 34 + 5 a s / h bytes a
value this gives).

What depends on parameters alone is no activation: it is there anyway or made again. Values that only rename others
(reshapes, transposes, casts, slices, the addition of a bias) are one with them, in the narrower type.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.program.graph import Graph, Operator
from meshwright.program.origins import operator_origins
from meshwright.program.residuals import kept_values
from meshwright.search.intra.problem import IntraOpSolution
from meshwright.search.stages.problem import StageProblem
from meshwright.sharding import Spec

_VIEWS = frozenset(
    ["reshape", "transpose", "convert_element_type", "squeeze", "slice", "broadcast_in_dim", "expand_dims", "copy"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBytes:
    """On one device, for one microbatch.

    Args:
      fused: by a compiler that fuses chains.
      eager: operation by operation.
      masks: of dropout, one byte for each element of both branches of the residual stream, and of attention's softmax
        (where it is stored, its dropped copy as well).
      logits_elements: of the last stage's largest value before the loss; 0 in other stages.
      inside: while one rematerialised layer is computed again, fused.
      inside_eager: the same, operation by operation.
    """

    fused: float
    eager: float
    masks: float
    logits_elements: float
    inside: float
    inside_eager: float


def solved_specs(graph: Graph, chosen: IntraOpSolution) -> dict[int, Spec]:
    """The spec in which each value is kept: what it is moved to for all its readers, or for its first one."""
    specs: dict[int, Spec] = dict(zip(graph.inputs, chosen.inputs, strict=True))
    read: set[int] = set()
    for operator, choice in zip(graph.operators, chosen.operators, strict=True):
        if choice is None:
            continue
        specs.update({v: choice.algorithm.results[i] for i, v in enumerate(operator.results) if v is not None})
        for position, value in enumerate(operator.operands):
            if value is not None and value not in read and value in graph.producer:
                read.add(value)
                specs[value] = choice.algorithm.operands[position]
    return {**specs, **chosen.resharded_once}


def kept_bytes(problem: StageProblem, chosen: IntraOpSolution, plain: Graph) -> KeptBytes:
    """What a solved stage keeps.

    Args:
      problem: with its graph, rematerialised regions marked.
      chosen: its solution.
      plain: the same graph without regions.
    """
    graph = problem.graph
    count = _Count(problem, solved_specs(graph, chosen))
    fused, everything = kept_values(graph), kept_values(plain)
    eager, again = count.eager(outside=True), count.eager(outside=False)
    scans = {op.path[0] for op in graph.operators if op.region is not None}
    logits = max(
        (prod(v.shape) / count.shards(v.index) for v in graph.values if v.differentiated and count.is_logits(v.index)),
        default=0.0,
    )
    return KeptBytes(
        fused=count.bytes({v: graph.values[v].itemsize for v in fused}),
        eager=count.bytes({v: graph.values[v].itemsize for v in fused if _is_border(graph, v, scans)} | eager),
        masks=count.masks(), logits_elements=logits,
        inside=count.largest_region({v: graph.values[v].itemsize for v in everything - fused}),
        inside_eager=count.largest_region({v: size for v, size in again.items() if v not in eager}),
    )  # fmt: skip


def _is_border(graph: Graph, value: int, scans: set[int]) -> bool:
    """Whether a kept value is what enters a rematerialised region, or a scan's body."""
    made = graph.producer.get(value)
    return made is not None and graph.operators[made[0]].name.startswith("scan_carry")


class _Count:
    def __init__(self, problem: StageProblem, specs: dict[int, Spec]) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.specs = specs
        self.users = problem.graph.consumers

    def shards(self, value: int) -> int:
        return self.specs[value].shards(self.problem.sizes) if value in self.specs else 1

    def trips(self, value: int) -> int:
        made = self.graph.producer.get(value)
        return 1 if made is None else self.problem.trips(self.graph.operators[made[0]], value)

    def is_data(self, value: int) -> bool:
        return not (
            value in self.problem.of_parameters or self.graph.values[value].constant or value in self.graph.inputs
        )

    def bytes(self, values: dict[int, float], *, once: bool = False) -> float:
        """Of values with their bytes an element; of one trip, or of all."""
        total = 0.0
        for value, itemsize in values.items():
            made = self.graph.producer.get(value)
            name = "" if made is None else self.graph.operators[made[0]].name
            if not self.is_data(value) or name in ("scan_slice", "scan_const"):
                continue
            if made is not None and name == "scan_carry" and self.graph.operators[made[0]].results[1:] == (value,):
                continue
            elements = prod(self.graph.values[value].shape) / self.shards(value)
            total += (1 if once else self.trips(value)) * elements * itemsize
        return total

    def largest_region(self, values: dict[int, float]) -> float:
        """The bytes of values in the region that has most of them; of a scan's, one trip."""
        regions: dict[object, dict[int, float]] = {}
        for value, itemsize in values.items():
            made = self.graph.producer.get(value)
            region = None if made is None else self.graph.operators[made[0]].region
            regions.setdefault(region, {})[value] = itemsize
        return max((self.bytes(of, once=True) for region, of in regions.items() if region is not None), default=0.0)

    def is_logits(self, value: int) -> bool:
        """Whether a product leaves it outside of any scan (the head)."""
        made = self.graph.producer.get(value)
        return (
            made is not None and self.graph.operators[made[0]].matmul and len(self.graph.operators[made[0]].path) == 1
        )

    def root(self, value: int) -> tuple[int, float]:
        """What a value renames, and the bytes of an element in the narrowest type on the way."""
        itemsize = self.graph.values[value].itemsize
        while True:
            made = self.graph.producer.get(value)
            if made is None:
                return value, itemsize
            operator = self.graph.operators[made[0]]
            source = self._renamed(operator)
            if source is None:
                return value, itemsize
            value = source
            itemsize = min(itemsize, self.graph.values[value].itemsize)

    def _renamed(self, operator: Operator) -> int | None:
        data = [v for v in operator.operands if v is not None and self.is_data(v)]
        if operator.name in _VIEWS and len(data) == 1:
            return data[0]
        others = len([v for v in operator.operands if v is not None]) - len(data)
        if operator.name == "add" and len(data) == 1 and others == 1:
            return data[0]
        return None

    def eager(self, *, outside: bool) -> dict[int, float]:
        """What operations keep one by one, with the bytes of an element.

        Args:
          outside: whether to leave out what operators in rematerialised regions keep.
        """
        graph, found = self.graph, {}

        def keep(value: int) -> None:
            root, itemsize = self.root(value)
            found[root] = min(itemsize, found.get(root, itemsize))

        for operator in graph.operators:
            if not operator.differentiated or operator.is_link or (outside and operator.region is not None):
                continue
            data = [
                v for v in operator.operands if v is not None and self.is_data(v) and graph.values[v].differentiated
            ]
            if operator.matmul:
                for value in data:
                    keep(value)
                both = len(data) > 1 and operator.name == "dot_general"
                scores = both and any(self._into_softmax(v) for v in operator.results if v is not None)
                head = operator.repeats == 1 and len(operator.path) == 1
                # A product's result is what an activation, a normalisation or attention reads.
                if not scores and not head:
                    for value in operator.results:
                        if value is not None and not self._ends_trip(value):
                            keep(value)
        return found

    def _ends_trip(self, value: int) -> bool:
        """Whether a value is only added to what the next trip of its scan begins with, which keeps it."""
        users = [self.graph.operators[user] for user, _ in self.users.get(value, ())]
        if not users:
            return value in self.graph.outputs
        return all(
            user.name == "scan_carry"
            or (
                (user.name in _VIEWS or user.name == "add")
                and all(self._ends_trip(v) for v in user.results if v is not None)
            )
            for user in users
        )

    def _into_softmax(self, value: int, depth: int = 8) -> bool:
        for user, _ in self.users.get(value, ()):
            operator = self.graph.operators[user]
            if operator.name == "reduce_max":
                return True
            if depth and not operator.matmul and any(
                self._into_softmax(v, depth - 1) for v in operator.results if v is not None
            ):  # fmt: skip
                return True
        return False

    def masks(self) -> float:
        """Of dropout: each residual addition's other summand, and softmax's results with their dropped copies."""
        graph, total = self.graph, 0.0
        for operator in graph.operators:
            if operator.region is not None or not operator.differentiated or operator.is_link:
                continue
            data = [
                v for v in operator.operands if v is not None and self.is_data(v) and graph.values[v].differentiated
            ]
            result = next((v for v in operator.results if v is not None), None)
            if result is None or len(data) != 2:
                continue
            elements = operator.repeats * prod(graph.values[result].shape) / self.shards(result)
            streams = any(o is not None and o.kind == "stream" for o in operator_origins(graph)[operator.index])
            if operator.name == "add" and streams and graph.values[result].itemsize < 4:
                total += elements
            if operator.name == "dot_general" and self._into_softmax(result):
                total += 3 * elements
        return total

"""What the factors of a program's operators stand for, told from its structure and not from any name.

Dims that share a factor anywhere in the program are one *index* of it (a union-find over the factors of all operators).
Of an index this says two things: which dims of the inputs it is, so that whoever knows which of those hold the batch
knows every factor that runs over the batch; and its kind:

* `expert`: a matrix product has it in both operands and the result, and one operand depends on parameters alone: a
  stack of matrices, each for itself. Or it is the groups of a product of groups of rows (`ragged_dot`).
* `weight`: it is a dim of a parameter that a product reads (heads, feed-forward width), or of parameters alone.
* `vocabulary`: a weight that something is looked up in by number.
* `stream`: a weight that residual additions run over. An addition is residual if one summand is computed from the other
  through a product. The width of a transformer's hidden states, the channels between a ResNet's blocks.
* `data`: it is a dim of an input and no weight: batch, sequence, an image's height. Learned positions do not make a
  weight of the sequence: no product reads them.

A padded dim is the index that it was. Values that depend on no input relate nothing: a mask is made wherever it is
read.

Cost: linear in the graph, but for one bit for each pair of values. Known limit: a factor that is the minor one of a
dim (reshape) is no part of that dim's index, as it is no split of it either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .dependence import values_of_data
from .graph import GROUPED, GROUPS, Graph, Operator, Value, once_for_each

Kind = Literal["expert", "stream", "vocabulary", "weight", "data", "other"]

# Additions as JAX names them.
_ADDITIONS = ("add", "add_any")


@dataclass(frozen=True, slots=True)
class Origin:
    """What an index of the program stands for.

    Args:
      inputs: the dims of inputs that it is, as (name of the input, dim); parameters are left out.
      kind: see the module.
    """

    inputs: frozenset[tuple[str, int]]
    kind: Kind


@once_for_each
def operator_origins(graph: Graph) -> tuple[tuple[Origin, ...], ...]:
    """Of each operator what each factor of its rule stands for: in the whole program, whatever part of it this is."""
    if graph.part_of is not None:
        whole, places = graph.part_of
        of_whole = operator_origins(whole)
        return tuple(of_whole[place] for place in places)
    indices = indices_of(graph)
    found = _origins(graph, indices)
    return tuple(tuple(found[indices.of(op.index, f)] for f in range(len(op.rule.factors))) for op in graph.operators)


def dim_origins(graph: Graph, value: int) -> tuple[Origin | None, ...]:
    """What each dim of a value stands for, None where no operator reads or makes it."""
    found: list[Origin | None] = [None] * len(graph.values[value].shape)
    producer = graph.producer.get(value)
    places = [(user, graph.operators[user].rule.operands[place]) for user, place in graph.consumers.get(value, ())]
    if producer is not None:
        places.append((producer[0], graph.operators[producer[0]].rule.results[producer[1]]))
    for user, tensor in places:
        operator = graph.operators[user]
        for dim, factors in enumerate(tensor):
            lead = _leading(operator, factors)
            if found[dim] is None and lead is not None:
                found[dim] = operator_origins(graph)[user][lead]
    return tuple(found)


def _leading(operator: Operator, factors: Sequence[int]) -> int | None:
    """The factor that a split of a dim splits."""
    return next((f for f in factors if operator.rule.factors[f].size > 1), None)


class Indices:
    """The union-find over factors of operators and dims of values."""

    def __init__(self, graph: Graph) -> None:
        self._start: list[int] = []
        self._parent: list[int] = []
        for op in graph.operators:
            self._start.append(len(self._parent))
            self._parent.extend(range(len(self._parent), len(self._parent) + len(op.rule.factors)))
        self._dims: dict[tuple[int, int], int] = {}
        for op in graph.operators:
            for value, tensor in _tensors(op):
                if graph.values[value].constant:
                    continue
                for dim, factors in enumerate(tensor):
                    lead = _leading(op, factors)
                    if lead is not None:
                        mine = self._start[op.index] + lead
                        other = self._dims.setdefault((value, dim), mine)
                        self._parent[self._find(mine)] = self._find(other)
            if op.name == "pad":  # a dim that is padded stays the same index
                for before, after in zip(op.rule.operands[0], op.rule.results[0], strict=True):
                    leads = _leading(op, before), _leading(op, after)
                    if None not in leads:
                        short, longer = (self._find(self._start[op.index] + lead) for lead in leads if lead is not None)
                        self._parent[longer] = short

    def _find(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def of(self, operator: int, factor: int) -> int:
        """The index of a factor."""
        return self._find(self._start[operator] + factor)

    def of_dim(self, value: int, dim: int) -> int | None:
        """The index of a dim, None where it has none."""
        node = self._dims.get((value, dim))
        return None if node is None else self._find(node)


@once_for_each
def indices_of(graph: Graph) -> Indices:
    """The indices of a program."""
    return Indices(graph)


def _tensors(operator: Operator) -> Iterator[tuple[int, tuple[tuple[int, ...], ...]]]:
    for values, tensors in (
        (operator.operands, operator.rule.operands),
        (operator.results, operator.rule.results),
    ):
        yield from ((v, t) for v, t in zip(values, tensors, strict=True) if v is not None)


def _origins(graph: Graph, indices: Indices) -> Mapping[int, Origin]:
    """The origin of every index."""
    inputs: dict[int, set[tuple[str, int]]] = {}
    stored: set[int] = set()
    for position, value in enumerate(graph.inputs):
        for dim in range(len(graph.values[value].shape)):
            index = indices.of_dim(value, dim)
            if index is None:
                continue
            if position in graph.parameters:
                stored.add(index)
            else:
                inputs.setdefault(index, set()).add((graph.values[value].name, dim))
    of_data = values_of_data(graph)
    read, stacked = _read_by_products(graph, indices, of_data)
    weights = read | stacked | (stored - inputs.keys())
    looked_up = {
        indices.of(op.index, f)
        for op in graph.operators
        if op.name == "gather"
        for f in {f for dim in op.rule.operands[0] for f in dim} - {f for t in op.rule.results for d in t for f in d}
    }
    streams = {
        index
        for op in _residual_additions(graph, of_data)
        for f in range(len(op.rule.factors))
        if (index := indices.of(op.index, f)) in weights
    }

    def kind(index: int) -> Kind:
        if index in stacked:
            return "expert"
        if index in streams:
            return "stream"
        if index in looked_up and index in weights:
            return "vocabulary"
        return "weight" if index in weights else "data" if index in inputs else "other"

    every = {indices.of(op.index, f) for op in graph.operators for f in range(len(op.rule.factors))}
    return {index: Origin(frozenset(inputs.get(index, ())), kind(index)) for index in every}


def _read_by_products(graph: Graph, indices: Indices, of_data: set[int]) -> tuple[set[int], set[int]]:
    """Indices of parameters that products read; and of them those that a product has everywhere."""
    read: set[int] = set()
    stacked: set[int] = set()
    for op in graph.operators:
        if not op.matmul:
            continue
        tensors = [{f for dim in tensor for f in dim} for tensor in op.rule.operands]
        results = {f for tensor in op.rule.results for dim in tensor for f in dim}
        for value, factors in zip(op.operands, tensors, strict=True):
            if value is None or value in of_data or graph.values[value].constant:
                continue
            read.update(indices.of(op.index, f) for f in factors)
            everywhere = set.intersection(*tensors) & results
            if op.name in GROUPED and GROUPS in factors:
                stacked.add(indices.of(op.index, GROUPS))
            if op.name == "dot_general":
                stacked.update(indices.of(op.index, f) for f in everywhere if op.rule.factors[f].size > 1)
    return read, stacked


def _residual_additions(graph: Graph, of_data: set[int]) -> list[Operator]:
    """Additions of which one summand is computed from the other through a product."""
    # Bit v of `above[u]`: value u is computed from v; of `through[u]`: with a product on the way.
    above = [1 << value.index for value in graph.values]
    through = [0] * len(graph.values)
    found = []
    for op in graph.operators:
        operands = [v for v in op.operands if v is not None]
        reached = passed = 0
        for v in operands:
            reached |= above[v]
            passed |= through[v]
        for v in op.results:
            if v is not None:
                above[v] |= reached
                through[v] |= reached if op.matmul else passed
        if op.name in _ADDITIONS and len(operands) == 2 and all(v in of_data for v in operands):
            a, b = (_unconverted(graph, v, of_data) for v in operands)
            if through[operands[1]] >> a & 1 or through[operands[0]] >> b & 1:
                found.append(op)
    return found


def _unconverted(graph: Graph, value: int, of_data: set[int]) -> int:
    """What a value was before conversions of its dtype."""
    while value in graph.producer:
        op = graph.operators[graph.producer[value][0]]
        (operand, *others) = op.operands
        if op.name != "convert_element_type" or others or operand is None or operand not in of_data:
            break
        value = operand
    return value


def input_dims(values: Sequence[Value], dims: Sequence[int | None]) -> frozenset[tuple[str, int]]:
    """Named dims of inputs, as `Origin.inputs` has them."""
    return frozenset((v.name, d) for v, d in zip(values, dims, strict=True) if d is not None)

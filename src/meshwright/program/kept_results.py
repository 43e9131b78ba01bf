"""Which results of a rematerialised region are kept after all: a minimum cut at a price of memory.

The backward pass reads some values that a region makes. Each of them is kept from the forward pass, or made again from
what it is made of, which then has to be there in turn. A kept value costs its bytes times a price, an operator that
runs again its seconds, and the least sum of both is a minimum cut (a closure: who computes something again needs its
operands), found exactly.

Seconds are counted in bytes moved: what a chip reads or writes in the time that something takes. So the price is a
number without a unit, how many bytes may be moved again for one that need not be kept. At a price of 6 the results of
products with weights are kept, whose contractions are thousands long, and scores of attention, sums and everything
between them are not: what is known as selective recomputation.

Sources: the cut, "Min-cut optimal(*) recomputation (i.e. activation checkpointing) with AOTAutograd", PyTorch developer
forum, 2022 (`functorch.compile.min_cut_rematerialization_partition`), there without a price; selective recomputation,
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023.

Known limits: bytes and seconds are those of the unsplit program, and one ratio of FLOPs to bytes stands for all chips,
so that a cut is the same for all layouts and clusters; what lives while a region is computed again is not priced; costs
are rounded to a 2^18th of the largest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from .graph import CALLS, Graph, Operator, Path
from .residuals import is_cheap, is_stored, read_by_backward

# FLOPs that a chip does in the time in which it moves a byte. By peaks these are, in 16 bits, 139 (V100), 153 to 200
# (A100), 295 (H100), 166 (TPU v5p), 240 (v5e), 560 (v6e), of which products reach a half to two thirds; in float32 and
# float64 there are fewer. Chosen, not measured: low, so that products are rather kept.
_FLOPS_A_BYTE = 120.0
_FLOPS_A_WIDE_BYTE = {"float32": 12.0, "float64": 6.0, "complex64": 12.0, "complex128": 6.0}

# Arithmetic of a random number by Threefry, which is a hundred operations without a matrix unit.
_RANDOM = 8.0

# Largest capacity in the flow, in which all others are counted: SciPy has 32 bits for the sum of all.
_RESOLUTION = 1 << 18
_NEVER = 1 << 29

# What can be kept beside products: a result is kept by a name that it gets once it is made, and the derivatives of
# other operators (`exp`, `sort`, `reduce_max`) read it before.
_KEPT_BY_NAME = frozenset(
    """abs add add_any and broadcast_in_dim concatenate convert_element_type copy cos cumsum div dynamic_slice eq
    expand_dims gather ge gt integer_pow iota le log lt mul ne neg not or pad random_bits reduce_sum reshape rev
    scatter-add select_n sin slice square squeeze stop_gradient sub transpose""".split()  # noqa: SIM905 (a table, not a column)
)

# Calls of kernels with derivatives of their own keep what these read, results among it, which no name reaches.
_OPAQUE = CALLS | {"attention", "sorted_rows"}


def moved_again(graph: Graph, operator: Operator) -> float:
    """What running an operator a second time takes, in bytes moved. Chains of elementwise operators take what they
    write.

    Args:
      graph: it belongs to.
      operator: which.
    """
    made = float(sum(graph.values[v].bytes for v in operator.results if v is not None)) * operator.repeats
    if operator.matmul or operator.name in _OPAQUE:
        rate = _FLOPS_A_WIDE_BYTE.get(operator.multiplied, _FLOPS_A_BYTE)
        return made + operator.flops * operator.repeats / rate
    if operator.name == "random_bits":
        return _RANDOM * made
    if is_cheap(operator.name):
        return made if is_stored(graph, operator) else 0.0
    return made + float(sum(graph.values[v].bytes for v in operator.operands if v is not None)) * operator.repeats


def is_opaque(graph: Graph, operator: Operator, price: float) -> bool:
    """Whether an operator is left outside of rematerialised regions at a price: what it keeps for its own derivative
    is nothing that can be kept inside, and it takes longer than that is worth.

    Args:
      graph: it belongs to.
      operator: which.
      price: bytes moved again for a byte that is not kept.
    """
    if operator.name not in _OPAQUE or not operator.differentiated:
        return False
    made = sum(graph.values[v].bytes for v in operator.results if v is not None) * operator.repeats
    return moved_again(graph, operator) > price * made


class _Network(NamedTuple):
    """A region as a flow has it. Its operators and values have numbers of their own.

    Args:
      again: of each operator the bytes moved where it runs again.
      read: of each operator the values that it reads.
      made: of each value the operator that makes it.
      held: of each value the bytes that keeping it takes; None where it cannot be kept.
      wanted: the values that the backward pass reads.
    """

    again: tuple[float, ...]
    read: tuple[tuple[int, ...], ...]
    made: tuple[int, ...]
    held: tuple[float | None, ...]
    wanted: tuple[int, ...]


def kept_results(
    graph: Graph, region: Sequence[Operator], level: int, known: Collection[int], prices: Sequence[float]
) -> list[frozenset[Path]]:
    """For each of some prices the paths of the operators of a region whose results are kept, so that what they take and
    what runs again is the least.

    Args:
      graph: of the program.
      region: its operators, in program order.
      level: how many numbers the paths of those have whose results can be kept: others are nested deeper.
      known: values that leave the region: they are held for their readers, so that no bytes are charged for them, but
        the region makes them again unless they are kept for it too.
      prices: bytes moved again for a byte that is not kept.
    """
    made_by = {value: at for at, op in enumerate(region) for value in op.results if value is not None}
    read = {value for op in region for value in read_by_backward(graph, op) if value in made_by}
    # What no derivative reads, however far it is from there, needs no place in the flow.
    values: dict[int, int] = {}
    stack = sorted(read)
    while stack:
        value = stack.pop()
        if value not in values:
            values[value] = len(values)
            operands = region[made_by[value]].operands
            stack.extend(v for v in operands if v is not None and v in made_by)
    operators = sorted({made_by[value] for value in values})
    place = {at: number for number, at in enumerate(operators)}

    def held(value: int) -> float | None:
        maker = region[made_by[value]]
        named = (maker.matmul and maker.name not in _OPAQUE) or maker.name in _KEPT_BY_NAME
        if not named or len(maker.path) != level or maker.is_link:
            return None
        return float(graph.values[value].bytes * maker.repeats) * (value not in known)

    network = _Network(
        again=tuple(moved_again(graph, region[at]) for at in operators),
        read=tuple(tuple(values[v] for v in region[at].operands if v is not None and v in values) for at in operators),
        made=tuple(place[made_by[value]] for value in values), held=tuple(map(held, values)),
        wanted=tuple(sorted(values[value] for value in read)),
    )  # fmt: skip
    paths = [region[at].path for at in operators]
    return [frozenset(paths[at] for at in _kept_in(network, price)) for price in prices]


# Layers are alike, and ranges of layers hold the same ones.
@lru_cache(maxsize=1 << 12)
def _kept_in(network: _Network, price: float) -> tuple[int, ...]:
    """The operators of a region whose results are kept at a price."""
    count = len(network.made)
    keep = [None if held is None else price * held for held in network.held]
    unit = max([*network.again, *(one for one in keep if one is not None), 1.0]) / _RESOLUTION
    # One place for each value, that it is there for the backward pass, and for each operator, that it runs again.
    source, sink = 0, 1 + count + len(network.again)
    edges: dict[tuple[int, int], int] = {(source, 1 + value): _NEVER for value in network.wanted}
    for value, (maker, cost) in enumerate(zip(network.made, keep, strict=True)):
        edges[1 + value, 1 + count + maker] = _NEVER if cost is None else round(cost / unit)
    for operator, (cost, read) in enumerate(zip(network.again, network.read, strict=True)):
        edges[1 + count + operator, sink] = round(cost / unit)
        edges.update({(1 + count + operator, 1 + value): _NEVER for value in read})
    if not count:
        return ()
    rows, columns = np.array([*edges]).T
    capacities = np.array([*edges.values()], dtype=np.int32)
    flow_graph = csr_array((capacities, (rows, columns)), shape=(sink + 1, sink + 1), dtype=np.int32)
    flow = maximum_flow(flow_graph, source, sink).flow
    left = (flow_graph - flow).tocsr()
    left.eliminate_zeros()
    there = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return tuple(
        sorted(
            {
                maker for value, maker in enumerate(network.made)
                if 1 + value in there and 1 + count + maker not in there
            }
        )
    )  # fmt: skip

"""What the backward pass keeps of the forward pass.

The derivative of an operator reads some of its operands or its result; linear operators read nothing. A value that is
read is kept from the forward to the backward pass, unless it is cheap to make again from something kept: compilers fuse
chains of elementwise operators into their readers, so only the values at the heads of such chains occupy memory.
"""

from __future__ import annotations

from math import prod

from .graph import Graph, Operator, Path, once_for_each

# The derivative reads no operand (index operands, which have no derivative of their own, excepted).
_LINEAR = frozenset(
    [
        "add",
        "add_any",
        "sub",
        "neg",
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "reduce_sum",
        "convert_element_type",
        "concatenate",
        "pad",
        "slice",
        "squeeze",
        "cumsum",
        "copy",
        "rev",
        "reduce_precision",
        "real",
        "imag",
        "split",
        "expand_dims",
        "stop_gradient",
        "reduce_window_sum",
        "copy_p",
    ]
)
# The derivative reads operands that are not differentiated themselves (indices, predicates).
_INDEXED = frozenset(["select_n", "gather", "scatter-add", "dynamic_slice", "dynamic_update_slice", "scatter"])
# The derivative reads the result.
_BY_RESULT = frozenset(["exp", "exp2", "tanh", "logistic", "sqrt", "rsqrt", "cbrt", "erf_inv"])
# Each operand's derivative reads the other ones.
_PRODUCTS = frozenset(["mul", "dot_general", "conv_general_dilated"])
# Neither elementwise nor as cheap: all others a fusing compiler makes again where they are read.
_NOT_FUSED = frozenset(
    [
        "dot_general",
        "conv_general_dilated",
        "ragged_dot_general",
        "cholesky",
        "triangular_solve",
        "lu",
        "qr",
        "eigh",
        "svd",
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "argmax",
        "argmin",
        "sort",
        "top_k",
        "gather",
        "scatter-add",
        "scatter",
        "scatter-mul",
        "scatter-max",
        "scatter-min",
        "cumsum",
        "cumlogsumexp",
        "cummax",
        "cummin",
        "cumprod",
        "reduce_window_max",
        "reduce_window_sum",
        "reduce_window",
        "select_and_scatter_add",
        "custom_vjp_call",
        "cond",
        "while",
        "random_bits",
        "fft",
        "concatenate",
        "scan_slice",
        "scan_carry",
        "scan_stack",
        "scan_const",
        "dynamic_update_slice",
    ]
)


def read_by_backward(graph: Graph, operator: Operator) -> set[int]:
    """Values among the operands and results of `operator` that its derivative reads."""
    if not operator.differentiated or operator.is_link:
        return set()
    operands = [v for v in operator.operands if v is not None]
    moving = [v for v in operands if graph.values[v].differentiated]
    name = operator.name
    if name in _LINEAR:
        return set()
    if name in _BY_RESULT:
        return {v for v in operator.results if v is not None}
    if name in _INDEXED:
        return {v for v in operands if not graph.values[v].differentiated}
    if name in _PRODUCTS:
        return {v for v in operands if any(other != v for other in moving) or operands.count(v) > 1}
    if name == "div" and len(operands) == 2 and not graph.values[operands[1]].differentiated:
        return {operands[1]}
    return set(operands)


def is_stored(graph: Graph, operator: Operator) -> bool:
    """Whether a fusing compiler writes the result of an operator to memory: some reader is not part of the same chain.
    Single numbers are computed by whoever reads them."""
    return _stored(graph)[operator.index]


@once_for_each
def _stored(graph: Graph) -> tuple[bool, ...]:
    def stored(operator: Operator) -> bool:
        results = [v for v in operator.results if v is not None]
        if all(prod(graph.values[v].shape) == 1 for v in results):
            return False
        readers = [graph.operators[user] for v in results for user, _ in graph.consumers.get(v, ())]
        return not is_fusible(operator) or not readers or any(not is_fusible(reader) for reader in readers)

    return tuple(map(stored, graph.operators))


def is_fusible(operator: Operator) -> bool:
    """Whether a compiler makes the result again in its readers instead of storing it."""
    return is_cheap(operator.name)


def is_cheap(name: str) -> bool:
    """Whether what an operator of this name makes is made again where it is read, and not stored."""
    return name not in _NOT_FUSED


def kept_values(graph: Graph) -> frozenset[int]:
    """Values stored from the forward to the backward pass: the heads of the chains that derivatives read.

    A rematerialised region keeps what enters it, and nothing made inside.
    """
    return _kept(graph)[0]


def kept_inputs(graph: Graph) -> frozenset[int]:
    """The inputs of the graph that are read in the backward pass, or are heads of chains that are."""
    return _kept(graph)[1]


@once_for_each
def _kept(graph: Graph) -> tuple[frozenset[int], frozenset[int]]:
    """Values that are stored, and inputs that stay."""
    kept: set[int] = set()
    seen: set[int] = set()
    stack = [v for operator in graph.operators if operator.region is None for v in read_by_backward(graph, operator)]
    for region in regions(graph).values():
        made = {v for operator in region for v in operator.results}
        entering = {v for operator in region for v in operator.operands if v is not None and v not in made}
        stack += [source for v in sorted(entering) for source in _outside_scan(graph, v)]
    inputs = set(graph.inputs)
    while stack:
        value = stack.pop()
        if value in seen or graph.values[value].constant:
            continue
        seen.add(value)
        made_by = graph.producer.get(value)
        if made_by is None:
            continue
        operator = graph.operators[made_by[0]]
        if is_fusible(operator) and operator.region is None:
            stack.extend(v for v in operator.operands if v is not None)
        else:
            kept.add(value)
    return frozenset(kept), frozenset(seen & inputs)


def _outside_scan(graph: Graph, value: int) -> list[int]:
    """What a rematerialised body of a scan keeps of a value that enters it: of a slice, the array it is cut from."""
    made_by = graph.producer.get(value)
    if made_by is None or graph.operators[made_by[0]].name not in ("scan_slice", "scan_const"):
        return [value]
    operands = [v for v in graph.operators[made_by[0]].operands if v is not None]
    return [source for v in operands for source in _outside_scan(graph, v)]


def regions(graph: Graph) -> dict[Path, list[Operator]]:
    """The operators of each rematerialised region, in program order."""
    found: dict[Path, list[Operator]] = {}
    for operator in graph.operators:
        if operator.region is not None:
            found.setdefault(operator.region, []).append(operator)
    return found


@once_for_each
def needed_again(graph: Graph) -> tuple[frozenset[int], frozenset[int]]:
    """What rematerialised regions compute a second time: operator indices, and the values they or derivatives read.

    An operator runs again if a derivative in its region reads its result, or an operator that itself runs again does;
    what only leaves the region was kept.
    """
    again: set[int] = set()
    values: set[int] = set()
    for region in regions(graph).values():
        wanted: set[int] = set()
        for operator in reversed(region):
            reads = read_by_backward(graph, operator)
            if any(v in wanted or v in reads for v in operator.results if v is not None):
                again.add(operator.index)
                wanted.update(v for v in operator.operands if v is not None)
            wanted |= reads
        values |= wanted
    return frozenset(again), frozenset(values)

"""What the backward pass keeps of the forward pass.

The derivative of an operator reads some of its operands or its result; linear operators read nothing. A value that is
read is kept from the forward to the backward pass, unless it is cheap to make again from something kept: compilers fuse
chains of elementwise operators into their readers, so only the values at the heads of such chains occupy memory.

That much is kept by stages of a pipeline, whose backward pass is a program of its own, written to make again what is
cheap, and by loops, whose bodies are differentiated under a policy. Where both passes are one program
(`kept_in_one_program`), compilers find the same value in both, and what the forward pass has written to memory stays
there: operands of products, whatever made them, and what no fusion makes twice.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from .._jax.dataflow import CHEAP_BEFORE_AMPERE, CHEAP_ON_GPUS, MEGACORE, WIDEST
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
RESULT_READ = frozenset(["exp", "exp2", "tanh", "logistic", "sqrt", "rsqrt", "cbrt", "erf_inv"])
# It reads operands and result.
_ALL_READ = frozenset(["attention", "sorted_rows"])
# Each operand's derivative reads the other ones.
_PRODUCTS = frozenset(["mul", "dot_general", "conv_general_dilated"])
# Neither elementwise nor as cheap: all others a fusing compiler makes again where they are read.
_NOT_FUSED = frozenset(
    [
        "attention",
        "dot_general",
        "conv_general_dilated",
        "ragged_dot_general",
        "sorted_rows",
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


_ROW_SUMS = frozenset(["reduce_sum", "reduce_max", "reduce_min"])

# Other names, and elements in another order: no arithmetic.
MOVING = frozenset(
    """broadcast_in_dim copy dynamic_slice expand_dims pad reshape rev slice split squeeze stop_gradient
    transpose""".split()  # noqa: SIM905 (a table, not a column)
)
# Not fused, but what they read is.
FUSED_BEFORE = frozenset(
    """argmax argmin concatenate gather reduce_max reduce_min reduce_prod reduce_sum""".split()  # noqa: SIM905 (a table)
)
# Other names of the same elements in the same order, or a rounding of them.
_SAME_ELEMENTS = frozenset(["convert_element_type", "copy", "expand_dims", "reshape", "squeeze"])
# Dear enough that no fusion makes them twice (XLA's `InstructionFusion::IsExpensive`).
DEAR = frozenset(
    """acos acosh asin asinh atan atan2 atanh cbrt cosh digamma div erf erf_inv erfc exp exp2 expm1 lgamma log log1p
    logistic pow rsqrt sinh sqrt tan tanh""".split()  # noqa: SIM905 (a table, not a column)
)
# Of these, what a platform does twice all the same.
_CHEAP = {"gpu": CHEAP_ON_GPUS, WIDEST: CHEAP_BEFORE_AMPERE}
# Arithmetic in these is in float32, and the rounding is not done twice.
_NARROW = ("bfloat16", "float16")


def read_by_backward(graph: Graph, operator: Operator) -> set[int]:
    """Values among the operands and results of `operator` that its derivative reads."""
    if not operator.differentiated or operator.is_link:
        return set()
    operands = [v for v in operator.operands if v is not None]
    moving = [v for v in operands if graph.values[v].differentiated]
    name = operator.name
    if name in _LINEAR:
        return set()
    if name in RESULT_READ:
        return {v for v in operator.results if v is not None}
    if name in _ALL_READ:
        return {*operands, *(v for v in operator.results if v is not None)}
    if name in _INDEXED:
        return {v for v in operands if not graph.values[v].differentiated}
    if name in _PRODUCTS:
        return {v for v in operands if any(other != v for other in moving) or operands.count(v) > 1}
    if name == "div" and len(operands) == 2 and not graph.values[operands[1]].differentiated:
        return {operands[1]}
    return set(operands)


def is_stored(graph: Graph, operator: Operator, *, joined: bool = False) -> bool:
    """Whether a fusing compiler writes the result of an operator to memory: some reader is not part of the same chain.
    Single numbers are computed by whoever reads them.

    Args:
      graph: it belongs to.
      operator: which.
      joined: whether the compiler makes chains again inside the products that read them, and, outside of loops, sums
        them along rows where it makes them (`cost.efficiency.EfficiencyProfile.joined`).
    """
    return (_stored_beside_products if joined else _stored)(graph)[operator.index]


@once_for_each
def _stored_beside_products(graph: Graph) -> tuple[bool, ...]:
    def joins(operator: Operator, reader: Operator) -> bool:
        if is_fusible(reader) or reader.name == "dot_general":
            return True
        rows = reader.rule.operands[0][-1:] if reader.name in _ROW_SUMS and operator.repeats == 1 else ()
        return bool(rows) and not set(rows[0]) & {factor for dim in reader.rule.results[0] for factor in dim}

    def stored(operator: Operator) -> bool:
        if not is_stored(graph, operator) or not is_fusible(operator):
            return is_stored(graph, operator)
        users = {user for v in operator.results if v is not None for user, _ in graph.consumers.get(v, ())}
        return not users or not all(joins(operator, graph.operators[user]) for user in users)

    return tuple(map(stored, graph.operators))


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

    A rematerialised region keeps what enters it, and of what is made inside only the results of `Operator.kept`.
    """
    return _kept(graph)[0]


def kept_inputs(graph: Graph) -> frozenset[int]:
    """The inputs of the graph that are read in the backward pass, or are heads of chains that are."""
    return _kept(graph)[1]


def kept_in_one_program(graph: Graph, platform: str = "cpu") -> frozenset[int]:
    """What `kept_values` are where forward and backward pass are one program. The products of a TPU compute their
    operands from whatever is stored, in both passes; but sums that others read too are stored, and chips of two cores
    store divisions for products. GPUs make again what is cheap for them, those before Ampere more, which round nothing.

    Args:
      graph: of the program.
      platform: of the devices, as `Device.compiler`.
    """
    if platform == MEGACORE:
        return _kept_by_two_cores(graph)
    if platform == WIDEST:
        return _kept_before_ampere(graph)
    if platform.startswith("gpu"):
        return _kept_by_gpu(graph)
    return _kept_by_tpu(graph) if platform == "tpu" else _kept_in_one_program(graph)


def kept_itemsize(graph: Graph, value: int, platform: str) -> float:
    """Bytes of an element of what one program keeps of a value for its backward pass: GPUs that multiply bfloat16 as
    float32 keep operands of products so, but in loops, which keep what the program has.

    Args:
      graph: of the program.
      value: that an operator of it makes.
      platform: of the devices, as `Device.compiler`.
    """
    of, maker = graph.values[value], graph.operators[graph.producer[value][0]]
    if platform != WIDEST or of.dtype != "bfloat16" or len(maker.path) > 1:
        return of.itemsize
    return 4.0 if any(graph.operators[user].matmul for user, _ in graph.consumers.get(value, ())) else of.itemsize


@once_for_each
def _kept_by_tpu(graph: Graph) -> frozenset[int]:
    return _heads(graph, lambda operator: _is_made_in_products(graph, operator))[0]


@once_for_each
def _kept_by_two_cores(graph: Graph) -> frozenset[int]:
    def is_made_again(operator: Operator) -> bool:
        return _is_made_in_products(graph, operator) and not is_divided_for_products(graph, operator)

    return _heads(graph, is_made_again)[0]


def _is_made_in_products(graph: Graph, operator: Operator) -> bool:
    """Whether a TPU computes the results of an operator again where the backward pass reads them."""
    if len(operator.path) > 1:
        return is_fusible(operator)  # in the body of a loop a policy says so
    return _is_fused_by_tpu(operator) and _stored_by_tpu(graph).isdisjoint(operator.results)


def _is_fused_by_tpu(operator: Operator) -> bool:
    return is_fusible(operator) or operator.name == "concatenate"


@once_for_each
def _stored_by_tpu(graph: Graph) -> frozenset[int]:
    """Results of arithmetic on several arrays that a TPU stores since they have several readers, not all of which are
    products, perhaps through more arithmetic: sums of a residual stream that normalisations read (`memory.fusion`)."""
    read = {v for operator in graph.operators for v in read_by_backward(graph, operator)}
    in_products, found = set[int](), set[int]()
    for operator in reversed(graph.operators):
        if not _is_fused_by_tpu(operator) or len(operator.path) > 1:
            continue
        for value in (v for v in operator.results if v is not None):
            users = [graph.operators[user] for user, _ in graph.consumers.get(value, ())]
            if users and all(one.name == "dot_general" or in_products.issuperset(one.results) for one in users):
                in_products.add(value)
            elif len(users) + (value in read) > 1 and _is_of_several(graph, operator, value):
                found.add(value)
    return frozenset(found)


def _is_of_several(graph: Graph, operator: Operator, value: int) -> bool:
    """Whether an operator reads more than one array of as many dims as what it makes, but what is spread over them."""

    def rank(index: int) -> int:
        return sum(size != 1 for size in graph.values[index].shape)

    def is_spread(index: int) -> bool:
        made_by = graph.producer.get(index)
        return made_by is not None and graph.operators[made_by[0]].name == "broadcast_in_dim"

    operands = {v for v in operator.operands if v is not None and not is_spread(v)}
    return sum(rank(v) >= rank(value) for v in operands) > 1


def is_divided_for_products(graph: Graph, operator: Operator) -> bool:
    """Whether an operator is a division, converted or not, that a matrix product reads: its derivative does so too."""
    readers = (
        graph.operators[user] for v in operator.results if v is not None for user, _ in graph.consumers.get(v, ())
    )
    if not any(reader.matmul for reader in readers):
        return False
    while operator.name in _SAME_ELEMENTS and operator.operands[0] in graph.producer:
        operator = graph.operators[graph.producer[operator.operands[0]][0]]
    return operator.name == "div"


@once_for_each
def _kept_before_ampere(graph: Graph) -> frozenset[int]:
    return _kept_where_made_twice(graph, WIDEST)


@once_for_each
def _kept_by_gpu(graph: Graph) -> frozenset[int]:
    return _kept_where_made_twice(graph, "gpu")


@once_for_each
def _kept_in_one_program(graph: Graph) -> frozenset[int]:
    return _kept_where_made_twice(graph, "cpu")


def _kept_where_made_twice(graph: Graph, platform: str) -> frozenset[int]:
    return _heads(graph, lambda one: _is_made_again(graph, one) and _is_made_twice(graph, one, platform))[0]


def is_had_again(graph: Graph, value: int, *, one_program: bool, platform: str = "cpu") -> bool:
    """Whether the backward pass has a value for nothing more than the graph stores anyway, for readers after it too.

    Args:
      graph: whose derivatives read what they read; the value leaves it.
      value: that an operator of the graph makes.
      one_program: whether forward and backward pass are one program: there, but on TPUs, what is written for a reader
        stays, even if it could be made again.
      platform: of the devices, as `Device.compiler`.
    """
    if one_program and not platform.startswith("tpu"):
        return value in kept_in_one_program(graph, platform)
    stored = kept_values(graph) | kept_inputs(graph)
    stack = [value]
    while stack:
        one = stack.pop()
        if one in stored or graph.values[one].constant:
            continue
        made_by = graph.producer.get(one)
        if made_by is None:
            return False
        operator = graph.operators[made_by[0]]
        if operator.region is not None or not is_fusible(operator):
            return False
        stack.extend(v for v in operator.operands if v is not None)
    return True


def _is_made_twice(graph: Graph, operator: Operator, platform: str) -> bool:
    """Whether a compiler that has both passes at hand fuses a cheap operator into the readers of both.

    Args:
      graph: it belongs to.
      operator: which.
      platform: "cpu"; "gpu", since Ampere; or WIDEST, GPUs that round nothing (`kept_itemsize`), and whose memory is
        slow for their arithmetic.
    """
    if len(operator.path) > 1:
        return True  # in the body of a loop a policy says so
    results = [v for v in operator.results if v is not None]
    narrow = any(graph.values[v].dtype in _NARROW for v in results)
    if operator.name == "convert_element_type" and not narrow:
        # Statistics are taken of a float32 copy, or of a sum before it is rounded, which stays for its other readers.
        (value,) = operator.operands
        widened = value is not None and graph.values[value].dtype in _NARROW
        if not widened or len({user for v in results for user, _ in graph.consumers.get(v, ())}) <= 1:
            return True
        # What a product makes is stored in 16 bits by GPUs that multiply those, and each reader widens it.
        return (
            platform == "gpu" and value in graph.producer and not is_fusible(graph.operators[graph.producer[value][0]])
        )
    if operator.name in MOVING:
        return True
    readers = (graph.operators[user].name for v in results for user, _ in graph.consumers.get(v, ()))
    written = any(not is_cheap(name) and name not in FUSED_BEFORE for name in readers)
    rounded = narrow and platform != WIDEST and operator.name != "select_n"
    return not (written or rounded or operator.name in DEAR - _CHEAP.get(platform, frozenset()))


@once_for_each
def _kept(graph: Graph) -> tuple[frozenset[int], frozenset[int]]:
    """Values that are stored, and inputs that stay."""
    return _heads(graph, lambda operator: _is_made_again(graph, operator))


def _is_made_again(graph: Graph, operator: Operator) -> bool:
    """Whether the result of an operator is made again where derivatives read it: what is cheap, but not a mask that was
    drawn, since the random bits are more."""
    return is_fusible(operator) and not (
        all(v is None or graph.values[v].dtype == "bool" for v in operator.results)
        and not _drawn(graph).isdisjoint(operator.operands)
    )


@once_for_each
def _drawn(graph: Graph) -> frozenset[int]:
    """Random bits, and what is made of them by what is cheap."""
    found: set[int | None] = set()
    for operator in graph.operators:
        again = is_fusible(operator) and not operator.differentiated and not found.isdisjoint(operator.operands)
        if again or operator.name == "random_bits":
            found.update(operator.results)
    return frozenset(v for v in found if v is not None)


def _heads(graph: Graph, is_made_again: Callable[[Operator], bool]) -> tuple[frozenset[int], frozenset[int]]:
    """Of chains of operators that are made again where derivatives read their results, the values at the heads: those
    that operators make, and inputs."""
    kept: set[int] = set()
    seen: set[int] = set()
    stack = [v for operator in graph.operators if operator.region is None for v in read_by_backward(graph, operator)]
    for region in regions(graph).values():
        made = {v for operator in region for v in operator.results}
        entering = {v for operator in region for v in operator.operands if v is not None and v not in made}
        stack += [source for v in sorted(entering) for source in _outside_scan(graph, v)]
        stack += [v for operator in region if operator.kept for v in operator.results if v in needed_again(graph)[1]]
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
        if operator.region is None and is_made_again(operator):
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
    what only leaves the region was kept. Results that are kept inside are read, and not made again.
    """
    again: set[int] = set()
    values: set[int] = set()
    for region in regions(graph).values():
        wanted: set[int] = set()
        for operator in reversed(region):
            reads = read_by_backward(graph, operator)
            if not operator.kept and any(v in wanted or v in reads for v in operator.results if v is not None):
                again.add(operator.index)
                wanted.update(v for v in operator.operands if v is not None)
            wanted |= reads
        values |= wanted
    return frozenset(again), frozenset(values)

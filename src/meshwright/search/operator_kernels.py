"""An operator's kernels on shards: what it runs forward, and what its derivative runs for each operand.

The one list that searched and stated plans are priced by (`cost.kernels`). A product's derivative is products of the
same FLOPs in other shapes: of [M, K] x [K, N], the left operand's gradient is [M, N] x [N, K], the right one's
[K, M] x [M, N]. A convolution has no tiles here, but a device may have code for one order of dims alone
(`Device.transpose_bandwidth_bytes_per_second`): the gradient of the image is a convolution with the kernel turned, that
of the kernel one of the image by the cotangent, both transposed, whose result is turned back. Everything else that is
differentiated runs once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..cluster import Device
from ..cost.kernels import ATTENTION_BACKWARD, Kernel
from ..program.factors import Rule
from ..program.graph import Graph, Operator
from ..sharding import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A part of an operator's derivative.

    Args:
      operand: position of the operand whose gradient it is.
      kernel: what runs.
      runs: how often, for one run of the operator.
    """

    operand: int
    kernel: Kernel
    runs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorKernels:
    """What one device runs for an operator.

    Args:
      forward: for one run of it.
      gradients: for one run of its derivative.
    """

    forward: Kernel
    gradients: tuple[Gradient, ...]


def operator_kernels(
    graph: Graph, operator: Operator, algorithm: Algorithm, sizes: Mapping[str, int], device: Device, *, stored: bool
) -> OperatorKernels:
    """The kernels of an operator under an algorithm.

    Args:
      graph: it belongs to.
      operator: no link of a scan.
      algorithm: how it is split.
      sizes: of the mesh axes.
      device: what it runs on.
      stored: whether its result is written to memory, if it is no product.
    """
    moving = [i for i, v in enumerate(operator.operands) if v is not None and graph.values[v].differentiated]
    if not operator.differentiated:
        moving = []
    if operator.name == "dot_general":
        return _product(graph, operator, algorithm, sizes, moving)
    if operator.name == "conv_general_dilated":
        return _convolution(graph, operator, algorithm, sizes, moving, device)
    if operator.matmul:
        attention = _is_attention(operator)
        flops, moved, dtype = _whole(graph, operator, algorithm, sizes)
        kernel = Kernel("attention" if attention else "product", flops, moved, dtype)
        return _again(kernel, moving, ATTENTION_BACKWARD if attention else float(len(moving)))
    kernel = plain_kernel(_bytes(graph, operator.results, algorithm.results, sizes), stored=stored)
    return _again(kernel, moving or [0] * operator.differentiated, 1.0)


def is_plain(operator: Operator) -> bool:
    """Whether what an operator takes follows from what it writes, and nothing is moved inside it: it runs one kernel,
    and once more for its derivative."""
    if operator.is_link or operator.matmul or operator.name in ("dot_general", "conv_general_dilated"):
        return False
    return moves_nothing(operator)


def moves_nothing(operator: Operator) -> bool:
    """Whether nothing is moved inside an operator, however it is split: there are no maxima to combine, and no borders
    to exchange."""
    return operator.combine not in ("max", "min") and all(one.kind != "spatial" for one in operator.rule.factors)


def plain_kernel(written: float, *, stored: bool) -> Kernel:
    """The kernel of an operator that is no product.

    Args:
      written: bytes.
      stored: whether its result is written to memory.
    """
    return Kernel("stored" if stored else "fused", 0.0, written)


def _again(kernel: Kernel, moving: list[int], runs: float) -> OperatorKernels:
    """A derivative that runs the same kernel so often for all moving operands together."""
    gradients = tuple(Gradient(operand=i, kernel=kernel, runs=runs / len(moving)) for i in moving)
    return OperatorKernels(forward=kernel, gradients=gradients)


def _bytes(graph: Graph, values: tuple[int | None, ...], specs: tuple, sizes: Mapping[str, int]) -> float:
    return sum(
        graph.values[v].bytes / spec.shards(sizes) for v, spec in zip(values, specs, strict=True) if v is not None
    )


def _whole(
    graph: Graph, operator: Operator, algorithm: Algorithm, sizes: Mapping[str, int]
) -> tuple[float, float, str]:
    """FLOPs and bytes of a product on one device, and the type it runs at."""
    flops = operator.flops / prod(sizes[axis] for split in algorithm.axes for axis in split)
    moved = _bytes(graph, operator.operands, algorithm.operands, sizes)
    moved += _bytes(graph, operator.results, algorithm.results, sizes)
    # Units multiply what they are given and sum in what is asked for: the wider operand says how fast.
    multiplied = [graph.values[v] for v in operator.operands if v is not None]
    dtype = max(multiplied, key=lambda value: value.itemsize).dtype if multiplied else "float32"
    return flops, moved, dtype


def _product(
    graph: Graph, operator: Operator, algorithm: Algorithm, sizes: Mapping[str, int], moving: list[int]
) -> OperatorKernels:
    flops, moved, dtype = _whole(graph, operator, algorithm, sizes)
    extent = _Extent(operator, algorithm, sizes)
    batch, m, n, k = map(extent, _product_factors(operator.rule))
    shapes = {0: (batch, m, k, n), 1: (batch, k, n, m)}
    return OperatorKernels(
        forward=Kernel("product", flops, moved, dtype, (batch, m, n, k)),
        gradients=tuple(
            Gradient(operand=i, kernel=Kernel("product", flops, moved, dtype, shapes[i]), runs=1.0) for i in moving
        ),
    )


def _convolution(
    graph: Graph,
    operator: Operator,
    algorithm: Algorithm,
    sizes: Mapping[str, int],
    moving: list[int],
    device: Device,
) -> OperatorKernels:
    flops, moved, dtype = _whole(graph, operator, algorithm, sizes)
    image, kernel, made = _factors(operator.rule)
    extent = _Extent(operator, algorithm, sizes)
    forward = Kernel("convolution", flops, moved, dtype, (extent(kernel & made),))
    of_image = forward._replace(shape=(extent(kernel & image),))
    if not device.transpose_bandwidth_bytes_per_second:
        gradients = [Gradient(operand=i, kernel=(of_image, forward)[i], runs=1.0) for i in moving]
        return OperatorKernels(forward=forward, gradients=tuple(gradients))
    tensors = zip((*operator.operands, *operator.results), (*algorithm.operands, *algorithm.results), strict=True)
    image_bytes, kernel_bytes, made_bytes = (_bytes(graph, (v,), (spec,), sizes) for v, spec in tensors)
    # What takes the kernel's place is packed: written once more, and read.
    packed, by_cotangent = moved + 2 * kernel_bytes, moved + 2 * made_bytes
    # Of a kernel neighbouring dims change places, which takes no longer than any copy.
    turned = Kernel("stored", 0.0, kernel_bytes)
    both = (Kernel("transpose", 0.0, size) for size in (image_bytes, made_bytes))
    runs = {
        0: (of_image._replace(moved_bytes=packed), turned),
        1: (forward._replace(moved_bytes=by_cotangent), *both, turned),
    }
    gradients = [Gradient(operand=i, kernel=one, runs=1.0) for i in moving for one in runs[i]]
    return OperatorKernels(forward=forward._replace(moved_bytes=packed), gradients=tuple(gradients))


def _factors(rule: Rule) -> tuple[Set[int], Set[int], Set[int]]:
    """The factors of the first two operands and of the result."""
    left, right, result = (
        {factor for dim in tensor for factor in dim} for tensor in (*rule.operands[:2], rule.results[0])
    )
    return left, right, result


@lru_cache(maxsize=1 << 12)
def _product_factors(rule: Rule) -> tuple[Set[int], Set[int], Set[int], Set[int]]:
    """The factors of a product's batch, and of M, N and K."""
    left, right, result = _factors(rule)
    return left & right & result, (left & result) - right, (right & result) - left, (left & right) - result


@dataclass(frozen=True, slots=True)
class _Extent:
    """The local extent of factors together."""

    operator: Operator
    algorithm: Algorithm
    sizes: Mapping[str, int]

    def __call__(self, factors: Set[int]) -> float:
        axes, known = self.algorithm.axes, self.operator.rule.factors
        return prod(known[f].size / prod(self.sizes[axis] for axis in axes[f]) for f in factors)


def _is_attention(operator: Operator) -> bool:
    """Whether a call that holds products is attention: keys and values share positions that neither the queries nor
    the result have."""
    if operator.name != "custom_vjp_call" or len(operator.operands) < 3:
        return False
    tensors = [{factor for dim in tensor for factor in dim} for tensor in operator.rule.operands]
    result = {factor for dim in operator.rule.results[0] for factor in dim}
    return bool((tensors[1] & tensors[2]) - tensors[0] - result)

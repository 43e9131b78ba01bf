"""An operator's kernels on shards: one forward, and for the gradient of each operand those of its derivative.

Searched and stated plans are priced by this list (`cost.kernels`). A product's derivative is products of the same FLOPs
in other shapes: of [M, K] x [K, N], the left operand's gradient is [M, N] x [N, K], the right one's [K, M] x [M, N].
Convolutions have no tiles here. Where a device has code for one order of dims only
(`Device.transpose_bandwidth_bytes_per_second`), operands in another order are copied (`product_orders`); the gradient
of a convolution's image is a convolution with the kernel turned, that of the kernel one of the image by the cotangent,
both transposed, whose result is turned back. The derivative of every other operator runs its kernel once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import prod
from typing import NamedTuple

from ...cluster import Device
from ...cost.chains import chain_work
from ...cost.kernels import ATTENTION_BACKWARD, Kernel
from ...program.graph import GROUPED, GROUPS, Graph, Operator
from ...sharding import Algorithm, Spec
from .product_orders import operand_factors, product_factors, product_orders, sliced_operands
from .ring import attention_mask, in_zigzag_order


class Gradient(NamedTuple):
    """A part of an operator's derivative: for the gradient of the operand at this position, what runs, and how often
    for one run of the operator."""

    operand: int
    kernel: Kernel
    runs: float


class OperatorKernels(NamedTuple):
    """What one device runs for an operator: for one run of it, for one run of its derivative, and to bring operands
    into another order for each run of it."""

    forward: Kernel
    gradients: tuple[Gradient, ...]
    copies: tuple[Kernel, ...] = ()


class KernelsOf:
    """The kernels of an operator, no link of a scan, under any of its algorithms; what all algorithms share is computed
    once. `stored` is whether its result is written to memory, if it is no product."""

    def __init__(
        self, graph: Graph, operator: Operator, sizes: Mapping[str, int], device: Device, *, stored: bool
    ) -> None:
        self._operator, self._sizes, self._device, self._stored = operator, sizes, device, stored
        operands = [None if v is None else graph.values[v] for v in operator.operands]
        moving = [i for i, value in enumerate(operands) if value is not None and value.differentiated]
        self._moving = moving if operator.differentiated else []
        self._bytes = [0.0 if value is None else value.bytes for value in operands]
        self._made_bytes = [0.0 if v is None else graph.values[v].bytes for v in operator.results]
        self._is_free = not stored and is_constant(graph, operator)
        self._extents = [factor.size for factor in operator.rule.factors]
        self._sliced = sliced_operands(graph, operator)

    def __call__(self, algorithm: Algorithm) -> OperatorKernels:
        """Under this algorithm."""
        if self._operator.name == "dot_general":
            return self._product(algorithm)
        if self._operator.name == "conv_general_dilated":
            return self._convolution(algorithm)
        if self._operator.matmul:
            cuts = self._cuts(algorithm)
            whole, mask = self._whole(algorithm, cuts), attention_mask(self._operator)
            if mask is not None:
                kernel = in_zigzag_order(Kernel("attention", *whole, mask), self._operator, cuts)
                return _again(kernel, self._moving, ATTENTION_BACKWARD)
            if self._operator.name in GROUPED:
                # Each product has the gradients of two operands, however many a mixture reads.
                kernel = Kernel("product", *whole, self._of_groups(cuts))
                return _again(kernel, self._moving, min(2.0, len(self._moving)))
            backward = self._operator.backward_flops
            runs = backward / self._operator.flops if backward and self._operator.flops else float(len(self._moving))
            return _again(Kernel("product", *whole), self._moving, runs)
        work = chain_flops(self._operator) / parts_of(algorithm, self._sizes) if self._device.vector_flops else 0.0
        written = 0.0 if self._is_free else sum(self._local(self._made_bytes, algorithm.results))
        kernel = plain_kernel(self._operator, self._device, written, work, stored=self._stored)
        return _again(kernel, self._moving or [0] * self._operator.differentiated, 1.0)

    def _cuts(self, algorithm: Algorithm) -> list[int]:
        """Into how many parts each factor is cut."""
        sizes = self._sizes
        return [prod([sizes[axis] for axis in split]) if split else 1 for split in algorithm.axes]

    def _local(self, whole: Sequence[float], specs: Sequence[Spec]) -> list[float]:
        """Bytes of values on one device."""
        return [size / spec.shards(self._sizes) if size else 0.0 for size, spec in zip(whole, specs, strict=True)]

    def _whole(self, algorithm: Algorithm, cuts: Sequence[int]) -> tuple[float, float, str]:
        """FLOPs and bytes of a product on one device, and the type it runs at."""
        moved = sum(self._local(self._bytes, algorithm.operands)) + sum(
            self._local(self._made_bytes, algorithm.results)
        )
        parts = (cut for cut, f in zip(cuts, self._operator.rule.factors, strict=True) if f.with_factor is None)
        return self._operator.flops / prod(parts), moved, self._operator.multiplied or "float32"

    def _extent(self, factors: Set[int], cuts: Sequence[int]) -> float:
        """The local extent of factors together."""
        return prod([self._extents[f] / cuts[f] for f in factors])

    def _of_groups(self, cuts: Sequence[int]) -> tuple[float, ...]:
        """Groups, and of the product of each rows, columns and what it sums over: the largest, where all groups have
        equally many rows. Empty where groups have no matrices."""
        rule = self._operator.rule
        local = [extent / cut for extent, cut in zip(self._extents, cuts, strict=True)]

        def size(dims: Sequence[Sequence[int]]) -> list[float]:
            return [prod(local[f] for f in dim) for dim in dims]

        matrices = [[dim for dim in t if GROUPS not in dim] for t in rule.operands if any(GROUPS in dim for dim in t)]
        if not matrices or any(len(dims) != 2 for dims in matrices):
            return ()
        summed, columns = max(map(size, matrices), key=prod)
        rows = max(prod(size([dim])) for t in (*rule.operands, *rule.results) for dim in t if 0 in dim)
        return local[GROUPS], rows / self._extents[GROUPS], columns, summed

    def _product(self, algorithm: Algorithm) -> OperatorKernels:
        cuts = self._cuts(algorithm)
        whole = self._whole(algorithm, cuts)
        batch, m, n, k = (self._extent(factors, cuts) for factors in product_factors(self._operator.rule))
        shapes = {0: (batch, m, k, n), 1: (batch, k, n, m)}
        gradients = [Gradient(operand=i, kernel=Kernel("product", *whole, shapes[i]), runs=1.0) for i in self._moving]
        copies, of_gradients = self._copies(algorithm)
        gradients += [one for one in of_gradients if one.operand in self._moving]
        forward = Kernel("product", *whole, (batch, m, n, k))
        return OperatorKernels(forward=forward, gradients=tuple(gradients), copies=copies)

    def _copies(self, algorithm: Algorithm) -> tuple[tuple[Kernel, ...], list[Gradient]]:
        """What is brought into another order for a product, and for its gradients."""
        if not self._device.transpose_bandwidth_bytes_per_second:
            return (), []
        local = self._local(self._bytes, algorithm.operands)
        forward, *gradients = product_orders(self._operator.rule, self._sliced)
        kernels = [Kernel("transpose", 0.0, size) for size in local]
        copied = [Gradient(operand=i, kernel=kernels[j], runs=1.0) for i, those in enumerate(gradients) for j in those]
        return tuple(kernels[i] for i in forward), copied

    def _convolution(self, algorithm: Algorithm) -> OperatorKernels:
        cuts = self._cuts(algorithm)
        flops, moved, dtype = self._whole(algorithm, cuts)
        image, kernel, made = operand_factors(self._operator.rule)
        forward = Kernel("convolution", flops, moved, dtype, (self._extent(kernel & made, cuts),))
        of_image = forward._replace(shape=(self._extent(kernel & image, cuts),))
        if not self._device.transpose_bandwidth_bytes_per_second:
            gradients = [Gradient(operand=i, kernel=(of_image, forward)[i], runs=1.0) for i in self._moving]
            return OperatorKernels(forward=forward, gradients=tuple(gradients))
        image_bytes, kernel_bytes = self._local(self._bytes, algorithm.operands)
        (made_bytes,) = self._local(self._made_bytes, algorithm.results)
        # What takes the kernel's place is packed: written once more, and read.
        packed, by_cotangent = moved + 2 * kernel_bytes, moved + 2 * made_bytes
        # Of a kernel neighbouring dims change places, which takes no longer than any copy.
        turned = Kernel("stored", 0.0, kernel_bytes)
        both = (Kernel("transpose", 0.0, size) for size in (image_bytes, made_bytes))
        runs = {
            0: (of_image._replace(moved_bytes=packed), turned),
            1: (forward._replace(moved_bytes=by_cotangent), *both, turned),
        }
        gradients = [Gradient(operand=i, kernel=one, runs=1.0) for i in self._moving for one in runs[i]]
        return OperatorKernels(forward=forward._replace(moved_bytes=packed), gradients=tuple(gradients))


def is_plain(operator: Operator) -> bool:
    """Whether an operator's seconds follow from its written bytes and its split, without collectives inside: it runs
    one kernel, and once more for its derivative."""
    if operator.is_link or operator.matmul or operator.name in ("dot_general", "conv_general_dilated"):
        return False
    return moves_nothing(operator)


def moves_nothing(operator: Operator) -> bool:
    """Whether no split of an operator has collectives inside: no maxima to combine, no borders to exchange, nothing
    that is reduced inside a call."""
    kinds = {one.kind for one in operator.rule.factors}
    return (
        not operator.rule.inside
        and operator.combine not in ("max", "min")
        and kinds.isdisjoint(("spatial", "circulating"))
    )


def parts_of(algorithm: Algorithm, sizes: Mapping[str, int]) -> int:
    """The number of devices that share the work of an operator."""
    return prod([sizes[axis] for axis in {axis for split in algorithm.axes for axis in split}])


def chain_flops(operator: Operator) -> float:
    """Arithmetic of one run of an operator that is no product, unsplit."""
    return operator.flops * chain_work(operator.name)


def is_constant(graph: Graph, operator: Operator) -> bool:
    """Whether what an operator makes depends on no input (masks, positions). Fused into what reads it, it passes
    through no memory."""
    return all(v is None or graph.values[v].constant for v in operator.results)


def plain_kernel(operator: Operator, device: Device, written: float, flops: float, *, stored: bool) -> Kernel:
    """The kernel of an operator that is no product, from the bytes it writes, and its FLOPs where they matter
    (`Device.vector_flops`); `stored` is whether its result is written to memory."""
    if stored and operator.name == "transpose" and device.transpose_bandwidth_bytes_per_second:
        before, after = operator.rule.operands[0], operator.rule.results[0]
        if after != (*before[:-2], *before[:-3:-1]):  # products read matrices by columns
            return Kernel("transpose", 0.0, written)
    return Kernel("stored" if stored else "fused", flops, written)


def _again(kernel: Kernel, moving: list[int], runs: float) -> OperatorKernels:
    """A derivative that runs the same kernel so often for all moving operands together."""
    gradients = tuple(Gradient(operand=i, kernel=kernel, runs=runs / len(moving)) for i in moving)
    return OperatorKernels(forward=kernel, gradients=gradients)

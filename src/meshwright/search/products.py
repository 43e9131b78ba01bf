"""Seconds and FLOPs of a matrix product or convolution on shards, with the products its derivative makes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..cluster import Device
from ..cost.compute import matmul_seconds
from ..program.graph import Graph, Operator
from ..sharding import Algorithm


def product_passes(graph: Graph, operator: Operator, *, forward_runs: int) -> tuple[int, int]:
    """How often it is computed: in its own form (forward, and for the gradients of operands other than the first),
    and for the gradient of the first operand."""
    if not operator.differentiated:
        return forward_runs, 0
    moving = [v is not None and graph.values[v].differentiated for v in operator.operands]
    return forward_runs + sum(moving[1:]), int(moving[0])


def product_seconds(
    graph: Graph,
    operator: Operator,
    algorithm: Algorithm,
    sizes: Mapping[str, int],
    device: Device,
    *,
    forward_runs: int,
) -> float:
    """Seconds of one run on one device, backward included.

    Args:
      forward_runs: 2 if it is rematerialised, else 1.
    """
    flops = operator.flops / prod(sizes[axis] for split in algorithm.axes for axis in split)
    moved = 0.0
    for values, specs in ((operator.operands, algorithm.operands), (operator.results, algorithm.results)):
        moved += sum(
            graph.values[v].bytes / spec.shards(sizes) for v, spec in zip(values, specs, strict=True) if v is not None
        )
    result = next((graph.values[v] for v in operator.results if v is not None), None)
    # Units multiply what they are given and sum in what is asked for: the wider operand says how fast.
    multiplied = [graph.values[v] for v in operator.operands if v is not None]
    dtype = max(multiplied, key=lambda value: value.itemsize).dtype if multiplied else "float32"
    windows = first_windows = 0.0
    if operator.name == "conv_general_dilated" and device.unfolds_convolutions and result is not None:
        made, summed = _channels(operator, algorithm, sizes)
        # A product of FLOPs 2 M K N has a matrix of windows of M K elements; twice: it is written and read.
        windows = 2 * result.itemsize * flops / (2 * made)
        first_windows = 2 * result.itemsize * flops / (2 * summed)
    own, first = product_passes(graph, operator, forward_runs=forward_runs)
    seconds = own * matmul_seconds(flops, moved + windows, dtype, device)
    return seconds + first * matmul_seconds(flops, moved + first_windows, dtype, device)


def _channels(operator: Operator, algorithm: Algorithm, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Local output and input channels of a convolution: the factors its kernel shares with its result or its image."""
    image, kernel, result = (
        {factor for dim in tensor for factor in dim}
        for tensor in (operator.rule.operands[0], operator.rule.operands[1], operator.rule.results[0])
    )

    def extent(factors: set[int]) -> int:
        return prod(operator.rule.factors[f].size // prod(sizes[axis] for axis in algorithm.axes[f]) for f in factors)

    return extent((kernel & result) - image), extent((kernel & image) - result)

"""What attention over split positions sends, and the seconds of that which no arithmetic hides (`_jax.attention_ring`).

A step of the ring sends keys and values while the kernel works on those that are there; backward the gradients of keys
and values follow in the same way, and come home at the end. Of each step counts what takes longer. Bringing positions
into zigzag order and back hides behind nothing. Gathered keys are conversions of the operands (all-gathers, and
reduce-scatters of their gradients), priced as those of any operator; here is what their zigzag order sends.

Results that are merged pass through memory once more in each step, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ...cost.kernels import Kernel
from ...program.graph import Graph, Operator
from ...sharding import Algorithm

# As `meshwright.attention` is called in a plan.
ATTENTION = "attention"

_SUM_BYTES = 4.0  # what is summed over steps is float32


class Sent(NamedTuple):
    """Collective-permutes of one size over the ring: how many run forward, how many in the derivative."""

    size_bytes: float
    forward: int
    backward: int


class Ring(NamedTuple):
    """Attention over split positions.

    Args:
      axes: that split them.
      devices: on the ring.
      turns: what brings positions into zigzag order and back, one array in two halves.
      blocks: what of keys and values travels.
      steps: kernels that a device runs one after the other, for each one over whole positions.
      merged_bytes: of a result in float32, which each step reads and writes.
    """

    axes: tuple[str, ...]
    devices: int
    turns: tuple[Sent, ...]
    blocks: tuple[Sent, ...]
    steps: int
    merged_bytes: float


def ring_of(graph: Graph, operator: Operator, algorithm: Algorithm, sizes: Mapping[str, int]) -> Ring | None:
    """How an algorithm of attention splits positions; None where it does not, or the operator is no attention."""
    if operator.name != ATTENTION:
        return None
    queries, keys = positions_of(operator)
    axes, factor = algorithm.axes[queries], operator.rule.factors[keys]
    devices = prod(sizes[axis] for axis in axes)
    if devices == 1:
        return None
    circulates = bool(algorithm.axes[keys])
    itemsize = next(graph.values[v].itemsize for v in operator.operands if v is not None)
    query, key, value = (_elements(operator, algorithm, sizes, tensor) for tensor in operator.rule.operands[:3])
    out, sums = (_elements(operator, algorithm, sizes, tensor) for tensor in operator.rule.results)
    once = operator.differentiated
    turns: list[Sent] = []
    if factor.granule > 1:
        # What backward is the same as forward in one program is done once.
        again = 4 if operator.region is not None or len(operator.path) > 1 else 2
        turned = [(query, 2, again), (out, 2, 4), *[(one, 2, again) for one in (key, value) if circulates]]
        turns = [Sent(size * itemsize / 2, forward, backward * once) for size, forward, backward in turned]
        turns.append(Sent(sums * _SUM_BYTES / 2, 2, 2 * once))
    before = factor.halo[0]
    if before:
        extent = factor.size // devices
        reached = [min(extent, before - back * extent) / extent for back in range(devices - 1)]
        shares = [share for share in reached if share > 0]
        hops = [one for size in (key, value) for share in shares for one in _both(size * share, itemsize, once, 1, 1)]
        return Ring(axes, devices, (), tuple(hops) if circulates else (), 1, 0.0)
    blocks = [one for size in (key, value) for one in _both(size, itemsize, once, devices - 1, devices)]
    return Ring(axes, devices, tuple(turns), tuple(blocks) if circulates else (), devices, out * _SUM_BYTES)


def _both(size: float, itemsize: float, once: bool, there: int, back: int) -> tuple[Sent, Sent]:
    """Elements that travel, forward and again in the derivative, and their gradients."""
    return Sent(size * itemsize, there, there * once), Sent(size * _SUM_BYTES, 0, back * once)


def positions_of(operator: Operator) -> tuple[int, int]:
    """The factors of an attention's query and key positions."""
    return operator.rule.operands[0][1][0], operator.rule.operands[1][1][0]


def attention_mask(operator: Operator) -> tuple[float, float] | None:
    """Of attention the share of its scores that the mask leaves, and the size of its heads, 0 if not known; None of
    others.

    A call that holds products is attention if keys and values share positions that neither the queries nor the result
    have. Of `meshwright.attention` a window is in the FLOPs.
    """
    if operator.name == ATTENTION:
        keys, head = operator.rule.factors[positions_of(operator)[1]], operator.rule.operands[0][-1][0]
        return (0.5 if keys.granule > 1 else 1.0), float(operator.rule.factors[head].size)
    if operator.name != "custom_vjp_call" or len(operator.operands) < 3:
        return None
    tensors = [{factor for dim in tensor for factor in dim} for tensor in operator.rule.operands]
    result = {factor for dim in operator.rule.results[0] for factor in dim}
    return (0.5, 0.0) if (tensors[1] & tensors[2]) - tensors[0] - result else None


def in_zigzag_order(kernel: Kernel, operator: Operator, cuts: Sequence[int]) -> Kernel:
    """The kernels of one device for attention under a causal mask, positions being cut into so many blocks: one block
    under the mask, and half of the scores of each other one, with no mask."""
    if operator.name != ATTENTION or operator.rule.factors[positions_of(operator)[1]].granule == 1:
        return kernel
    blocks, (_, head) = cuts[positions_of(operator)[0]], kernel.shape
    if blocks == 1:
        return kernel
    return kernel._replace(flops=kernel.flops * (blocks + 1) / (2 * blocks), shape=(blocks / (blocks + 1), head))


def _elements(
    operator: Operator, algorithm: Algorithm, sizes: Mapping[str, int], tensor: Sequence[Sequence[int]]
) -> float:
    """Of an operand or result on one device."""
    factors = [factor for dim in tensor for factor in dim]
    cuts = prod(sizes[axis] for factor in factors for axis in algorithm.axes[factor])
    return prod(operator.rule.factors[factor].size for factor in factors) / cuts


def exposed_seconds(ring: Ring, seconds: tuple[float, float], permute: Callable[[float], float]) -> tuple[float, float]:
    """Seconds of a ring's collectives forward and backward that arithmetic does not hide.

    Args:
      ring: of one run of the operator.
      seconds: of its kernels, forward and backward, over all steps.
      permute: seconds of a permute of so many bytes over the ring.
    """
    turning = [sum(one[1 + back] * permute(one.size_bytes) for one in ring.turns) for back in (0, 1)]
    found = []
    for back, computing in enumerate(seconds):
        sent = sum(one[1 + back] * permute(one.size_bytes) for one in ring.blocks)
        # The last step of the ring sends nothing; with a window what is sent is a part of the neighbours' blocks.
        hidden = computing * (ring.devices - 1) / ring.devices if ring.steps > 1 else computing
        home = (
            sum(permute(one.size_bytes) for one in ring.blocks if not one.forward) if back and ring.steps > 1 else 0.0
        )
        found.append(max(sent - home - hidden, 0.0) + home)
    return turning[0] + found[0], turning[1] + found[1]

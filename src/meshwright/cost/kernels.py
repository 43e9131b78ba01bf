"""Seconds of one kernel by its class and size: a roofline with an achievable fraction of each roof.

* *Products* (batched [M, K] x [K, N]): arithmetic at the profile's fraction of the peak of their type, times what tiles
  leave: a product is computed in tiles of its result by the processors of a device in waves, and pays for whole tiles
  and whole waves. Then operands and result have to pass through memory (the right operand more often where a library
  packs it); what of that does not hide behind arithmetic (`Device.memory_overlap`) comes on top. Bytes per FLOP are
  1/M + 1/K + 1/N, so this one term is what makes splitting a thin dim further a bad plan. A product of few rows takes
  no longer than a matrix-vector product for each row, which has no tiles and reads the matrix once more. So seconds
  grow with each dim, and doubling a dim at most doubles them.
* *Convolutions*: the same by their FLOPs, without tiles; slower with few features where a profile says so, since
  features lie in the lanes of one instruction.
* *Fused attention*: FLOPs that a mask leaves, at a fraction of its own, which grows with heads of up to 128; its
  backward pass has 2.5 times the products (it computes the scores again).
* *Chains* of elementwise operations, reductions and softmax: what is stored passes through memory as often as the
  profile says; what is fused into its readers costs a share of that. Where arithmetic is not much faster than memory
  (`Device.vector_flops`) it comes on top of what is stored, and is what the rest costs.
* *Transposes* that are passes of their own (`Device.transpose_bandwidth_bytes_per_second`): their bytes at its rate.

All but what is fused into others costs a start (`Device.kernel_launch_seconds`).

Known limits: waves are those of one tile size for each device; libraries also split K and choose among tiles. A fused
attention that says nothing of its mask is taken to be causal.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Literal, NamedTuple

from ..cluster import Device
from ..cluster.hardware import NARROW
from .efficiency import EfficiencyProfile

KernelKind = Literal["product", "convolution", "attention", "stored", "fused", "transpose"]

# Backward products of fused attention for each forward one: five instead of two.
ATTENTION_BACKWARD = 2.5

# The size of heads at which attention is at its profile's fraction.
_WIDE_HEAD = 128

# Processors that each compute a tile of a result; edges of tiles, with the share of its rate that each reaches.
_PROCESSORS = {"V100": 80, "A100": 108, "H100": 132, "H200": 132, "B200": 148, "4090": 128, "P40": 30}
_TILES = (((256, 128), 1.0), ((128, 128), 0.95), ((128, 64), 0.8), ((64, 64), 0.6))

# Steps over K that a tile takes to fill and drain its pipeline, in elements.
_RAMP = 128


class Kernel(NamedTuple):
    """One kernel at the size one device runs it.

    Args:
      kind: its class; of chains "stored" or "fused".
      flops: multiply-adds counted as two; of chains counted in additions (`cost.chains`), where they matter.
      moved_bytes: read and written; of chains and transposes written.
      dtype: of its operands; empty for chains and transposes.
      shape: of a product: batch, M, N and K; of a convolution: features it makes; of attention: the share of its scores
        that the mask leaves, and the size of its heads, 0 if not known; empty otherwise.
    """

    kind: KernelKind
    flops: float
    moved_bytes: float
    dtype: str = ""
    shape: tuple[float, ...] = ()


@lru_cache(maxsize=1 << 18)
def kernel_seconds(kernel: Kernel, device: Device, profile: EfficiencyProfile) -> float:
    """Seconds of one run.

    >>> from meshwright.cluster import load_cluster
    >>> from meshwright.cost.efficiency import profile_of
    >>> a100 = load_cluster("dgx-a100-80").device
    >>> large = Kernel("product", 2.0 * 8192**3, 3 * 2 * 8192.0**2, "bfloat16", (1, 8192, 8192, 8192))
    >>> 0.6 < large.flops / kernel_seconds(large, a100, profile_of(a100)) / 312e12 < 0.78
    True
    """
    traffic = kernel.moved_bytes / (profile.memory * device.memory_bandwidth_bytes_per_second)
    launch = device.kernel_launch_seconds
    if kernel.kind in ("fused", "stored"):
        computing = kernel.flops / device.vector_flops if device.vector_flops else 0.0
        if kernel.kind == "stored":
            return profile.passes * traffic + computing + launch
        return computing if device.vector_flops else profile.fused_share * profile.passes * traffic
    if kernel.kind == "transpose":
        return kernel.moved_bytes / device.transpose_bandwidth_bytes_per_second + launch
    arithmetic = arithmetic_seconds(kernel, device, profile)
    if kernel.kind == "attention":
        return arithmetic + launch
    if kernel.kind == "convolution" and kernel.shape:
        arithmetic *= 1 + profile.feature_ramp / kernel.shape[0]
    ways = [(arithmetic, traffic)]
    if kernel.kind == "product" and kernel.shape:
        filled = _filled(kernel.shape, device.kind) if profile.tiles else 1.0
        ways = [
            (arithmetic / filled, traffic * (1 + profile.packed * _right_share(kernel.shape))),
            (arithmetic, traffic * (1 + _read_again(kernel.shape))),
        ]
    return launch + min(max(way) + (1.0 - device.memory_overlap) * min(way) for way in ways)


def arithmetic_seconds(kernel: Kernel, device: Device, profile: EfficiencyProfile) -> float:
    """Seconds of the arithmetic of a product, a convolution or attention, in full tiles: however it is split, its parts
    take no less together."""
    if kernel.kind in ("fused", "stored", "transpose"):
        return 0.0
    dtype = device.multiplied_as(kernel.dtype)
    peak = device.peak_flops[dtype]
    if kernel.kind == "attention":
        seen, size = kernel.shape
        # cuDNN on H100, FLOP/s with heads of 64 to those of 128: 413 to 595 (Shah et al. 2024, FlashAttention-3,
        # figure 5, 16,384 positions).
        narrow = min(size / _WIDE_HEAD, 1.0) ** 0.5 if size else 1.0
        return seen * kernel.flops / (profile.attention * narrow * peak)
    if kernel.kind == "convolution":
        return kernel.flops / (profile.convolution * peak)
    reached = profile.narrow if dtype.startswith(NARROW) else profile.matmul
    return kernel.flops / (reached * peak)


def _right_share(shape: tuple[float, ...]) -> float:
    """The share of a product's operands and result that its right operand is."""
    _, m, n, k = shape
    return k * n / (m * k + k * n + m * n)


def _read_again(shape: tuple[float, ...]) -> float:
    """What a product reads again as a matrix-vector product for each row, or an outer product for each of the vectors
    that it sums: the largest of its three matrices for each row but the first, as a share of all three."""
    _, m, n, k = shape
    return (1 - 1 / max(min(m, n, k), 1.0)) * m * n * k / (m * k + k * n + m * n)


def _filled(shape: tuple[float, ...], kind: str) -> float:
    """The share of processors' time that a product's tiles fill."""
    batch, m, n, k = shape
    processors = next((count for part, count in _PROCESSORS.items() if part in kind), 0)
    if not processors:
        return 1.0
    # Libraries have several tiles: of these the one that wastes least, smaller ones slower by themselves.
    best = 0.0
    for edges, speed in _TILES:
        for rows, columns in (edges, edges[::-1]):
            waves = ceil(batch * ceil(m / rows) * ceil(n / columns) / processors)
            best = max(best, speed * batch * m * n / (waves * processors * rows * columns))
    # The pipeline of a tile fills and drains over K.
    return min(best, 1.0) * k / (k + _RAMP)

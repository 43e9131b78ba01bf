"""Seconds of an operator on one device: a roofline of achievable FLOP/s and memory bandwidth.

Where a device does not hide its memory traffic behind arithmetic (`Device.memory_overlap`), narrow products cost more
than their FLOPs: bytes per FLOP are 1/M + 1/K + 1/N of a product [M, K] x [K, N], so this one term is what makes
splitting a thin dim further a bad plan.

Known limits: one efficiency for all sizes and operators; elementwise chains are taken to be fused, so each costs the
writing of its result only.
"""

from __future__ import annotations

from ..cluster import Device


def matmul_seconds(flops: float, moved_bytes: float, dtype: str, device: Device) -> float:
    """Seconds of a matrix product or convolution of `flops` FLOPs that reads and writes `moved_bytes`."""
    arithmetic = flops / device.achievable_flops(dtype)
    traffic = moved_bytes / device.memory_bandwidth_bytes_per_second
    return max(arithmetic, traffic) + (1.0 - device.memory_overlap) * min(arithmetic, traffic)


def elementwise_seconds(moved_bytes: float, device: Device) -> float:
    """Seconds of an operator bound by memory that moves `moved_bytes`."""
    return moved_bytes / device.memory_bandwidth_bytes_per_second

"""Seconds of an operator on one device: a roofline of achievable FLOP/s and memory bandwidth.

Known limits: one efficiency for all sizes and operators; elementwise chains are taken to be fused, so each costs the
writing of its result only.
"""

from __future__ import annotations

from ..cluster import Device


def matmul_seconds(flops: float, moved_bytes: float, dtype: str, device: Device) -> float:
    """Seconds of a matrix product or convolution of `flops` FLOPs that reads and writes `moved_bytes`."""
    return max(flops / device.achievable_flops(dtype), moved_bytes / device.memory_bandwidth_bytes_per_second)


def elementwise_seconds(moved_bytes: float, device: Device) -> float:
    """Seconds of an operator bound by memory that moves `moved_bytes`."""
    return moved_bytes / device.memory_bandwidth_bytes_per_second

"""Seconds of what passes through memory once and computes next to nothing: inputs written, optimizer state updated."""

from __future__ import annotations

from ..cluster import Device


def elementwise_seconds(moved_bytes: float, device: Device) -> float:
    """Seconds of reading and writing `moved_bytes`."""
    return moved_bytes / device.memory_bandwidth_bytes_per_second

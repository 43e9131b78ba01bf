"""The devices JAX sees: as plain data for packages that do not import JAX, and those that a user names.

Uses only what is public and the same in JAX 0.10 to 0.12: `jax.devices()` and each device's kind and process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from ..errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevices:
    """`kind`: JAX's name for the devices ("cpu", "NVIDIA H200"). `devices_of_process`: how many each process holds."""

    kind: str
    devices_of_process: tuple[int, ...]


def visible_devices(devices: Sequence[jax.Device] | None = None) -> VisibleDevices:
    """Devices of JAX, by default all of its default backend, over all processes, in the order of the processes.

    Raises ValueError when their kinds differ.
    """
    devices = jax.devices() if devices is None else devices
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise ValueError(
            f"refused to describe the local devices: got kinds {', '.join(kinds)}; needed one kind; "
            "where: jax.devices(); try: make one kind visible, with CUDA_VISIBLE_DEVICES for example"
        )
    count = Counter(device.process_index for device in devices)
    return VisibleDevices(kind=kinds[0], devices_of_process=tuple(count[process] for process in sorted(count)))


def given_bytes(devices: Sequence[jax.Device]) -> float | None:
    """The memory that JAX gives a program on each of these devices, the least of them, as far as this process has them;
    None where their backend does not say it (CPUs)."""
    stats = [device.memory_stats() for device in devices if device.process_index == jax.process_index()]
    limits = [one["bytes_limit"] for one in stats if one and one.get("bytes_limit")]
    return float(min(limits)) if limits else None


def named_devices(devices: Any) -> tuple[jax.Device, ...]:
    """The devices that `devices=` names, in order, those of a process together.

    Args:
      devices: a sequence of them or a mesh.

    Raises:
      PlanError: if it names none, or one twice.
    """
    given = devices.devices.flat if isinstance(devices, Mesh) else devices
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else ()
    if not found or not all(isinstance(d, jax.Device) for d in found) or len(set(found)) < len(found):
        raise PlanError(
            refused="the devices", got=f"{devices!r:.80}", needed="different devices of JAX, or a mesh of them",
            where="devices=", try_="devices=jax.devices()[:4]",
        )  # fmt: skip
    # In the order of processes, as hosts are counted.
    return tuple(sorted(found, key=lambda device: device.process_index))

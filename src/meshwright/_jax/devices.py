"""The devices JAX sees, as plain data for packages that do not import JAX.

Uses only what is public and the same in JAX 0.10 to 0.12: `jax.devices()` and each device's kind and process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import jax


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

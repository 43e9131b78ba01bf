"""Which devices the numbers of a cluster were measured on, where a calibration found them."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ClusterError, check_count, check_text

PLATFORMS = ("cpu", "gpu", "tpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOn:
    """What measured numbers hold for: who runs by them has to have the same.

    Args:
      device_kind: JAX's name for the devices.
      devices: how many there were in all.
      platform: "cpu", "gpu" or "tpu".
      processes: that held them.
      jax: its version.

    Raises ClusterError for an empty name, a number below 1 or an unknown platform.

    >>> print(MeasuredOn(device_kind="cpu", devices=8, platform="cpu", processes=1, jax="0.10.2"))
    8 x cpu under JAX 0.10.2
    """

    device_kind: str
    devices: int
    platform: str
    processes: int
    jax: str

    def __post_init__(self) -> None:
        check_text("MeasuredOn", "device_kind", self.device_kind)
        check_count("MeasuredOn", "devices", self.devices)
        check_text("MeasuredOn", "platform", self.platform)
        check_count("MeasuredOn", "processes", self.processes)
        check_text("MeasuredOn", "jax", self.jax)
        if self.platform not in PLATFORMS:
            raise ClusterError(
                refused="this measured on", got=repr(self.platform), needed="one of cpu, gpu, tpu",
                where="MeasuredOn.platform", try_="calibrating again, or removing [measured_on]",
            )  # fmt: skip

    def __str__(self) -> str:
        held = "" if self.processes == 1 else f" in {self.processes} processes"
        return f"{self.devices} x {self.device_kind}{held} under JAX {self.jax}"

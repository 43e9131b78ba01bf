"""What one host is made of: its devices, the link between them, and the NICs that leave it.

Bandwidths are what a program can reach, not what a datasheet promises: a preset's link bandwidth is the bus bandwidth
measured with a large collective where a measurement exists. Peak FLOP/s are the datasheet's, because they are the usual
denominator of utilisation; `efficiency` is the fraction of them a large matmul reaches. 'float32' means a matmul of
float32 arrays as JAX runs it by default, which is TensorFloat-32 on the GPUs that have it.

Known limit: one number describes the link of every pair of devices in a host. Hosts whose pairs differ (the hybrid
cube-mesh of V100 machines) are described by what a collective over the whole host reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import ClusterError, check_count, check_number, check_text, check_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    `peak_flops`: dtype name ('float32', 'bfloat16', ...) to dense FLOP/s; 'float32' is required, because a dtype that
    is not listed runs at its rate. `memory_bytes`: all of the device's memory, of which a program may use
    `usable_memory_fraction` (0 to 1]. `memory_bandwidth_bytes_per_second`: of that memory. `efficiency` (0 to 1]: the
    achievable fraction of `peak_flops`. `kernel_launch_seconds`: fixed cost of every operator. `memory_overlap` [0 to
    1]: the share of a matrix product's memory traffic that hides behind its arithmetic. `unfolds_convolutions`: whether
    a convolution writes every window out as a row of a matrix first.

    Raises ClusterError for a number that is missing, not finite or out of range.

    >>> device = Device(kind="toy", peak_flops={"float32": 1e12, "bfloat16": 4e12}, memory_bytes=16e9,
    ...     memory_bandwidth_bytes_per_second=1e12, efficiency=0.5, kernel_launch_seconds=5e-6,
    ...     usable_memory_fraction=0.9)
    >>> device.achievable_flops("bfloat16")
    2000000000000.0
    """

    kind: str
    # Left out of the hash (a mapping has none); equality still compares it.
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: float
    memory_bandwidth_bytes_per_second: float
    efficiency: float
    kernel_launch_seconds: float
    usable_memory_fraction: float
    memory_overlap: float = 1.0
    unfolds_convolutions: bool = False

    def __post_init__(self) -> None:
        check_text("Device", "kind", self.kind)
        if not isinstance(self.peak_flops, Mapping) or "float32" not in self.peak_flops:
            raise ClusterError(
                refused="a device",
                got=f"{self.peak_flops!r}",
                needed="a table of FLOP/s by dtype name, with at least 'float32'",
                where="Device.peak_flops",
                try_="peak_flops = {float32 = 15.7e12, float16 = 125e12}",
            )
        for dtype, flops in self.peak_flops.items():
            check_text("Device", "peak_flops (its dtype names)", dtype)
            check_number("Device", f"peak_flops.{dtype}", flops, above=True)
        check_number("Device", "memory_bytes", self.memory_bytes, above=True)
        check_number("Device", "memory_bandwidth_bytes_per_second", self.memory_bandwidth_bytes_per_second, above=True)
        check_number("Device", "efficiency", self.efficiency, above=True, at_most=1.0)
        check_number("Device", "kernel_launch_seconds", self.kernel_launch_seconds)
        check_number("Device", "usable_memory_fraction", self.usable_memory_fraction, above=True, at_most=1.0)
        check_number("Device", "memory_overlap", self.memory_overlap, at_most=1.0)
        check_type("Device", "unfolds_convolutions", self.unfolds_convolutions, bool)
        # A sorted private copy: the caller's mapping may change, and text made from it must not depend on its order.
        object.__setattr__(self, "peak_flops", {k: float(v) for k, v in sorted(self.peak_flops.items())})

    @property
    def platform(self) -> str:
        """What JAX calls the platform of such devices: "cpu", "gpu" or "tpu"."""
        return "cpu" if self.kind == "cpu" else "tpu" if self.kind.upper().startswith("TPU") else "gpu"

    @property
    def usable_memory_bytes(self) -> float:
        """Bytes of this device that a program may fill."""
        return self.memory_bytes * self.usable_memory_fraction

    def achievable_flops(self, dtype: str) -> float:
        """FLOP/s that a large matmul of `dtype` reaches; a dtype without a peak of its own runs as float32."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"]) * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way for bytes to travel: the link inside a host (per device) or one NIC.

    `bandwidth_bytes_per_second`: one direction, all directions of travel usable at once. `latency_seconds`: of one hop.
    `launch_seconds`: fixed cost of starting one collective that uses this link. `exchange_efficiency` (0 to 1]: the
    share of the bandwidth that an all-to-all reaches.

    >>> Link(bandwidth_bytes_per_second=25e9, latency_seconds=3e-6).launch_seconds
    0.0
    """

    bandwidth_bytes_per_second: float
    latency_seconds: float
    launch_seconds: float = 0.0
    exchange_efficiency: float = 1.0

    def __post_init__(self) -> None:
        check_number("Link", "bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, above=True)
        check_number("Link", "latency_seconds", self.latency_seconds)
        check_number("Link", "launch_seconds", self.launch_seconds)
        check_number("Link", "exchange_efficiency", self.exchange_efficiency, above=True, at_most=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine: `devices` equal devices joined by `link`, and `nics` equal NICs that all of them share.

    >>> from meshwright.cluster import load_cluster
    >>> host = load_cluster("p4d.24xlarge").hosts[0]
    >>> host.devices, host.nics
    (8, 4)
    """

    device: Device
    devices: int
    link: Link
    nics: int
    nic: Link

    def __post_init__(self) -> None:
        check_type("Host", "device", self.device, Device)
        check_count("Host", "devices", self.devices)
        check_type("Host", "link", self.link, Link)
        check_count("Host", "nics", self.nics)
        check_type("Host", "nic", self.nic, Link)

    @property
    def nic_bandwidth_bytes_per_second(self) -> float:
        """Bytes/s that leave (or enter) this host over all its NICs together."""
        return self.nics * self.nic.bandwidth_bytes_per_second

"""What one host is made of: its devices, what joins them, and the NICs that leave it.

Bandwidths are what a program can reach, not what a datasheet promises: a preset's link bandwidth is the bus bandwidth
measured with a large collective where a measurement exists. Peak FLOP/s are the datasheet's, because they are the usual
denominator of utilisation; `efficiency` is the fraction of them that large products of a program reach. 'float32' means
a matmul of float32 arrays as JAX runs it by default, which is TensorFloat-32 on the GPUs that have it.

The devices of a host are joined in one of three ways: by a switch or bus, every pair alike (the default); by wires
between pairs (`Host.wires`: the hybrid cube-mesh of V100 machines); or as a torus (`Host.torus`: a TPU slice, which is
one host here however many machines feed it, because its chips reach each other without leaving the torus).

Known limits: devices of one host are of one kind; what a host's CPU and its PCIe tree do to the NICs is part of the
NICs' measured bandwidth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .._jax.dataflow import MEGACORE, WIDE, WIDEST
from .errors import ClusterError, check_count, check_number, check_text, check_type
from .torus import check_torus
from .wires import check_wires

# No host is near this many devices; neither is a slice of TPUs.
_MOST_DEVICES = 100_000


# Hopper and later, in JAX's names of GPUs ("NVIDIA H100 80GB HBM3", "NVIDIA GB200", "NVIDIA GeForce RTX 5090").
_SINCE_HOPPER = re.compile(r"\bG?[HB]\d+|Blackwell|RTX 50\d\d")
# Before Ampere ("Tesla V100-SXM2-16GB", "Tesla P40", "NVIDIA GeForce RTX 2080 Ti").
_BEFORE_AMPERE = re.compile(r"\b[VTPKM]\d+\b|GTX|TITAN|Quadro|RTX 20\d\d")


@cache
def compiler_of(kind: str, platform: str) -> str:
    """The platform as the memory model tells compilers apart (`_jax.dataflow`): TPUs v4 and v5p have chips of two cores
    that run one program, GPUs before Hopper no arithmetic in bfloat16, those before Ampere no products in it either.

    Args:
      kind: JAX's name of the device.
      platform: "cpu", "gpu" or "tpu".
    """
    if kind in ("TPU v4", "TPU v5"):
        return MEGACORE
    if platform != "gpu" or _SINCE_HOPPER.search(kind):
        return platform
    return WIDEST if _BEFORE_AMPERE.search(kind) else WIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    `peak_flops`: dtype name ('float32', 'bfloat16', ...) to dense FLOP/s; 'float32' is required, because a dtype that
    is not listed runs at its rate. `memory_bytes`: all of the device's memory, of which a program may use
    `usable_memory_fraction` (0 to 1]. `memory_bandwidth_bytes_per_second`: of that memory. `efficiency` (0 to 1]: the
    fraction of `peak_flops` that large products of a program reach. `kernel_launch_seconds`: fixed cost of a kernel.
    `memory_overlap` [0 to 1]: the share of a matrix product's memory traffic that hides behind its arithmetic; what
    does not are a tile's first loads and last stores. `transpose_bandwidth_bytes_per_second`: of changing the order of
    an array's dims where that is a pass of its own: before products and before and after gradients of convolutions,
    which have code for one order, and gathers and scatters along other dims than the first; 0 where it is part of other
    kernels. `vector_flops`: FLOP/s of arithmetic that is no product, where that is not much faster than memory; 0 where
    it hides behind that. `clock_hertz`: of its compute units, which makes seconds of a compiler's cycles; 0 where it is
    not known.

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
    memory_overlap: float = 0.75
    transpose_bandwidth_bytes_per_second: float = 0.0
    vector_flops: float = 0.0
    clock_hertz: float = 0.0

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
        transposes = self.transpose_bandwidth_bytes_per_second
        check_number("Device", "transpose_bandwidth_bytes_per_second", transposes)
        check_number("Device", "vector_flops", self.vector_flops)
        check_number("Device", "clock_hertz", self.clock_hertz)
        # A sorted private copy: the caller's mapping may change, and text made from it must not depend on its order.
        object.__setattr__(self, "peak_flops", {k: float(v) for k, v in sorted(self.peak_flops.items())})

    @property
    def platform(self) -> str:
        """What JAX calls the platform of such devices: "cpu", "gpu" or "tpu"."""
        return "cpu" if self.kind == "cpu" else "tpu" if self.kind.upper().startswith("TPU") else "gpu"

    @property
    def compiler(self) -> str:
        """The platform as the memory model tells compilers apart (`compiler_of`)."""
        return compiler_of(self.kind, self.platform)

    @property
    def usable_memory_bytes(self) -> float:
        """Bytes of this device that a program may fill."""
        return self.memory_bytes * self.usable_memory_fraction

    def achievable_flops(self, dtype: str) -> float:
        """FLOP/s that a large matmul of `dtype` reaches (`multiplied_as`)."""
        return self.peak_flops[self.multiplied_as(dtype)] * self.efficiency

    def multiplied_as(self, dtype: str) -> str:
        """The dtype that products of `dtype` run in: where it has no peak of its own numbers of 8 bits are widened to
        16, all others to float32."""
        if dtype in self.peak_flops:
            return dtype
        wider = [one for one in ("bfloat16", "float16") if one in self.peak_flops and dtype.startswith(NARROW)]
        return max(wider, key=lambda one: self.peak_flops[one], default="float32")


# Types of 8 bits.
NARROW = ("float8", "int8", "uint8")


def slowest_device(devices: Sequence[Device]) -> Device:
    """A device that is no better than any of `devices`: the least of each number, the longest of each time.

    >>> from meshwright.cluster import load_cluster
    >>> slowest_device([load_cluster(name).device for name in ("p3.16xlarge", "p4d.24xlarge")]).kind
    'NVIDIA A100-SXM4-40GB or Tesla V100-SXM2-16GB'
    """
    different = list(dict.fromkeys(devices))
    if len(different) == 1:
        return different[0]
    dtypes = set().union(*(device.peak_flops for device in different))
    efficiency = min(device.efficiency for device in different)
    usable = min(device.usable_memory_bytes for device in different)
    memory = min(device.memory_bytes for device in different)
    return Device(
        kind=" or ".join(sorted({device.kind for device in different})),
        # The device with the lowest peak need not be the one with the lowest efficiency.
        peak_flops={t: min(device.achievable_flops(t) for device in different) / efficiency for t in dtypes},
        memory_bytes=memory,
        memory_bandwidth_bytes_per_second=min(device.memory_bandwidth_bytes_per_second for device in different),
        efficiency=efficiency,
        kernel_launch_seconds=max(device.kernel_launch_seconds for device in different),
        usable_memory_fraction=usable / memory,
        memory_overlap=min(device.memory_overlap for device in different),
        transpose_bandwidth_bytes_per_second=min(
            (d.transpose_bandwidth_bytes_per_second for d in different if d.transpose_bandwidth_bytes_per_second),
            default=0.0,
        ),
        vector_flops=min((d.vector_flops for d in different if d.vector_flops), default=0.0),
        clock_hertz=min(d.clock_hertz for d in different),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way for bytes to travel: the link inside a host (per device), one wire, one link of a torus, or one NIC.

    `bandwidth_bytes_per_second`: one direction, all directions of travel usable at once; reached by large messages.
    `latency_seconds`: of one step of a collective. `launch_seconds`: fixed cost of starting one collective that uses
    this link. `exchange_efficiency` (0 to 1]: the share of the bandwidth that an all-to-all reaches. `chunk_steps`: a
    message travels in chunks, as large as is best but so that one takes at most this many step latencies; 0: in one
    piece, latency and transfer add up. `reduction_bandwidth_bytes_per_second`: in and out of each device when a switch
    sums and copies by itself; 0 where none does. `sum_bandwidth_bytes_per_second`: where devices share memory, that at
    which each sums what all have written there, or copies what one has; 0 where they share none.

    Raises ClusterError for a number that is not finite or out of range.

    >>> Link(bandwidth_bytes_per_second=25e9, latency_seconds=3e-6).launch_seconds
    0.0
    """

    bandwidth_bytes_per_second: float
    latency_seconds: float
    launch_seconds: float = 0.0
    exchange_efficiency: float = 1.0
    chunk_steps: float = 0.0
    reduction_bandwidth_bytes_per_second: float = 0.0
    sum_bandwidth_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        check_number("Link", "bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, above=True)
        check_number("Link", "latency_seconds", self.latency_seconds)
        check_number("Link", "launch_seconds", self.launch_seconds)
        check_number("Link", "exchange_efficiency", self.exchange_efficiency, above=True, at_most=1.0)
        check_number("Link", "chunk_steps", self.chunk_steps)
        check_number("Link", "reduction_bandwidth_bytes_per_second", self.reduction_bandwidth_bytes_per_second)
        check_number("Link", "sum_bandwidth_bytes_per_second", self.sum_bandwidth_bytes_per_second)


def slowest_link(links: Sequence[Link]) -> Link:
    """A link that is no better than any of these."""
    if len(set(links)) == 1:
        return links[0]
    return Link(
        bandwidth_bytes_per_second=min(link.bandwidth_bytes_per_second for link in links),
        latency_seconds=max(link.latency_seconds for link in links),
        launch_seconds=max(link.launch_seconds for link in links),
        exchange_efficiency=min(link.exchange_efficiency for link in links),
        chunk_steps=min(link.chunk_steps for link in links),
        reduction_bandwidth_bytes_per_second=min(link.reduction_bandwidth_bytes_per_second for link in links),
        sum_bandwidth_bytes_per_second=min(link.sum_bandwidth_bytes_per_second for link in links),
    )


# What a host without NICs has in the place of one; nothing is ever sent over it.
NO_NIC = Link(bandwidth_bytes_per_second=1.0, latency_seconds=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine: `devices` equal devices joined by `link`, and `nics` equal NICs that all of them share.

    `wires`: (device, device, how many), if the devices are joined pair by pair; `link` is then one wire. `torus`: sizes
    of the torus that the devices lie in, row-major, if they do; `link` is then one link of a device, of which it has
    two along each dim. `torus_wraps`: whether each dim closes to a ring. A host may have fewer devices than its wires
    or its torus name: then it is the first of them (a part of a host is described like this).

    Raises ClusterError for numbers out of range, NICs that are not described, wires that leave a device out, or a torus
    too small for the devices.

    >>> from meshwright.cluster import load_cluster
    >>> host = load_cluster("p4d.24xlarge").hosts[0]
    >>> host.devices, host.nics
    (8, 4)
    """

    device: Device
    devices: int
    link: Link
    nics: int
    nic: Link = NO_NIC
    wires: tuple[tuple[int, int, int], ...] = ()
    torus: tuple[int, ...] = ()
    torus_wraps: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        check_type("Host", "device", self.device, Device)
        check_count("Host", "devices", self.devices, at_most=_MOST_DEVICES)
        check_type("Host", "link", self.link, Link)
        check_type("Host", "nic", self.nic, Link)
        if self.nics != 0 or isinstance(self.nics, bool):
            check_count("Host", "nics", self.nics)
        if (self.nics == 0) != (self.nic == NO_NIC):
            raise ClusterError(
                refused="this host",
                got=f"{self.nics} NICs and {'no ' if self.nic == NO_NIC else 'a '}description of one",
                needed="a description of the NICs if there are any",
                where="Host.nic",
                try_="nics = 0 without [host.nic], or nics = 1 with it",
            )
        object.__setattr__(self, "wires", _as_tuples("wires", self.wires))
        object.__setattr__(self, "torus", _as_tuple("torus", self.torus))
        object.__setattr__(self, "torus_wraps", _as_tuple("torus_wraps", self.torus_wraps))
        check_wires(self.devices, self.wires)
        check_torus(self.devices, self.torus, self.torus_wraps)
        if self.wires and self.torus:
            raise ClusterError(
                refused="this host", got="wires and a torus", needed="one way in which its devices are joined",
                where="Host.wires", try_="leaving one of the two out",
            )  # fmt: skip

    @property
    def nic_bandwidth_bytes_per_second(self) -> float:
        """Bytes/s that leave (or enter) this host over all its NICs together."""
        return self.nics * self.nic.bandwidth_bytes_per_second if self.nics else 0.0


def _as_tuple(field_name: str, value: object) -> tuple[Any, ...]:
    """A list (from TOML) or a tuple, as a tuple."""
    if not isinstance(value, (list, tuple)):
        raise ClusterError(
            refused="this host", got=repr(value), needed="a list", where=f"Host.{field_name}", try_=f"{field_name} = []"
        )
    return tuple(value)


def _as_tuples(field_name: str, value: object) -> tuple[tuple[Any, ...], ...]:
    return tuple(_as_tuple(field_name, one) for one in _as_tuple(field_name, value))

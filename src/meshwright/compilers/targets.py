"""The devices of a cluster that is not here, in the form that JAX compiles for.

A program runs on all devices of what it is compiled for, so that each stage of a plan has a topology of its own: of a
TPU, the part of the torus that its chips are; of GPUs, as many of each host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import jax

from .._jax.ahead import gpu_devices, has_cuda_compiler, has_tpu_compiler, tpu_devices, tpu_kinds
from ..cluster import Cluster, Host
from ..errors import PlanError
from ..plan import Plan
from .gpu_target import gpu_kinds, gpu_target


def target_devices(cluster: Cluster, plan: Plan) -> list[jax.Device | None]:
    """The devices of a cluster, in its order: a plan's programs can be compiled for them, and not run.

    Args:
      cluster: of TPUs, whose hosts are slices of one shape, or of NVIDIA GPUs in equal hosts.
      plan: for this cluster. Devices that it leaves idle are None.

    Raises:
      PlanError: as of `check_compiler`.
    """
    check_compiler(cluster)
    found: list[jax.Device | None] = [None] * cluster.num_devices
    for group in dict.fromkeys(tuple(sorted(stage.devices)) for stage in plan.stages):
        for position, device in zip(group, _topology(cluster, group), strict=True):
            found[position] = device
    return found


def check_compiler(cluster: Cluster) -> None:
    """Refuse a cluster that nothing can be compiled for.

    Raises:
      PlanError: if no compiler for such devices is known or installed, or the cluster has more than one kind of host.
    """
    host = cluster.hosts[0]
    device = host.device
    is_tpu = device.kind in tpu_kinds() and bool(host.torus)
    if not is_tpu and device.kind not in gpu_kinds():
        raise PlanError(
            refused=f"to compile for {cluster.name}", got=f"devices of kind {cluster.device_kinds}",
            needed=f"slices of TPUs ({', '.join(tpu_kinds())}) or one of the {len(gpu_kinds())} NVIDIA GPUs of "
            "compilers/gpu_targets.toml", where="cluster=",
            try_='a preset of such devices (tpu-v5e:8, dgx-h100:1), or, for devices that are here, cluster="local"',
        )  # fmt: skip
    if any(one != host for one in cluster.hosts):
        raise PlanError(
            refused=f"to compile for {cluster.name}", got=f"hosts of several kinds, of {cluster.device_kinds}",
            needed="hosts that are all alike", where="cluster=", try_="each kind of host as a cluster of its own",
        )  # fmt: skip
    if not (has_tpu_compiler() if is_tpu else has_cuda_compiler()):
        name, package, extra = ("TPU", "libtpu", "tpu") if is_tpu else ("GPU", "JAX's CUDA plugin", "cuda")
        raise PlanError(
            refused=f"to compile for {cluster.name}", got=f"no {name} compiler", needed=package, where="cluster=",
            try_=f'pip install "meshwright[{extra}]" (no {name} is needed)',
        )  # fmt: skip


def _topology(cluster: Cluster, group: Sequence[int]) -> Sequence[jax.Device]:
    """The devices at ascending positions of a cluster as a topology of their own."""
    host = cluster.hosts[0]
    parts = [[p % host.devices for p in group if p // host.devices == n] for n in range(len(cluster.hosts))]
    held = [part for part in parts if part]
    if host.device.platform == "gpu":
        # Where hosts have different numbers of them, the network is between all.
        each = len(held[0]) if len({*map(len, held)}) == 1 else 1
        return gpu_devices(gpu_target(host.device), len(group) // each, each)
    if any(part != held[0] for part in held):
        held = [[*range(len(group))]]  # no part of a torus that every slice has: any of as many chips
    shape, wraps = _box(host, held[0])
    return tpu_devices(host.device.kind, shape, wraps, len(held))


def _box(host: Host, chips: Sequence[int]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """The shape of the part of a torus that some chips are, and which of its dims close to rings; where they are no box
    of it, a line of as many.

    Args:
      host: the slice.
      chips: positions in the row-major order of its torus, ascending.
    """
    strides = [prod(host.torus[dim + 1 :]) for dim in range(len(host.torus))]
    places = [[chip // stride % size for chip in chips] for stride, size in zip(strides, host.torus, strict=True)]
    shape = tuple(max(one) - min(one) + 1 for one in places)
    if prod(shape) != len(chips) or any(a >= b for a, b in pairwise(chips)):
        return (*(1,) * (len(host.torus) - 1), len(chips)), (False,) * len(host.torus)
    rings = zip(shape, host.torus, host.torus_wraps, strict=True)
    return shape, tuple(ring and size == whole for size, whole, ring in rings)

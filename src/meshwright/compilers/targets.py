"""The devices of a cluster that is not here, in the form that JAX compiles for."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from .._jax.ahead import has_tpu_compiler, tpu_devices, tpu_kinds
from ..cluster import Cluster
from ..errors import PlanError


def target_devices(cluster: Cluster) -> Sequence[jax.Device]:
    """The devices of a cluster, in its order: programs can be compiled for them, and not run.

    Args:
      cluster: of TPUs; slices are hosts of one shape.

    Raises:
      PlanError: if no compiler for such devices is known or installed, or the cluster has more than one kind of host.
    """
    host = cluster.hosts[0]
    device = host.device
    if device.platform != "tpu" or device.kind not in tpu_kinds() or not host.torus:
        raise PlanError(
            refused=f"to compile for {cluster.name}", got=f"devices of kind {cluster.device_kinds}",
            needed=f"devices with a compiler that needs none of them: {', '.join(tpu_kinds())}", where="cluster=",
            try_="a TPU preset (tpu-v5e:8), or `meshwright verify` without --cluster, on the devices themselves",
        )  # fmt: skip
    if any(one != host for one in cluster.hosts):
        raise PlanError(
            refused=f"to compile for {cluster.name}", got=f"slices of several shapes, of {cluster.device_kinds}",
            needed="slices that are all alike", where="cluster=", try_="each kind of slice as a cluster of its own",
        )  # fmt: skip
    if not has_tpu_compiler():
        raise PlanError(
            refused=f"to compile for {cluster.name}", got="no TPU compiler", needed="libtpu", where="cluster=",
            try_='pip install "meshwright[tpu]" (no TPU is needed)',
        )  # fmt: skip
    return tpu_devices(device.kind, host.torus, host.torus_wraps, len(cluster.hosts))

"""The share of a GPU's memory that JAX gives a program: three quarters, unless the environment says otherwise.

Plans are made for the share that the environment names, or else that of the cluster's description; where that is more
than JAX gives by default and a plan needs it, the plan says what to set. Plans for devices that are here are made for
what JAX says that it gives of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil

import jax

from .._jax.devices import given_bytes
from ..cluster import Cluster, Device
from ..errors import PlanError, size_words
from ..plan import Plan

log = logging.getLogger("meshwright")

# As JAX documents them (docs.jax.dev, GPU memory allocation); the second is the older name.
_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_DEFAULT_SHARE = 0.75


def with_given_memory(cluster: Cluster, environment: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster with the share of each GPU's memory that the environment gives programs, where it names one.

    Raises:
      PlanError: if what it says is no share.
    """
    name = next((one for one in _VARIABLES if environment.get(one)), None)
    if cluster.device.platform != "gpu" or name is None:
        return cluster
    try:
        share = float(environment[name])
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise PlanError(
            refused=f"the environment variable {name}", got=repr(environment[name]), needed="a share from 0 to 1",
            where="the environment", try_=f"{name}=0.9, or leaving it out",
        )  # fmt: skip

    return _with_shares(cluster, lambda device: share)


def _with_shares(cluster: Cluster, share_of: Callable[[Device], float]) -> Cluster:
    """The cluster with another usable share of the memory of each device."""
    known = {
        id(host): replace(host, device=replace(host.device, usable_memory_fraction=share_of(host.device)))
        for host in cluster.hosts
    }
    return replace(cluster, hosts=tuple(known[id(host)] for host in cluster.hosts))


def memory_notes(plan: Plan, needed_bytes: Sequence[float], cluster: Cluster) -> tuple[str, ...]:
    """What has to be set where a plan runs, if it needs more of a GPU than JAX gives a program by default.

    Args:
      plan: for this cluster.
      needed_bytes: on a device of each stage, all its stages together.
      cluster: with all memory of its devices.
    """
    if cluster.device.platform != "gpu":
        return ()
    devices = [cluster.device_at(stage.devices[0]) for stage in plan.stages]
    shares = [size / one.memory_bytes for size, one in zip(needed_bytes, devices, strict=True)]
    needed = max(shares)
    device = devices[shares.index(needed)]
    if needed <= _DEFAULT_SHARE:
        return ()
    share = min(ceil(100 * needed) / 100, max(device.usable_memory_fraction, _DEFAULT_SHARE))
    return (
        f"needs {_VARIABLES[0]}={share:.2f} where it runs ({_VARIABLES[1]} in older JAX): JAX gives a program "
        f"{_DEFAULT_SHARE:.0%} of the {size_words(device.memory_bytes)} of a device otherwise",
    )


def with_memory_here(cluster: Cluster, devices: Sequence[jax.Device]) -> Cluster:
    """The cluster with no more memory than JAX gives programs of its devices, where they say how much.

    Args:
      cluster: of these devices.
      devices: of all processes; those of this one are asked.
    """
    given = given_bytes(devices)
    if given is None:
        return cluster
    return _with_shares(cluster, lambda device: min(device.usable_memory_fraction, given / device.memory_bytes))


def warn_of_memory(plan: Plan, devices: Sequence[jax.Device]) -> None:
    """Warn of a plan that needs more than JAX gives a program of the devices that it is to run on.

    Args:
      plan: that is about to run.
      devices: of all processes; those of this one are asked.
    """
    given, held = given_bytes(devices), dict.fromkeys((stage.devices for stage in plan.stages), 0.0)
    for stage in plan.stages:
        held[stage.devices] += stage.memory.total
    needed = max(held.values())
    if given is not None and needed > given:
        share = f" ({_VARIABLES[0]} sets the share)" if devices[0].platform == "gpu" else ""
        log.warning(
            "the plan needs %s on a device by prediction, and JAX gives programs %s of each%s: it will probably run "
            "out of memory", size_words(needed), size_words(given), share,
        )  # fmt: skip

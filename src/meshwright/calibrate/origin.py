"""Whether a calibration may be run by: it says which devices it was made on (`Cluster.measured_on`).

Planning for the described devices is allowed anywhere; running on others is refused, because every number in the
description was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..cluster import Cluster, MeasuredOn
from ..errors import PlanError


def origin_of(devices: Sequence[Any]) -> MeasuredOn:
    """What a calibration on some `jax.Device`s would say."""
    import jax

    return MeasuredOn(
        device_kind=devices[0].device_kind, devices=len(devices), platform=devices[0].platform,
        processes=len({device.process_index for device in devices}), jax=jax.__version__,
    )  # fmt: skip


def check_origin(cluster: Cluster) -> None:
    """Refuse to run, on the devices at hand, what is planned by a calibration made on others.

    Args:
      cluster: one that no calibration described passes.

    Raises:
      PlanError: if kind, number, platform, processes or JAX's version differ.
    """
    made = cluster.measured_on
    if made is None:
        return
    import jax

    here = origin_of(jax.devices())
    if made == here:
        return
    raise PlanError(
        refused="to run by this calibration", got=f"{here}", needed=f"the devices it was made on: {made}",
        where=f"cluster {cluster.name!r}, measured_on",
        try_="meshwright calibrate --out cluster.toml here, or cluster=\"local\"",
    )  # fmt: skip

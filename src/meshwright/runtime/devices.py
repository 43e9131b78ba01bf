"""The devices that a step runs on: those that are named, or those that its arguments lie on.

As under `jax.jit`, arrays that lie on several devices say where a step runs, and arrays on one device do not contradict
them. Unlike there, arrays on one device alone do not confine a step to it (a state is often made on one), and arguments
are moved to devices that are named (`devices=`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from ..errors import PlanError


def lies_as_planned(
    leaves: Sequence[Any], planned: Sequence[Sharding | None], devices: Collection[jax.Device]
) -> bool:  # fmt: skip
    """Whether arguments lie as a plan has put them: each array on the devices that the plan keeps it on (those of a
    stage), on all of the plan's, or on one alone. Such arrays are no choice of other devices, though all of them may
    lie on a part of the plan's.

    Args:
      leaves: of the arguments.
      planned: how each of them lies under the plan; None for what it keeps nowhere as one array.
      devices: of the plan.
    """
    everywhere = frozenset(devices)
    for leaf, sharding in zip(leaves, planned, strict=True):
        if not isinstance(leaf, jax.Array) or not leaf.committed:
            continue
        lies = leaf.sharding.device_set
        at_home = sharding is not None and lies == sharding.device_set
        if not lies <= everywhere or not (at_home or len(lies) in (1, len(everywhere))):
            return False
    return True


class Placed:
    """Where arguments lie: what of them lies on devices of the user's choice (`committed`). In a run of many processes
    only arrays on devices of several processes say something; what lies in one is that process's copy.

    Args:
      leaves: of the arguments.

    Attributes:
      together: the devices of arrays that lie on several.
      all: those of any.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        sets = {frozenset(x.sharding.device_set) for x in leaves if isinstance(x, jax.Array) and x.committed}
        if jax.process_count() > 1:
            sets = {devices for devices in sets if len({device.process_index for device in devices}) > 1}
        self.together = frozenset(d for devices in sets if len(devices) > 1 for d in devices)
        self.all = frozenset(d for devices in sets for d in devices)


def devices_for(placed: Placed, wanted: int | None) -> tuple[jax.Device, ...]:
    """The devices to run on where none are named and no earlier plan's arrays are passed.

    Args:
      placed: the arguments.
      wanted: how many devices there have to be; None for as many as there are, or as the arguments say.

    Raises:
      PlanError: if the arguments contradict each other, or the number that is wanted.
    """
    here = tuple(jax.devices())
    one_place = placed.together == placed.all
    if placed.together and one_place and wanted in (None, len(placed.all)):
        return tuple(d for d in here if d in placed.all)
    default = here[:wanted]
    if placed.all <= set(default) and (wanted is not None or one_place or not placed.together):
        return default
    if placed.all == set(here) or len(placed.all) == wanted:
        return tuple(d for d in here if d in placed.all)
    numbers = ", ".join(str(d.id) for d in here if d in placed.all)
    raise PlanError(
        refused="the places of the arguments", got=f"arrays on devices {numbers}",
        needed="arrays on one set of devices" + (f", {wanted} of them as planned for" if wanted is not None else ""),
        where="the arguments", try_="devices=, to which all of them are moved; or arrays that lie on those devices",
    )  # fmt: skip

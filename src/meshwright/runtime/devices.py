"""The devices that a step runs on: those that are named, or those that its arguments lie on.

As under `jax.jit`, arrays that lie on several devices say where a step runs, and arrays on one device do not contradict
them. Unlike there, arrays on one device alone do not confine a step to it (a state is often made on one), and arguments
are moved to devices that are named (`devices=`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ..errors import PlanError


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


class Placed:
    """Where arguments lie: what of them lies on devices of the user's choice (`committed`). In a run of many processes
    only arrays that processes share say something; what lies in one process is that process's copy.

    Args:
      leaves: of the arguments.

    Attributes:
      together: the devices of arrays that lie on several.
      all: those of any.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        shardings = {id(s): s for x in leaves if isinstance(x, jax.Array) and x.committed for s in (x.sharding,)}
        shared = jax.process_count() > 1
        sets = {frozenset(s.device_set) for s in shardings.values() if not (shared and s.is_fully_addressable)}
        self.together = frozenset(d for devices in sets if len(devices) > 1 for d in devices)
        self.all = frozenset(d for devices in sets for d in devices)


def devices_for(
    placed: Placed, wanted: int | None, planned: Iterable[Sequence[jax.Device]]
) -> tuple[jax.Device, ...]:  # fmt: skip
    """The devices to run on where none are named.

    Args:
      placed: the arguments.
      wanted: how many devices there have to be; None for as many as there are, or as the arguments say.
      planned: those of earlier calls, the latest first: their results may lie in parts (stages).

    Raises:
      PlanError: if the arguments contradict each other, or the number that is wanted.
    """
    here = tuple(jax.devices())
    one_place = placed.together == placed.all
    if placed.together and one_place and wanted in (None, len(placed.all)):
        return tuple(d for d in here if d in placed.all)
    for devices in planned:
        if placed.all <= set(devices):
            return tuple(devices)
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

"""The unit tasks as the published algorithms see them, and four ways to carry one out.

* `send_recv`: the sender sends the slice to every device that needs it.
* `local_all_gather`: it sends each receiving domain one copy, cut over its devices, which then gather it among
  themselves.
* `global_all_gather`: it cuts one copy over all receiving devices, and they gather it across domains.
* `broadcast`: it sends one copy, which the domains pass on in a chain while it arrives (pipelined; the chain's first
  chunk is not counted, in favour of the published algorithms).

From "On Optimizing the Communication of Model Parallelism" (Zhuang et al., MLSys 2023), sections 3.1 and 3.2; a
domain stands for its hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..simulate import Leg
from ..tasks import Demand


class Strategy(Enum):
    """How one unit task is carried out."""

    SEND_RECV = "send_recv"
    LOCAL_ALL_GATHER = "local_all_gather"
    GLOBAL_ALL_GATHER = "global_all_gather"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTask:
    """One data slice that must reach other domains.

    Args:
      block: tensor and block of its destination that the slice is a part of: tasks are given in this order.
      bytes: of the slice.
      senders: domains that hold it, that of the first replica first.
      devices: for each device outside them that needs it, in mesh order, its domain.
    """

    block: tuple[int, int]
    bytes: int
    senders: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def receivers(self) -> tuple[int, ...]:
        """The domains that need it, in the order of their first devices."""
        return tuple(dict.fromkeys(self.devices))


def unit_tasks(demand: Demand) -> list[UnitTask]:
    """The unit tasks of a demand that need the network, by destination block and then by slice."""
    home = demand.network.domain_of
    ends = []
    for holders, needers in demand.patterns:
        senders = tuple(dict.fromkeys(home[d] for d in holders))
        ends.append((senders, tuple(home[d] for d in needers if home[d] not in senders)))
    found = []
    for move, number, pattern, size in zip(
        demand.move.tolist(), demand.slice.tolist(), demand.pattern.tolist(), demand.bytes.tolist(), strict=True
    ):
        senders, devices = ends[pattern]
        if devices:
            block = (move, int(demand.grids[move].destination_block[number]))
            found.append((block, number, UnitTask(block=block, bytes=size, senders=senders, devices=devices)))
    return [task for _, _, task in sorted(found, key=lambda entry: entry[:2])]


def copies(strategy: Strategy, task: UnitTask) -> int:
    """How many times the sender of `task` sends the slice."""
    if strategy is Strategy.SEND_RECV:
        return len(task.devices)
    return len(task.receivers) if strategy is Strategy.LOCAL_ALL_GATHER else 1


def whole_leg(strategy: Strategy, task: UnitTask, sender: int) -> Leg:
    """`task` as one leg that holds the ports of all its domains from beginning to end."""
    receivers = task.receivers
    count = len(receivers)
    if strategy is Strategy.BROADCAST:
        return Leg(senders=(sender, *receivers[:-1]), receivers=receivers, bytes=task.bytes, crossings=count)
    if strategy is Strategy.GLOBAL_ALL_GATHER and count > 1:
        # One copy goes out, then every domain but one's share of it passes every receiving port.
        return Leg(
            senders=(sender,),
            receivers=receivers,
            bytes=task.bytes + task.bytes * (count - 1) // count,
            crossings=count,
        )
    return Leg(senders=(sender,), receivers=receivers, bytes=task.bytes * copies(strategy, task), crossings=1)


def legs_in_order(strategy: Strategy, tasks: Sequence[UnitTask], senders: Sequence[int]) -> list[Leg]:
    """The legs of `tasks` in the order given: by destination block, then by replica of it, then by slice.

    Args:
      strategy: how a task is carried out; what it sends one after the other are legs of their own.
      tasks: in the order of `unit_tasks`.
      senders: the domain that sends each.
    """
    legs: list[tuple[tuple[int, int], int, Leg]] = []
    for task, sender in zip(tasks, senders, strict=True):
        if strategy in (Strategy.SEND_RECV, Strategy.LOCAL_ALL_GATHER):
            targets = task.devices if strategy is Strategy.SEND_RECV else task.receivers
            legs += [
                (task.block, i, Leg(senders=(sender,), receivers=(d,), bytes=task.bytes)) for i, d in enumerate(targets)
            ]
        else:
            legs.append((task.block, 0, whole_leg(strategy, task, sender)))
    return [leg for _, _, leg in sorted(legs, key=lambda entry: entry[:2])]

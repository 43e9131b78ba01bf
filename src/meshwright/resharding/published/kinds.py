"""Unit tasks that only differ in name, counted: what the two scheduling algorithms choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..network import Network
from ..simulate import Leg, leg_rate
from .strategies import Strategy, UnitTask, whole_leg


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A kind of task with one of its senders.

    Args:
      leg: what runs.
      ports: the ports it holds; receive ports are numbered after the send ports.
      seconds: for how long.
    """

    leg: Leg
    ports: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Tasks with the same bytes, senders and receivers.

    Args:
      count: how many there are.
      choices: one for each sender.
    """

    count: int
    choices: tuple[Choice, ...]


def kinds_of(network: Network, tasks: Sequence[UnitTask], strategy: Strategy) -> list[Kind]:
    """The kinds among `tasks`, in the order of their first ones."""
    counts: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[UnitTask]] = {}
    for task in tasks:
        counts.setdefault((task.bytes, tuple(sorted(task.senders)), tuple(sorted(task.devices))), []).append(task)
    return [
        Kind(count=len(same), choices=tuple(_choice(network, same[0], strategy, s) for s in sorted(same[0].senders)))
        for same in counts.values()
    ]


def _choice(network: Network, task: UnitTask, strategy: Strategy, sender: int) -> Choice:
    leg = whole_leg(strategy, task, sender)
    ports = (*leg.senders, *(len(network.members) + d for d in leg.receivers))
    return Choice(leg=leg, ports=ports, seconds=float(leg.bytes / leg_rate(network, leg)))

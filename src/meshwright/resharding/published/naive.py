"""The naive algorithm: the first replica sends, tasks run in the order given."""

from __future__ import annotations

from collections.abc import Sequence

from ..network import Network
from ..simulate import Leg
from .strategies import Strategy, UnitTask, legs_in_order


def naive(network: Network, tasks: Sequence[UnitTask], strategy: Strategy) -> list[Leg]:
    """The legs of `tasks`, in order."""
    return legs_in_order(strategy, tasks, [task.senders[0] for task in tasks])

"""Load balance only: senders chosen so that none sends much more than another, tasks run in the order given.

Longest processing time first (Graham 1969): the largest task goes to the sender that is done soonest with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ..network import Network
from ..simulate import Leg
from .strategies import Strategy, UnitTask, copies, legs_in_order


def load_balance(network: Network, tasks: Sequence[UnitTask], strategy: Strategy) -> list[Leg]:
    """The legs of `tasks`, in order."""
    return legs_in_order(strategy, tasks, balanced_senders(network, tasks, strategy))


def balanced_senders(network: Network, tasks: Sequence[UnitTask], strategy: Strategy) -> list[int]:
    """The domain that sends each of `tasks`."""
    load = [Fraction(0)] * len(network.members)
    senders = [0] * len(tasks)
    for i in sorted(range(len(tasks)), key=lambda i: -tasks[i].bytes * copies(strategy, tasks[i])):
        size = tasks[i].bytes * copies(strategy, tasks[i])
        senders[i] = min(tasks[i].senders, key=lambda s: load[s] + size / network.send_rates[s])
        load[senders[i]] += size / network.send_rates[senders[i]]
    return senders

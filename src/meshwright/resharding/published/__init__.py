"""The published resharding algorithms, for comparison: four orders times four strategies.

A strategy named alone is load balance only; `naive/`, `depth_first/` and `randomised_greedy/` before it name the
other orders. In the given orders (naive, load balance) what a strategy sends one after the other is scheduled piece
by piece; the two searches schedule whole unit tasks, which hold the ports of all their domains, as published.
"""

from __future__ import annotations

from fractions import Fraction

from ..simulate import Leg, exclusive_seconds, fluid_seconds
from ..tasks import Demand
from .depth_first import depth_first as depth_first
from .load_balance import load_balance as load_balance
from .naive import naive as naive
from .randomised_greedy import randomised_greedy as randomised_greedy
from .strategies import Strategy as Strategy, UnitTask as UnitTask, unit_tasks as unit_tasks

MOST_TASKS = 512
"""Beyond this many unit tasks the two searches are left out: they look at all tasks to choose each."""


def published_legs(demand: Demand) -> dict[str, list[Leg]]:
    """The schedule of every published algorithm for `demand`, by name."""
    tasks = unit_tasks(demand)
    orders = {"": load_balance, "naive/": naive}
    if len(tasks) <= MOST_TASKS:
        orders |= {"depth_first/": depth_first, "randomised_greedy/": randomised_greedy}
    return {
        prefix + strategy.value: order(demand.network, tasks, strategy)
        for prefix, order in orders.items()
        for strategy in Strategy
    }


def published_seconds(demand: Demand) -> dict[str, Fraction]:
    """The seconds of every published algorithm under exclusive ports, by name; exact."""
    return {name: exclusive_seconds(demand.network, legs) for name, legs in published_legs(demand).items()}


def published_fluid_seconds(demand: Demand) -> dict[str, float]:
    """The seconds of every published algorithm when ports are shared fairly, by name."""
    return {name: fluid_seconds(demand.network, legs) for name, legs in published_legs(demand).items()}

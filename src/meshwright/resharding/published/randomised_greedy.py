"""Randomised greedy: again and again, start one of the tasks that can start first, chosen at random; keep the best of
some runs.

Seeded, so that the same tasks give the same schedule.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from ..network import Network
from ..simulate import Leg
from .kinds import kinds_of
from .strategies import Strategy, UnitTask

RUNS = 16
# What counts as the same start: floating-point sums of the same times in another order.
_SAME = 1e-9


def randomised_greedy(
    network: Network, tasks: Sequence[UnitTask], strategy: Strategy, *, runs: int = RUNS, seed: int = 0
) -> list[Leg]:
    """The legs of the best of `runs` runs."""
    kinds = kinds_of(network, tasks, strategy)
    choices = [(i, choice) for i, kind in enumerate(kinds) for choice in kind.choices]
    chance = random.Random(seed)
    best: tuple[float, list[Leg]] = (math.inf, [])
    for _ in range(runs):
        left = [kind.count for kind in kinds]
        free = [0.0] * (2 * len(network.members))
        legs = []
        for _ in range(len(tasks)):
            starts = [(max(free[p] for p in c.ports), i, c) for i, c in choices if left[i]]
            first = min(start for start, _, _ in starts)
            start, i, choice = chance.choice([s for s in starts if s[0] <= first * (1 + _SAME)])
            for p in choice.ports:
                free[p] = start + choice.seconds
            left[i] -= 1
            legs.append(choice.leg)
        if max(free) < best[0]:
            best = (max(free), legs)
    return best[1]

"""Monte-Carlo tree search over one decision after the other (UCT).

Papers: Schaarschmidt et al., "Automap: towards ergonomic automated parallelism for ML models", 2021, and Alabed et
al., "TOAST: fast and scalable auto-partitioning based on principled static analysis", 2025: partitioning as a game of
decisions about arguments, what follows from them being propagated. UCT: Kocsis and Szepesvari, ECML 2006. Method: a
round walks down the tree of decisions (`decisions`), at each node by the upper confidence bound of what its options
have led to, adds one node, plays the rest at random and prices the plan. A node's value is the mean of the logarithms
of the seconds below it, between the best and the worst that were seen.

Cost: a round is one price and an integer program for the undecided layouts of each stage. Limits: no bound; the mean
of random continuations says little of the best one, the more decisions follow; of parameters only the largest are
decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, inf, isfinite, log, sqrt

from ..space.choice import Choice
from ..space.space import Space
from ..space.structures import Option
from .decisions import Decisions, State
from .protocol import Budget, Found, Incumbent

# Of the upper confidence bound, where values are between 0 and 1; the theory's sqrt(2) explores too much for some
# hundreds of rounds. Chosen, not measured.
_EXPLORATION = 0.5

# What one round counts for that leads to no plan: as so many times the slowest that was seen.
_NO_PLAN = 2.0


@dataclass(slots=True)
class _Node:
    """A state that was reached: how often, the sum of the logarithms of the seconds, and the states after it."""

    visits: int = 0
    total: float = 0.0
    after: dict[Option, _Node] = field(default_factory=dict)


class MCTS:
    """See the module."""

    name, exact = "mcts", False
    paper = "Schaarschmidt et al., Automap, 2021; Alabed et al., TOAST, 2025; UCT: Kocsis and Szepesvari, ECML 2006"

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """As `Search.run`."""
        best, decisions, root = Incumbent(space.bound(Choice())), Decisions(space), _Node()
        least, most = inf, -inf
        while not budget.over:
            state, path = State(), [root]
            grown = False
            while (step := decisions.next(state)) is not None:
                options = step[1]
                node = path[-1]
                if grown:
                    option = options[int(budget.rng.integers(len(options)))]
                elif fresh := [one for one in options if one not in node.after]:
                    option = fresh[int(budget.rng.integers(len(fresh)))]
                    node.after[option] = _Node()
                    path.append(node.after[option])
                    grown = True
                else:
                    option = max(options, key=lambda one: _promise(node, node.after[one], least, most))
                    path.append(node.after[option])
                state = decisions.decide(state, option)
            seconds = yield from decisions.tried(state, budget, best)
            if not isfinite(seconds):
                seconds = _NO_PLAN * exp(most) if isfinite(most) else 1.0
            value = log(seconds)
            least, most = min(least, value), max(most, value)
            for node in path:
                node.visits, node.total = node.visits + 1, node.total + value


def _promise(node: _Node, after: _Node, least: float, most: float) -> float:
    mean = after.total / after.visits
    value = (most - mean) / (most - least) if most > least else 0.5
    return value + _EXPLORATION * sqrt(log(node.visits) / after.visits)

"""A policy that draws whole plans and learns from what they take (REINFORCE with a baseline).

Papers: Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", Machine
Learning 1992; for placing programs on devices Mirhoseini et al., "Device placement optimization with reinforcement
learning", ICML 2017. Method: the policy is a table of logits for each decision (`decisions`): how many microbatches,
of each stage its layers, devices, logical mesh and rematerialisation, of each large parameter its layout. A plan is
drawn decision by decision; its reward is minus the logarithm of its seconds; the logits of what was drawn rise by
what the reward is above the mean of earlier ones, in units of their deviation, and fall where it is below.

Cost: a plan is one price and an integer program for the undecided layouts of each stage. Limits: no bound; the table
looks at the place of a decision and not at what was decided before it, so that it learns no interplay of two stages;
some hundreds of plans are few for a policy, and it may settle on a poor one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, log, sqrt

import numpy as np

from ..space.choice import Choice
from ..space.space import Space
from ..space.structures import Option
from .decisions import Decisions, State
from .protocol import Budget, Found, Incumbent

# By how much a plan that is one deviation better than expected raises the logits of what was drawn; the share that each
# new reward has in the mean and the deviation; and how much slower a draw counts that leads to no plan.
# Chosen, not measured, like the next.
_RATE, _MEMORY, _NO_PLAN = 0.3, 0.1, 2.0

# The least probability of drawing an option at random, so that nothing is given up for good.
_RANDOM = 0.05


class Reinforce:
    """See the module."""

    name, exact = "reinforce", False
    paper = "Williams, Machine Learning 1992; Mirhoseini et al., Device Placement Optimization, ICML 2017"

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """As `Search.run`."""
        best, decisions, policy = Incumbent(space.bound(Choice())), Decisions(space), _Policy(budget.rng)
        mean, variance, slowest = 0.0, 1.0, 1.0
        drawn_plans = 0
        while not budget.over:
            state, drawn = State(), []
            while (step := decisions.next(state)) is not None:
                about, options = step
                labels = [decisions.label(state, option) for option in options]
                number, probabilities = policy.draw(about, labels)
                drawn.append((about, labels, number, probabilities))
                state = decisions.decide(state, options[number])
            seconds = yield from decisions.tried(state, budget, best)
            if isfinite(seconds):
                slowest = max(slowest, seconds) if drawn_plans else seconds
            reward = -log(seconds if isfinite(seconds) else _NO_PLAN * slowest)
            if not drawn_plans:
                mean = reward
            drawn_plans += 1
            policy.learn(drawn, _RATE * (reward - mean) / sqrt(variance))
            variance += _MEMORY * ((reward - mean) ** 2 - variance)
            variance = max(variance, 1e-6)
            mean += _MEMORY * (reward - mean)


_Drawn = tuple[tuple[str, int], list[Option], int, np.ndarray]


class _Policy:
    """Logits by decision and option."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._logits: dict[tuple[str, int], dict[Option, float]] = {}

    def draw(self, about: tuple[str, int], labels: list[Option]) -> tuple[int, np.ndarray]:
        """The number of an option, and the probabilities of all."""
        known = self._logits.get(about, {})
        logits = np.array([known.get(label, 0.0) for label in labels])
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        mixed = (1 - _RANDOM) * shares + _RANDOM / len(labels)
        return int(self._rng.choice(len(labels), p=mixed / mixed.sum())), shares

    def learn(self, drawn: list[_Drawn], advantage: float) -> None:
        """Move along the gradient of the logarithm of the probability of what was drawn."""
        for about, labels, number, shares in drawn:
            known = self._logits.setdefault(about, {})
            for place, (label, share) in enumerate(zip(labels, shares.tolist(), strict=True)):
                known[label] = known.get(label, 0.0) + advantage * ((place == number) - share)

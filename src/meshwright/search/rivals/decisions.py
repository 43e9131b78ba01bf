"""A choice as a sequence of decisions, for searches that take one decision after another.

First the structure (`space.structures`), then for each stage the split and storage of its largest parameters, as users
of partitioners decide; the integer program finds the fastest layouts of everything else (`Layouts.complete`).
"""

from __future__ import annotations

from collections.abc import Generator
from math import inf, isfinite
from typing import NamedTuple

from ..space.choice import Choice, LayoutNumbers
from ..space.space import Price, Space
from ..space.structures import Option
from .protocol import Budget, Found, Incumbent

# So many parameters of a stage are decided one by one: a transformer's layer has about so many matrices.
PARAMETERS = 6

# What the solver has for the parameters that nobody has decided: little, since hundreds of choices are tried.
_MOST_SECONDS, _LEAST_SECONDS = 5.0, 0.1

# What a choice counts for more for each device's worth of memory that it is over. Chosen, not measured.
_EXCESS = 4.0


class State(NamedTuple):
    """The decisions taken so far: the structure, and of its stages in order the choices of their largest parameters."""

    partial: Choice = Choice()
    parameters: tuple[int, ...] = ()


class Decisions:
    """The sequence of decisions of a space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._completed: dict[State, Choice | None] = {}

    def next(self, state: State) -> tuple[tuple[str, int], tuple[Option, ...]] | None:
        """The next decision, as its name with the number of the stage or parameter, and its options; None for a
        complete state."""
        decision = self.space.structures.decision(state.partial)
        if decision is not None:
            return (decision.about, len(state.partial.stages)), decision.options
        nodes = self._nodes(state)
        if len(state.parameters) == len(nodes):
            return None
        stage, node = nodes[len(state.parameters)]
        size = self.space.stages.layouts(state.partial, stage).sizes[node]
        return ("parameter", len(state.parameters)), tuple(range(size))

    def decide(self, state: State, option: Option) -> State:
        """The state with the next decision taken."""
        if not self.space.structures.is_complete(state.partial):
            return State(self.space.structures.decide(state.partial, option))
        assert isinstance(option, int)
        return State(state.partial, (*state.parameters, option))

    def label(self, state: State, option: Option) -> Option:
        """What an option means wherever it stands: of layers and submeshes their number."""
        if not isinstance(option, int):
            return option.size
        about = self.space.structures.decision(state.partial)
        return option - state.partial.next_layer if about is not None and about.about == "layers" else option

    def choice(self, state: State, seconds: float) -> Choice | None:
        """The choice of a state in which nothing is left to decide, given these seconds for the solver; None where it
        has no layouts."""
        if state not in self._completed:
            self._completed[state] = self._laid_out(state, seconds / len(state.partial.stages))
        return self._completed[state]

    def _laid_out(self, state: State, seconds: float) -> Choice | None:
        decided = list(zip(self._nodes(state), state.parameters, strict=True))

        def layouts(number: int) -> LayoutNumbers | None:
            of = self.space.stages.layouts(state.partial, number)
            kept = {node: [one] for (at, node), one in decided if at == number}
            # Where nothing fits the walk is told by how much not, and not only that.
            limits = of.limit_bytes, inf
            found = (of.complete(kept, limit_bytes=limit, time_limit_seconds=seconds) for limit in limits)
            return next(filter(None, found), None)

        return state.partial.laid_out(layouts)

    def tried(self, state: State, budget: Budget, best: Incumbent) -> Generator[Found, None, float]:
        """Price the choice of a complete state, and yield it where it is the best so far.

        Returns:
          Its seconds, with what it counts for more where it does not fit; infinite where it has no layouts.
        """
        choice = self.choice(state, max(min(budget.left_seconds, _MOST_SECONDS), _LEAST_SECONDS))
        if choice is None:
            budget.evaluations += 1
            return inf
        price = budget.price(self.space, choice)
        yield from best.offer(choice, price)
        return penalised_seconds(price)

    def _nodes(self, state: State) -> list[tuple[int, int]]:
        """The stage and the node of each parameter that is decided."""
        return [
            (number, node)
            for number in range(len(state.partial.stages))
            for node in self.space.stages.layouts(state.partial, number).parameter_nodes[:PARAMETERS]
        ]


def penalised_seconds(price: Price) -> float:
    """Seconds, with a penalty for memory beyond the limit; infinite for a choice without layouts."""
    return price.seconds * (1 + _EXCESS * price.excess) if isfinite(price.seconds) else price.seconds

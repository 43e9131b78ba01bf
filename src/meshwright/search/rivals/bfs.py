"""Breadth-first search over structures, cut off by lower bounds.

Paper: branch and bound is Land and Doig, "An automatic method of solving discrete programming problems", Econometrica
1960; keeping the best of each level (a beam) is Lowerre's Harpy, 1976. Method: all partial choices with one stage,
then all with two, and so on. A partial choice is dropped if its lower bound is no less than the best plan's seconds;
of a level no more than a beam are kept, those that promise most, and what the dropped ones take at least limits what
is proven. Layouts of a complete structure are solved by the integer program.

Cost: a stage's problem is built for each partial choice that is kept. Limits: the bound is the slowest stage alone,
so that little is proven of pipelines, whose ends stand still; the beam is filled by arithmetic first, which cannot
tell one logical mesh from another.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from ..space.choice import Choice
from ..space.space import Space
from .protocol import Budget, Found, Incumbent

# Partial choices of a level that are looked at; on gpt3-1.3b and 16 devices a level of so many takes about ten seconds.
BEAM = 256


class BreadthFirst:
    """See the module; `beam` is the most partial choices of a level that are kept."""

    name, exact = "bfs", True
    paper = "Land and Doig, An Automatic Method of Solving Discrete Programming Problems, Econometrica 1960"

    def __init__(self, beam: int = BEAM) -> None:
        self.beam = beam

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """As `Search.run`."""
        best, dropped = Incumbent(space.bound(Choice())), inf
        level = [Choice(count) for count in space.counts]
        while level:
            partials: list[Choice] = []
            for number, partial in enumerate(level):
                if budget.over:
                    left = min(map(space.work_bound, [*partials, *level[number:]]), default=inf)
                    yield from best.prove(min(dropped, left))
                    return
                partials += (one for one in _stages(space, partial) if space.work_bound(one) < best.seconds)
            partials.sort(key=lambda one: (space.work_bound(one), len(one.stages)))
            level = []
            for partial in partials:
                if len(level) >= self.beam or budget.over or space.work_bound(partial) >= best.seconds:
                    dropped = min(dropped, space.work_bound(partial))
                    break
                if (least := space.bound(partial)) >= best.seconds * (1 - space.gap):
                    dropped = min(dropped, least)
                    continue
                if not space.structures.is_complete(partial):
                    level.append(partial)
                    continue
                yield from best.offer(partial, budget.price(space, partial))
                dropped = min(dropped, max(least, space.bound_within(partial)))
            level.sort(key=space.bound)
        yield from best.prove(dropped)


def _stages(space: Space, partial: Choice) -> Iterator[Choice]:
    """A partial choice with one more stage, in all ways."""
    for child in space.structures.children(partial):
        if child.open:
            yield from _stages(space, child)
        else:
            yield child

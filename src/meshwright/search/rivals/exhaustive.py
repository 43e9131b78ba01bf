"""Every choice of the space, one after the other: the truth that other searches are tested against.

Paper: none; this is what "optimal" means. Method: all structures, and for each all layouts of all nodes of all stages.
Cost: the product of all numbers of choices, so that it is refused beyond a small number of choices; what it is not
refused for is proven to the last choice. Limits: two layers on two devices are already near the most it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, product
from math import prod

from ..space.choice import Choice
from ..space.space import Space
from .protocol import Budget, Found, Incumbent, too_large

# Choices are priced at about a thousand a second.
MOST_CHOICES = 200_000


class Exhaustive:
    """See the module."""

    name, exact = "exhaustive", True
    paper = "none: every choice is priced"

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """As `Search.run`."""
        self._check(space)
        best = Incumbent()
        for structure in space.structures.all():
            for choice in _all_layouts(space, structure):
                if budget.over:
                    return
                yield from best.offer(choice, budget.price(space, choice))
        if best.choice is not None:
            yield from best.prove(best.seconds)

    def _check(self, space: Space) -> None:
        first = next(space.structures.all(), None)
        total = prod(_sizes(space, first)) if first is not None else 0
        if total <= MOST_CHOICES:  # else not even the structures are counted, of which there may be very many
            total = max(total, space.structures.count())
        if total <= MOST_CHOICES:
            totals = accumulate(prod(_sizes(space, one)) for one in space.structures.all())
            total = next((one for one in totals if one > MOST_CHOICES), 0)
        if total > MOST_CHOICES:
            raise too_large(self.name, f"more than 10^{len(str(total)) - 1} choices", MOST_CHOICES)


def _sizes(space: Space, structure: Choice) -> list[int]:
    return [size for number in range(len(structure.stages)) for size in space.stages.layouts(structure, number).sizes]


def _all_layouts(space: Space, structure: Choice) -> Iterator[Choice]:
    """Every choice of a structure."""
    each = [[range(size) for size in space.stages.layouts(structure, n).sizes] for n in range(len(structure.stages))]
    for picked in product(*(product(*ranges) for ranges in each)):
        stages = zip(structure.stages, picked, strict=True)
        yield structure._replace(stages=tuple(stage._replace(layouts=one) for stage, one in stages))

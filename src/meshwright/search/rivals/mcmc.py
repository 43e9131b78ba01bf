"""A random walk over layouts and stages that prefers what is faster (Metropolis-Hastings).

Paper: Jia, Zaharia, Aiken, "Beyond data and model parallelism for deep neural networks" (FlexFlow), MLSys 2019.
Method: a proposal changes the configuration of one random operator; it is taken if it is faster, and else with
probability exp(-beta * (new - old)). FlexFlow's space has no pipeline; here some proposals change the structure as well
(`moves`). What does not fit memory counts for more by its excess, so that the walk finds back. A walk that has not
improved for half of the time since it began begins again from another simple choice.

Cost: one price a proposal, some milliseconds for a large model. Limits: no bound; hundreds of nodes move one at a time,
and most single moves add two conversions, so that layouts which are better only together are seldom found.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import exp, isfinite

from ..space.choice import Choice
from ..space.moves import neighbour
from ..space.space import Space
from .decisions import penalised_seconds
from .protocol import Budget, Found, Incumbent

# Beta, in units of the seconds of the best choice: a proposal that is a hundredth slower is taken every third time.
# FlexFlow fixes it too, without saying at what.
_BETA = 100.0

# A walk begins again after as many proposals without improvement as it had before, and these at least.
_PATIENCE = 200


class MCMC:
    """See the module."""

    name, exact = "mcmc", False
    paper = "Jia et al., Beyond Data and Model Parallelism for Deep Neural Networks (FlexFlow), MLSys 2019"

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """As `Search.run`."""
        best = Incumbent(space.bound(Choice()))
        for begin in _beginnings(space):
            if budget.over:
                return
            here, price = begin, budget.price(space, begin)
            yield from best.offer(here, price)
            since = steps = 0
            while not budget.over and since < max(_PATIENCE, steps // 2):
                steps, since = steps + 1, since + 1
                other = neighbour(space, here, budget.rng)
                if other is here:
                    continue
                offered = budget.price(space, other)
                for found in best.offer(other, offered):
                    since = 0
                    yield found
                seconds = penalised_seconds(price)
                worse = (penalised_seconds(offered) - seconds) / min(best.seconds, seconds)
                if worse <= 0 or (isfinite(worse) and budget.rng.random() < exp(-_BETA * worse)):
                    here, price = other, offered


def _beginnings(space: Space) -> Iterator[Choice]:
    """Simple choices, the fewest stages and microbatches first, over and over."""
    numbers = [n for n in range(1, space.cluster.num_devices + 1) if space.stages.may_have(n)]
    found = False
    while True:
        for stages, count in product(numbers, space.counts):
            if (begin := space.start(count, stages)) is not None:
                found = True
                yield begin
        if not found:
            begin = next(space.structures.all(), None)
            if begin is None:
                return
            yield space.filled(begin)

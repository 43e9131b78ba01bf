"""One mesh axis after the other: the double recursive algorithm of MindSpore.

Paper: Wang, Tao, Yu, Shi, Wang, Wang, Wang, "Efficient and systematic partitioning of large and deep neural networks
for parallelization", Euro-Par 2021 (MindSpore's double recursive strategy search). Method: the outer recursion parts
the devices, here one axis of the logical mesh after the other, the slowest links first. The inner recursion chooses
for every operator how it is split over that axis, with what earlier axes do held and later axes not used yet; here it
is the integer program with all other choices taken out. Stages are even: the method knows no pipelines, so these are
tried in turn, with every logical mesh, rematerialisation and number of microbatches.

Cost: as many small integer programs as there are axes, each with some choices a node. Limits: what one axis should do
depends on later ones (a split that only pays when the other axis takes the rest is not seen), memory is known only
after the last axis, and stages are even.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ..space.choice import Choice, LayoutNumbers
from ..space.layouts import Layouts
from ..space.space import Space
from .protocol import Budget, Found, Incumbent


class Recursive:
    """See the module."""

    name, exact = "recursive", False
    paper = (
        "Wang et al., Efficient and Systematic Partitioning of Large and Deep Neural Networks for Parallelization, "
        "Euro-Par 2021"
    )

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """As `Search.run`."""
        best = Incumbent(space.bound(Choice()))
        for structure in even_structures(space):
            if budget.over:
                return
            if space.work_bound(structure) < best.seconds and space.bound(structure) < best.seconds:
                choice = self._laid_out(space, structure, budget)
                if choice is not None:
                    yield from best.offer(choice, budget.price(space, choice))

    def _laid_out(self, space: Space, structure: Choice, budget: Budget) -> Choice | None:
        known: dict[int, LayoutNumbers | None] = {}

        def layouts(number: int) -> LayoutNumbers | None:
            of = space.stages.layouts(structure, number)
            if id(of) not in known:
                known[id(of)] = axis_by_axis(of, seconds=max(budget.left_seconds, 0.1))
            return known[id(of)]

        return structure.laid_out(layouts)


def axis_by_axis(of: Layouts, *, seconds: float) -> LayoutNumbers | None:
    """The layouts of a stage, decided over one axis after the other; None where they do not fit."""
    kept: dict[int, list[int]] = {node: list(range(size)) for node, size in enumerate(of.sizes)}
    found: LayoutNumbers | None = None
    axes = tuple(of.problem.sizes)
    for place, axis in enumerate(axes):
        unused = {node: _unused(of, node, some, axes[place + 1 :]) for node, some in kept.items()}
        # What later axes do not split yet is that much larger.
        limit = prod(of.problem.sizes[one] for one in axes[place + 1 :]) * of.limit_bytes
        found = of.complete(unused, limit_bytes=limit, time_limit_seconds=min(seconds / len(axes), 5.0))
        if found is None:
            return None
        for node, some in kept.items():
            on_axis = of.on_axis(node, axis)
            kept[node] = [one for one in some if on_axis[one] == on_axis[found[node]]]
    return found


def _unused(of: Layouts, node: int, some: list[int], axes: tuple[str, ...]) -> list[int]:
    """Of these choices of a node those that leave axes unused; all where there are none."""
    for axis in axes:
        on_axis = of.on_axis(node, axis)
        some = [one for one in some if on_axis[one] is None] or some
    return some


def even_structures(space: Space) -> Iterator[Choice]:
    """Structures of even stages: the fewest stages first, of each number what has the least arithmetic."""
    for stages in range(1, space.cluster.num_devices + 1):
        found = [one for count in space.counts for one in space.structures.even(count, stages)]
        yield from sorted(found, key=space.work_bound)

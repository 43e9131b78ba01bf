"""Random neighbours of a choice: what a walk through the space does next (FlexFlow's proposals, and stages).

Most moves change the layout of one node; in half of them the change is then carried to nodes near by, each of which
takes what is fastest beside its neighbours (FlexFlow's implementation calls this propagation). The others change the
structure: the cut between two stages, a stage's logical mesh or rematerialisation, the number of microbatches, two
stages made one, one made two. A stage that is another one afterwards keeps its layouts where these still mean the same,
and else is laid out anew, node by node.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..inter.submeshes import Submesh
from .choice import Choice, StageChoice
from .layouts import Layouts
from .space import Space

# The share of moves that change the layout of one node: a stage has hundreds of nodes and few other decisions.
_OF_LAYOUTS = 0.8

# The share of these that are carried on, and the most nodes that they reach.
_CARRIED, _MOST_CARRIED = 0.5, 16


def neighbour(space: Space, choice: Choice, rng: np.random.Generator) -> Choice:
    """A random neighbour of a choice that has all its layouts, itself where the drawn move is not possible."""
    if rng.random() < _OF_LAYOUTS:
        return _other_layout(space, choice, rng)
    moves: list[Callable[[Space, Choice, np.random.Generator], Choice | None]] = [
        _other_count, _other_mesh, _other_remat, _other_cut, _joined, _split
    ]  # fmt: skip
    found = moves[int(rng.integers(len(moves)))](space, choice, rng)
    return choice if found is None else space.filled(found)


def _other_layout(space: Space, choice: Choice, rng: np.random.Generator) -> Choice:
    number, stage = _drawn(choice, rng)
    known = space.stages.layouts(choice, number)
    assert stage.layouts is not None
    node = int(rng.integers(len(known.sizes)))
    if (size := known.sizes[node]) == 1:
        return choice
    layouts = list(stage.layouts)
    layouts[node] = (layouts[node] + 1 + int(rng.integers(size - 1))) % size
    if rng.random() < _CARRIED:
        _carry(known, layouts, node, int(rng.integers(1, _MOST_CARRIED + 1)), rng)
    return choice.with_stages(number, stage._replace(layouts=tuple(layouts)))


def _carry(known: Layouts, layouts: list[int], node: int, reach: int, rng: np.random.Generator) -> None:
    """Let nodes around one that has changed, the nearest first, take what is fastest beside their neighbours."""
    seen, ring = {node}, [node]
    while ring and len(seen) <= reach:
        near = [other for one in ring for other, _ in known.neighbours[one] if other not in seen]
        ring = list(dict.fromkeys(near))
        rng.shuffle(ring)
        for other in ring:
            if len(seen) > reach:
                return
            seen.add(other)
            layouts[other] = int(np.argmin(known.around(layouts, other)))


def _other_count(space: Space, choice: Choice, rng: np.random.Generator) -> Choice | None:
    place = space.counts.index(choice.microbatches) + (1 if rng.random() < 0.5 else -1)
    if not 0 <= place < len(space.counts):
        return None
    count = space.counts[place]
    same = space.stages.layers(count) == space.stages.layers(choice.microbatches)
    return _kept(space, choice, choice._replace(microbatches=count)) if same else None


def _kept(space: Space, before: Choice, after: Choice) -> Choice:
    """The layouts of the same stages in another structure, where its nodes have the same choices."""
    for number, stage in enumerate(after.stages):
        old, new = (space.stages.layouts(one, number).problem.choices for one in (before, after))
        if old != new:
            after = after.with_stages(number, stage._replace(layouts=None))
    return after


def _other_mesh(space: Space, choice: Choice, rng: np.random.Generator) -> Choice | None:
    number, stage = _drawn(choice, rng)
    mesh = int(rng.integers(len(space.stages.meshes(choice.microbatches, stage.first, stage.last, stage.submesh))))
    return choice.with_stages(number, stage._replace(mesh=mesh, layouts=None)) if mesh != stage.mesh else None


def _other_remat(space: Space, choice: Choice, rng: np.random.Generator) -> Choice | None:
    number, stage = _drawn(choice, rng)
    remats = space.stages.remats(choice.microbatches, stage.first, stage.last)
    others = [one for one in remats if one != stage.remat]
    if not others:
        return None
    other = others[int(rng.integers(len(others)))]
    return _kept(space, choice, choice.with_stages(number, stage._replace(remat=other)))


def _other_cut(space: Space, choice: Choice, rng: np.random.Generator) -> Choice | None:
    if len(choice.stages) == 1:
        return None
    number = int(rng.integers(len(choice.stages) - 1))
    left, right = choice.stages[number : number + 2]
    bound = left.last + (1 if rng.random() < 0.5 else -1)
    if not left.first < bound < right.last:
        return None
    return _replaced(space, choice, number, 2, left._replace(last=bound), right._replace(first=bound))


def _joined(space: Space, choice: Choice, rng: np.random.Generator) -> Choice | None:
    if len(choice.stages) == 1:
        return None
    number = int(rng.integers(len(choice.stages) - 1))
    left, right = choice.stages[number : number + 2]
    stage = left._replace(last=right.last, submesh=Submesh(left.submesh.first, right.submesh.stop))
    return _replaced(space, choice, number, 2, stage)


def _split(space: Space, choice: Choice, rng: np.random.Generator) -> Choice | None:
    number, stage = _drawn(choice, rng)
    if stage.last - stage.first < 2 or stage.submesh.size < 2:
        return None
    bound = int(rng.integers(stage.first + 1, stage.last))
    at = int(rng.integers(stage.submesh.first + 1, stage.submesh.stop))
    left = stage._replace(last=bound, submesh=Submesh(stage.submesh.first, at))
    right = stage._replace(first=bound, submesh=Submesh(at, stage.submesh.stop))
    return _replaced(space, choice, number, 1, left, right)


def _drawn(choice: Choice, rng: np.random.Generator) -> tuple[int, StageChoice]:
    number = int(rng.integers(len(choice.stages)))
    return number, choice.stages[number]


def _replaced(space: Space, choice: Choice, number: int, count: int, *stages: StageChoice) -> Choice | None:
    """The choice with other stages in the place of some, if it is one of the space: rematerialised as before if that is
    possible, to be laid out anew, on the same logical mesh if there is one of that number. One stage has another
    problem alone than beside others."""
    found = []
    for stage in stages:
        remats = space.stages.remats(choice.microbatches, stage.first, stage.last)
        meshes = space.stages.meshes(choice.microbatches, stage.first, stage.last, stage.submesh)
        remat, mesh = min(max(stage.remat, remats[0]), remats[-1]), min(stage.mesh, max(len(meshes) - 1, 0))
        found.append(stage._replace(mesh=mesh, remat=remat, layouts=None))
    other = choice.with_stages(number, *found, instead_of=count)
    places = all(stage.submesh in space.stages.places for stage in other.stages)
    if not places or not space.stages.may_have(len(other.stages)) or space.stages.ends is not None:
        return None
    meshed = all(space.stages.meshes(other.microbatches, one.first, one.last, one.submesh) for one in other.stages)
    return other if meshed else None

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
    """A random neighbour, itself where the drawn move is not possible.

    Args:
      space: of the choice.
      choice: with all its layouts.
      rng: random numbers.
    """
    if rng.random() < _OF_LAYOUTS:
        return _other_layout(space, choice, rng)
    moves: list[Callable[[Space, Choice, np.random.Generator], Choice | None]] = [
        _other_count, _other_mesh, _other_remat, _other_cut, _joined, _split
    ]  # fmt: skip
    found = moves[int(rng.integers(len(moves)))](space, choice, rng)
    return choice if found is None else space.filled(found)


def _other_layout(space: Space, choice: Choice, rng: np.random.Generator) -> Choice:
    number = int(rng.integers(len(choice.stages)))
    stage, known = choice.stages[number], space.layouts(choice, number)
    assert stage.layouts is not None
    node = int(rng.integers(len(known.sizes)))
    if (size := known.sizes[node]) == 1:
        return choice
    layouts = list(stage.layouts)
    layouts[node] = (layouts[node] + 1 + int(rng.integers(size - 1))) % size
    if rng.random() < _CARRIED:
        _carry(known, layouts, node, int(rng.integers(1, _MOST_CARRIED + 1)), rng)
    return choice.with_stage(number, stage._replace(layouts=tuple(layouts)))


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
    counts = list(space.structures.counts)
    place = counts.index(choice.microbatches) + (1 if rng.random() < 0.5 else -1)
    if not 0 <= place < len(counts):
        return None
    structures, count = space.structures, counts[place]
    same = structures.layers(count) == structures.layers(choice.microbatches)
    return _kept(space, choice, Choice(count, choice.stages)) if same else None


def _kept(space: Space, before: Choice, after: Choice) -> Choice:
    """The layouts of the same stages in another structure, where its nodes have the same choices."""
    for number, stage in enumerate(after.stages):
        old, new = (space.layouts(one, number).problem.choices for one in (before, after))
        if old != new:
            after = after.with_stage(number, stage._replace(layouts=None))
    return after


def _other_mesh(space: Space, choice: Choice, rng: np.random.Generator) -> Choice | None:
    number, stage = _drawn(choice, rng)
    meshes = space.structures.meshes(choice.microbatches, stage.first, stage.last, stage.submesh)
    mesh = int(rng.integers(meshes))
    return choice.with_stage(number, stage._replace(mesh=mesh, layouts=None)) if mesh != stage.mesh else None


def _other_remat(space: Space, choice: Choice, rng: np.random.Generator) -> Choice | None:
    number, stage = _drawn(choice, rng)
    remats = space.structures.remats(choice.microbatches, stage.first, stage.last)
    other = next((one for one in remats if one != stage.remat), None)
    if other is None:
        return None
    return _kept(space, choice, choice.with_stage(number, stage._replace(remat=other)))


def _other_cut(space: Space, choice: Choice, rng: np.random.Generator) -> Choice | None:
    if len(choice.stages) == 1:
        return None
    number = int(rng.integers(len(choice.stages) - 1))
    left, right = choice.stages[number : number + 2]
    bound = left.last + (1 if rng.random() < 0.5 else -1)
    if not left.first < bound < right.last:
        return None
    pair = (_in_range(space, choice, left, left.first, bound), _in_range(space, choice, right, bound, right.last))
    return _allowed(space, Choice(choice.microbatches, (*choice.stages[:number], *pair, *choice.stages[number + 2 :])))


def _joined(space: Space, choice: Choice, rng: np.random.Generator) -> Choice | None:
    if len(choice.stages) == 1:
        return None
    number = int(rng.integers(len(choice.stages) - 1))
    left, right = choice.stages[number : number + 2]
    stage = left._replace(submesh=Submesh(left.submesh.first, right.submesh.stop))
    stage = _in_range(space, choice, stage, left.first, right.last)
    return _allowed(space, Choice(choice.microbatches, (*choice.stages[:number], stage, *choice.stages[number + 2 :])))


def _split(space: Space, choice: Choice, rng: np.random.Generator) -> Choice | None:
    number, stage = _drawn(choice, rng)
    if stage.last - stage.first < 2 or stage.submesh.size < 2:
        return None
    bound = int(rng.integers(stage.first + 1, stage.last))
    at = int(rng.integers(stage.submesh.first + 1, stage.submesh.stop))
    pair = (
        _in_range(space, choice, stage._replace(submesh=Submesh(stage.submesh.first, at)), stage.first, bound),
        _in_range(space, choice, stage._replace(submesh=Submesh(at, stage.submesh.stop)), bound, stage.last),
    )
    return _allowed(space, Choice(choice.microbatches, (*choice.stages[:number], *pair, *choice.stages[number + 1 :])))


def _drawn(choice: Choice, rng: np.random.Generator) -> tuple[int, StageChoice]:
    number = int(rng.integers(len(choice.stages)))
    return number, choice.stages[number]


def _in_range(space: Space, choice: Choice, stage: StageChoice, first: int, last: int) -> StageChoice:
    """A stage of other layers: rematerialised as before if that is possible, to be laid out anew, on the same logical
    mesh if there is one of that number."""
    remats = space.structures.remats(choice.microbatches, first, last)
    meshes = space.structures.meshes(choice.microbatches, first, last, stage.submesh)
    remat = stage.remat if stage.remat in remats else remats[0]
    return StageChoice(first, last, stage.submesh, min(stage.mesh, max(meshes - 1, 0)), remat)


def _allowed(space: Space, choice: Choice) -> Choice | None:
    """The choice, if it is one of the space. One stage has another problem alone than beside others."""
    structures = space.structures
    places = all(stage.submesh in structures.known for stage in choice.stages)
    counted = structures.stage_counts is None or len(choice.stages) in structures.stage_counts
    if not places or not counted or structures.ends is not None:
        return None
    meshed = all(
        structures.meshes(choice.microbatches, stage.first, stage.last, stage.submesh) for stage in choice.stages
    )
    return choice if meshed else None

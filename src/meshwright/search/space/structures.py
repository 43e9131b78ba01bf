"""The tree of decisions whose leaves are the structures of a space.

First the microbatches, then stage by stage how many layers it has, its submesh, its logical mesh and how many of its
segments it rematerialises. A search that decides one thing after another (breadth-first search, Monte-Carlo tree
search, a policy) walks this tree; no branch of it is a dead end.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

from ..inter.submeshes import Submesh
from .choice import Choice, StageChoice
from .stages import Stages

Option = int | Submesh


class Decision(NamedTuple):
    """The next decision.

    Args:
      about: "microbatches", "layers" (the end of the next stage), "submesh", "mesh" or "remat".
      options: to choose from; never none.
    """

    about: str
    options: tuple[Option, ...]


class Structures:
    """The tree of decisions of a space, given the stages that its plans may have."""

    def __init__(self, of: Stages) -> None:
        self._of = of
        self._known_completions: dict[tuple[int, int, int, int], int] = {}

    def is_complete(self, choice: Choice) -> bool:
        """Whether nothing is left to decide."""
        return bool(choice.stages) and choice.next_layer == self._of.layers(choice.microbatches) and not choice.open

    def decision(self, choice: Choice) -> Decision | None:
        """The next decision; None for a complete choice."""
        if not choice.microbatches:
            return Decision("microbatches", tuple(self._of.counts))
        if self.is_complete(choice):
            return None
        if not choice.open:
            return Decision("layers", tuple(self._ends(choice)))
        end = choice.open[0]
        assert isinstance(end, int)
        if len(choice.open) == 1:
            return Decision("submesh", tuple(self._submeshes(choice, end)))
        submesh = choice.open[1]
        assert isinstance(submesh, Submesh)
        if len(choice.open) == 2:
            return Decision("mesh", tuple(range(self._meshes(choice, end, submesh))))
        return Decision("remat", self._of.remats(choice.microbatches, choice.next_layer, end))

    def decide(self, choice: Choice, option: Option) -> Choice:
        """A choice that is not complete, with the next decision taken; one of `decision(choice).options`."""
        if not choice.microbatches:
            assert isinstance(option, int)
            return Choice(option)
        if len(choice.open) < 3:
            return choice._replace(open=(*choice.open, option))
        end, submesh, mesh = choice.open
        stage = StageChoice(choice.next_layer, end, submesh, mesh, option)  # pyrefly: ignore
        return Choice(choice.microbatches, (*choice.stages, stage))

    def children(self, choice: Choice) -> Iterator[Choice]:
        """All ways to take the next decision."""
        decision = self.decision(choice)
        for option in decision.options if decision is not None else ():
            yield self.decide(choice, option)

    def all(self, choice: Choice | None = None) -> Iterator[Choice]:
        """Every structure that a partial choice may become, depth first."""
        choice = Choice() if choice is None else choice
        if self.is_complete(choice):
            yield choice
        for child in self.children(choice):
            yield from self.all(child)

    def count(self) -> int:
        """How many structures there are."""
        return sum(self._completions(count, 0, 0, 0) for count in self._of.counts)

    def even(self, microbatches: int, stages: int) -> Iterator[Choice]:
        """Structures of equal submeshes and as nearly as can be equal numbers of layers, with the same logical mesh
        number in all stages, which rematerialise nothing or everything; none where the devices cannot be cut so."""
        of, layers, size = self._of, self._of.layers(microbatches), self._of.cluster.num_devices // stages
        places = [Submesh(n * size, (n + 1) * size) for n in range(stages)]
        bounds = [round(n * layers / stages) for n in range(stages + 1)] if of.ends is None else [0, *of.ends]
        ranges = list(pairwise(bounds))
        if size * stages != of.cluster.num_devices or stages > layers or any(one not in of.places for one in places):
            return
        if len(ranges) != stages or not of.may_have(stages):
            return
        fewest = min(len(of.meshes(microbatches, *ends, at)) for ends, at in zip(ranges, places, strict=True))
        remats = [of.remats(microbatches, *ends) for ends in ranges]
        nothing, everything = ([allowed[end] for allowed in remats] for end in (0, -1))
        for mesh, remat in product(range(fewest), [nothing] if everything == nothing else [nothing, everything]):
            chosen = (StageChoice(*ends, at, mesh, n) for ends, at, n in zip(ranges, places, remat, strict=True))
            yield Choice(microbatches, tuple(chosen))

    @cached_property
    def _starting(self) -> dict[int, list[Submesh]]:
        found: dict[int, list[Submesh]] = {}
        for submesh in self._of.places:
            found.setdefault(submesh.first, []).append(submesh)
        return found

    @cached_property
    def _cuts(self) -> list[int]:
        """Bit n of entry d: the devices from d on can be cut into n submeshes."""
        devices = self._of.cluster.num_devices
        found = [0] * devices + [1]
        for device in range(devices - 1, -1, -1):
            for submesh in self._starting.get(device, ()):
                found[device] |= found[submesh.stop] << 1
        return found

    def _can_end(self, stages: int, layers: int, device: int) -> bool:
        """Whether so many layers and the devices from one on can be stages, after so many stages."""
        if self._of.ends is not None:
            return bool(self._cuts[device] >> (len(self._of.ends) - stages) & 1)
        cuts = self._cuts[device] & ((1 << layers + 1) - 1)
        if (layers == 0) != (device == self._of.cluster.num_devices):
            return False
        if self._of.stage_counts is None:
            return cuts != 0
        return any(count >= stages and cuts >> (count - stages) & 1 for count in self._of.stage_counts)

    def _ends(self, choice: Choice) -> Iterator[int]:
        given = self._of.ends is not None and self._of.ends[len(choice.stages)]
        for end in [given] if given else range(choice.next_layer + 1, self._of.layers(choice.microbatches) + 1):
            if any(True for _ in self._submeshes(choice, end)):
                yield end

    def _submeshes(self, choice: Choice, end: int) -> Iterator[Submesh]:
        left = self._of.layers(choice.microbatches) - end
        for submesh in self._starting.get(choice.next_device, ()):
            if self._can_end(len(choice.stages) + 1, left, submesh.stop) and self._meshes(choice, end, submesh):
                yield submesh

    def _meshes(self, choice: Choice, end: int, submesh: Submesh) -> int:
        return len(self._of.meshes(choice.microbatches, choice.next_layer, end, submesh))

    def _completions(self, count: int, layer: int, device: int, stages: int) -> int:
        """How many ways there are to go on from a layer and a device, after so many stages."""
        if layer == self._of.layers(count):
            return 1
        if (key := (count, layer, device, stages)) not in self._known_completions:
            # Only where a stage begins matters to the decisions after it.
            before = Choice(count, (StageChoice(0, layer, Submesh(0, device), 0, 0),) * stages)
            self._known_completions[key] = sum(
                self._meshes(before, end, submesh)
                * len(self._of.remats(count, layer, end))
                * self._completions(count, end, submesh.stop, stages + 1)
                for end in self._ends(before)
                for submesh in self._submeshes(before, end)
            )
        return self._known_completions[key]

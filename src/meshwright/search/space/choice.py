"""What a plan decides, as data, and the tree of these decisions.

A *choice* is the number of microbatches and, for each stage in program order, its layers, submesh, logical mesh,
rematerialisation and layouts. Everything but the layouts is the *structure*. The schedule is not part of a choice: of
those that fit, pricing takes the one with the shortest simulated step.

Structures are the leaves of a tree of decisions: the microbatches, then stage by stage how many layers it has, its
submesh, its logical mesh and whether it rematerialises. A search that decides one thing after another (breadth-first
search, Monte-Carlo tree search, a policy) walks this tree; no branch of it is a dead end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, product
from typing import NamedTuple

from ..inter.submeshes import Submesh

# For each node of a stage's intra-operator problem the number of its choice.
LayoutNumbers = tuple[int, ...]


class StageChoice(NamedTuple):
    """A stage.

    Args:
      first: its first layer.
      last: one past its last layer.
      submesh: its devices.
      mesh: number of its logical mesh among those of the submesh.
      remat: "none" or "layer".
      layouts: of each node of its intra-operator problem the number of the choice; None for those that the integer
        program finds within the memory of a device.
    """

    first: int
    last: int
    submesh: Submesh
    mesh: int
    remat: str
    layouts: LayoutNumbers | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan's decisions.

    >>> stage = StageChoice(0, 4, Submesh(0, 8), mesh=0, remat="none")
    >>> Choice(2, (stage,)).structure == Choice(2, (stage._replace(layouts=(1, 0)),)).structure
    True

    Args:
      microbatches: in a step.
      stages: in program order, each on the submesh after the one before it.
    """

    microbatches: int
    stages: tuple[StageChoice, ...]

    @property
    def structure(self) -> Choice:
        """The same choice with its layouts left open."""
        return Choice(self.microbatches, tuple(stage._replace(layouts=None) for stage in self.stages))

    def with_stage(self, number: int, stage: StageChoice) -> Choice:
        """The same choice with another stage in one place."""
        return Choice(self.microbatches, (*self.stages[:number], stage, *self.stages[number + 1 :]))


class Partial(NamedTuple):
    """Decisions taken so far.

    Args:
      microbatches: 0 where not decided.
      stages: those that are complete, without layouts.
      open: what is decided of the next stage, in order: its end (one past its last layer), submesh, logical mesh.
    """

    microbatches: int = 0
    stages: tuple[StageChoice, ...] = ()
    open: tuple[int | Submesh, ...] = ()

    @property
    def next_layer(self) -> int:
        """The first layer of the next stage."""
        return self.stages[-1].last if self.stages else 0

    @property
    def next_device(self) -> int:
        """The first device of the next stage."""
        return self.stages[-1].submesh.stop if self.stages else 0


Option = int | str | Submesh


class Decision(NamedTuple):
    """The next decision.

    Args:
      about: "microbatches", "layers" (the end of the next stage), "submesh", "mesh" or "remat".
      options: to choose from; never none.
    """

    about: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Structures:
    """The tree of decisions of a problem.

    Args:
      counts: numbers of microbatches.
      layers: of the program in so many microbatches.
      submeshes: that a stage may have.
      devices: of the cluster; every structure uses all of them.
      meshes: how many logical meshes a stage may have that has these layers and this submesh, by first layer, one past
        the last, and submesh.
      remats: "none" or "layer" or both, by microbatches, first layer, and one past the last.
      stage_counts: allowed numbers of stages; None for any.
      ends: one past the last layer of each stage, where these are given; None to choose.
    """

    counts: Sequence[int]
    layers: Callable[[int], int]
    submeshes: Sequence[Submesh]
    devices: int
    meshes: Callable[[int, int, int, Submesh], int]
    remats: Callable[[int, int, int], tuple[str, ...]]
    stage_counts: Collection[int] | None = None
    ends: Sequence[int] | None = None

    def is_complete(self, partial: Partial) -> bool:
        """Whether nothing is left to decide."""
        return bool(partial.stages) and partial.next_layer == self.layers(partial.microbatches) and not partial.open

    def choice(self, partial: Partial) -> Choice:
        """The choice of a complete partial one, its layouts left to the integer program."""
        return Choice(partial.microbatches, partial.stages)

    def decision(self, partial: Partial) -> Decision | None:
        """The next decision; None for a complete choice."""
        if not partial.microbatches:
            return Decision("microbatches", tuple(self.counts))
        if self.is_complete(partial):
            return None
        if not partial.open:
            return Decision("layers", tuple(self._ends(partial)))
        end = partial.open[0]
        assert isinstance(end, int)
        if len(partial.open) == 1:
            return Decision("submesh", tuple(self._submeshes(partial, end)))
        submesh = partial.open[1]
        assert isinstance(submesh, Submesh)
        if len(partial.open) == 2:
            return Decision("mesh", tuple(range(self._meshes(partial, end, submesh))))
        return Decision("remat", self.remats(partial.microbatches, partial.next_layer, end))

    def decide(self, partial: Partial, option: Option) -> Partial:
        """The partial choice with the next decision taken.

        Args:
          partial: not complete.
          option: of `decision(partial).options`.
        """
        if not partial.microbatches:
            assert isinstance(option, int)
            return Partial(option)
        if len(partial.open) < 3:
            assert not isinstance(option, str)
            return partial._replace(open=(*partial.open, option))
        end, submesh, mesh = partial.open
        stage = StageChoice(partial.next_layer, end, submesh, mesh, option)  # pyrefly: ignore
        return Partial(partial.microbatches, (*partial.stages, stage))

    def children(self, partial: Partial) -> Iterator[Partial]:
        """All ways to take the next decision."""
        decision = self.decision(partial)
        for option in decision.options if decision is not None else ():
            yield self.decide(partial, option)

    def all(self, partial: Partial | None = None) -> Iterator[Choice]:
        """Every structure that a partial choice may become, depth first."""
        partial = Partial() if partial is None else partial
        if self.is_complete(partial):
            yield self.choice(partial)
        for child in self.children(partial):
            yield from self.all(child)

    def count(self) -> int:
        """How many structures there are."""
        return sum(self._completions(count, 0, 0, 0) for count in self.counts)

    def even(self, microbatches: int, stages: int) -> Iterator[Choice]:
        """Structures of equal submeshes and as nearly as can be equal numbers of layers, with the same logical mesh
        number and rematerialisation in all stages; none where the devices cannot be cut so."""
        layers, size = self.layers(microbatches), self.devices // stages
        places = [Submesh(n * size, (n + 1) * size) for n in range(stages)]
        bounds = [round(n * layers / stages) for n in range(stages + 1)] if self.ends is None else [0, *self.ends]
        ranges = list(pairwise(bounds))
        if size * stages != self.devices or stages > layers or any(one not in self.known for one in places):
            return
        if len(ranges) != stages or (self.stage_counts is not None and stages not in self.stage_counts):
            return
        fewest = min(self.meshes(microbatches, *ends, at) for ends, at in zip(ranges, places, strict=True))
        remats = [self.remats(microbatches, *ends) for ends in ranges]
        for mesh, remat in product(range(fewest), ("none", "layer")):
            if any(remat in allowed for allowed in remats):
                chosen = (
                    StageChoice(*ends, at, mesh, remat if remat in allowed else allowed[0])
                    for ends, at, allowed in zip(ranges, places, remats, strict=True)
                )
                yield Choice(microbatches, tuple(chosen))

    @cached_property
    def known(self) -> frozenset[Submesh]:
        """The submeshes that a stage may have."""
        return frozenset(self.submeshes)

    @cached_property
    def _starting(self) -> dict[int, list[Submesh]]:
        found: dict[int, list[Submesh]] = {}
        for submesh in self.submeshes:
            found.setdefault(submesh.first, []).append(submesh)
        return found

    @cached_property
    def _cuts(self) -> list[int]:
        """Bit n of entry d: the devices from d on can be cut into n submeshes."""
        found = [0] * self.devices + [1]
        for device in range(self.devices - 1, -1, -1):
            for submesh in self._starting.get(device, ()):
                found[device] |= found[submesh.stop] << 1
        return found

    def _can_end(self, stages: int, layers: int, device: int) -> bool:
        """Whether so many layers and the devices from one on can be stages, after so many stages."""
        if self.ends is not None:
            return bool(self._cuts[device] >> (len(self.ends) - stages) & 1)
        cuts = self._cuts[device] & ((1 << layers + 1) - 1)
        if (layers == 0) != (device == self.devices):
            return False
        if self.stage_counts is None:
            return cuts != 0
        return any(count >= stages and cuts >> (count - stages) & 1 for count in self.stage_counts)

    def _ends(self, partial: Partial) -> Iterator[int]:
        layers = self.layers(partial.microbatches)
        given = self.ends is not None and self.ends[len(partial.stages)]
        for end in [given] if given else range(partial.next_layer + 1, layers + 1):
            if any(True for _ in self._submeshes(partial, end)):
                yield end

    def _submeshes(self, partial: Partial, end: int) -> Iterator[Submesh]:
        left = self.layers(partial.microbatches) - end
        for submesh in self._starting.get(partial.next_device, ()):
            if self._can_end(len(partial.stages) + 1, left, submesh.stop) and self._meshes(partial, end, submesh):
                yield submesh

    def _meshes(self, partial: Partial, end: int, submesh: Submesh) -> int:
        return self.meshes(partial.microbatches, partial.next_layer, end, submesh)

    @cached_property
    def _completions(self) -> Callable[[int, int, int, int], int]:
        @cache
        def completions(count: int, layer: int, device: int, stages: int) -> int:
            if layer == self.layers(count):
                return 1
            # Only where a stage begins matters to the decisions after it.
            at = StageChoice(0, layer, Submesh(0, device), 0, "none")
            before = Partial(count, (at,) * stages)
            return sum(
                self._meshes(before, end, submesh)
                * len(self.remats(count, layer, end))
                * completions(count, end, submesh.stop, stages + 1)
                for end in self._ends(before)
                for submesh in self._submeshes(before, end)
            )

        return completions

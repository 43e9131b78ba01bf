"""What a range of layers costs on a submesh: estimated from its parts, solved where it matters.

The stage search asks for every range of layers on every kind of submesh; hundreds of integer programs, of which a
dozen will matter. So a range is first *estimated* (`estimates`), nearly always too low and by little, and the
search may trust that to rule a range out. Ranges that a best plan uses are then *solved* whole, within the limit of
memory and for the microbatches in flight at their place, and the search is repeated, until the best plan is made of
solved ranges only (`pipelines.driver`). Equal ranges are solved once, wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from math import inf, isfinite

import numpy as np

from ...program.ladder import MIDDLE
from ...program.staged import StagedProgram
from ..inter.logical_meshes import Kinds, WantedMesh
from ..inter.problem import Crossing, InterOpProblem, Option, PlacedStage, best_of, loose_ends
from ..inter.submeshes import Submesh, Submeshes
from ..intra.problem import ParameterInfo
from ..restrictions.constraints import Constraints
from .estimates import StageEstimates
from .repeated_blocks import in_parts
from .reserve import MemoryReserve
from .solved import SolvedStage, better_of
from .solver import RANGE_GAP, Place, StageSolver

# To find how far up its ladder a range is best: the first step, as of `Ladder.share_of`; at how many places it is tried
# (with three, llama3-8b on 16 TPU v5e, 64 samples, takes 18.19 s a step and not 18.14, and as long to plan); and that
# none is near one which takes so many times what another way does (chosen, not measured).
_STEP, _TRIES, _MUCH = 1 / 24, 4, 1.05


class StageCosts:
    """Options for ranges of layers of one program on submeshes of one cluster.

    Args:
      program: in layers, at the size of one microbatch.
      parameters: by position in the program's `graph.parameters`.
      submeshes: of the cluster.
      constraints: what the user has fixed.
      remat: "none", "selective", "layer", or None to choose for each stage.
      meshes: logical meshes to consider, as (names, sizes), on submeshes that have so many devices; none for all.
      own_meshes: the same for submeshes that have their own.
      coarser: of the same program in fewer microbatches, whose estimates bound these; None for none.
      check: called before what can take long; raises `OutOfTime` where there is no time for it.
      alone: whether each range is to be the only stage of its plan (`StageProblem`).
      most_layers: of a stage: how many a given number of stages leaves for one; None for all.
      gap: relative, to which ranges are solved.
      left_seconds: of the time limit.

    Attributes:
      left_open: seconds of a step that those ways to run ranges take at least for which there was no time.
    """

    def __init__(
        self,
        program: StagedProgram,
        *,
        parameters: Sequence[ParameterInfo],
        submeshes: Submeshes,
        constraints: Constraints,
        remat: str | None,
        meshes: Sequence[WantedMesh] = (),
        own_meshes: Mapping[Submesh, Sequence[WantedMesh]] | None = None,
        coarser: StageCosts | None = None,
        check: Callable[[], None] = lambda: None,
        alone: bool = False,
        most_layers: int | None = None,
        gap: float = RANGE_GAP,
        left_seconds: Callable[[], float] = lambda: inf,
    ) -> None:
        self.program = program
        self.submeshes = submeshes
        self._is_free = remat is None  # to compute as much again as is best

        kinds = coarser.solver.kind_of if coarser is not None else Kinds(submeshes, meshes, own_meshes)

        def solver(of: StagedProgram) -> StageSolver:
            return StageSolver(
                of, parameters=parameters, submeshes=submeshes, constraints=constraints, kinds=kinds,
                alone=alone, gap=gap, left_seconds=left_seconds,
            )  # fmt: skip

        parts = in_parts(program)
        self.solver = solver(program)
        of_parts = self.solver if parts is program else solver(parts)
        bounds = coarser.estimates if coarser is not None else None
        self.estimates = StageEstimates(program, of_parts, remat, bounds, check, most_layers)
        self.check, self._left_seconds, self.left_open = check, left_seconds, inf
        self._reserve = MemoryReserve()
        self._limits: dict[tuple[int, bool, bool], float] = {}
        self._layer_numbers: dict[tuple[int, int], tuple[int, ...]] = {}
        self._solved_layers: set[tuple[int, ...]] = set()
        self._solved: dict[tuple[int, int], dict[int, tuple[Option, ...]]] = {}
        self._ways: dict[tuple[int, int, int], Sequence[Option]] = {}
        self._within: dict[tuple[int, int, int, float], Option | None] = {}
        self._around: dict[tuple[int, int, int, float, int], tuple[Option, ...]] = {}
        self._estimated: dict[tuple[int, int, int, int], tuple[Option, ...]] = {}

    @property
    def solves(self) -> int:
        """Problems solved so far."""
        parts = self.estimates.solver
        return self.solver.solves + (parts.solves if parts is not self.solver else 0)

    # What the stage search asks

    def has_layouts(self, submesh: Submesh) -> bool:
        """Whether any part of the program can be laid out on a submesh as is asked, whatever the memory."""
        return bool(np.isfinite(self.least(submesh)[0]).any())

    def least_bytes(self, submesh: Submesh) -> float:
        """A lower bound on the bytes of a device that all layers hold as one stage, with one microbatch in flight."""
        return self.estimates.least_bytes(self.solver.kind_of[submesh])

    def options(self, first: int, last: int, submesh: Submesh, in_flight: int) -> Sequence[Option]:
        """Ways to run the layers `first` to before `last`; solved ones if there are any, else estimates."""
        kind = self.solver.kind_of[submesh]
        known = self._known(first, last, kind)
        if in_flight in known:
            return known[in_flight]
        key = (first, last, kind, in_flight)
        if key not in self._estimated:
            self._estimated[key] = self.estimates.estimate(first, last, kind, in_flight)
        return self._estimated[key]

    def easy(self) -> StageCosts:
        """A view without estimates of ranges whose fastest layouts do not fit: it shares solutions and what is known of
        parts, and has tables of estimates of its own."""
        view = copy(self)
        view.estimates, view._estimated = self.estimates.easy(), {}
        return view

    def shared_options(self, share: float) -> Callable[[int, int, Submesh, int], Sequence[Option]]:
        """As `options`, for microbatches of this share of the program's: too low by what smaller microbatches lose."""
        known: dict[tuple[int, int, int, int], Sequence[Option]] = {}

        def options(first: int, last: int, submesh: Submesh, in_flight: int) -> Sequence[Option]:
            key = first, last, self.solver.kind_of[submesh], in_flight
            if key not in known:
                known[key] = self.estimates.estimate(*key, share)
            return known[key]

        return options

    def least(self, submesh: Submesh, share: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a microbatch of this share, both passes and forward, that every range takes at least on a submesh,
        each `[layers + 1, layers + 1]`."""
        both, forward = self.estimates.least(self.solver.kind_of[submesh])
        return share * both, share * forward

    def fastest(self, submesh: Submesh, in_flight: Sequence[int], share: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """As `least`, of what fits memory with so many microbatches in flight: `[in flight, layers + 1, layers +
        1]`."""
        return self.estimates.fastest(self.solver.kind_of[submesh], in_flight, share)

    def shared(
        self, cuts: np.ndarray, in_flight: np.ndarray, ranks: int, submesh: Submesh, share: float,
        most_seconds: float = inf,
    ) -> np.ndarray:  # fmt: skip
        """Lower bounds on the seconds of ranks that share stages out in turn (`StageEstimates.shared`), the first on
        this submesh, the others on such as cost the same."""
        return self.estimates.shared(cuts, in_flight, ranks, self.solver.kind_of[submesh], share, most_seconds)

    def focus(self, most_seconds: Mapping[Submesh, np.ndarray]) -> None:
        """From now on only ranges are of interest that take no longer on a submesh, in one microbatch; see
        `inter.bounds.most_seconds`."""
        kinds: dict[int, np.ndarray] = {}
        for submesh, most in most_seconds.items():
            kind = self.solver.kind_of[submesh]
            kinds[kind] = np.maximum(kinds[kind], most) if kind in kinds else most
        if self.estimates.focus(kinds):
            self._estimated.clear()

    def reserve(self, reserve: MemoryReserve) -> None:
        """From now on so many bytes of a device may not be counted."""
        if self._reserve != reserve:
            self._reserve, self.left_open = reserve, inf
            self.estimates.reserve(reserve)
            self._solved.clear()
            self._limits.clear()
            self.forget_estimates()

    @property
    def reserved(self) -> MemoryReserve:
        """What may not be counted."""
        return self._reserve

    def is_solved(self, first: int, last: int, submesh: Submesh, in_flight: int) -> bool:
        """Whether the options of a range are those of solutions."""
        return in_flight in self._known(first, last, self.solver.kind_of[submesh])

    def _known(self, first: int, last: int, kind: int) -> Mapping[int, tuple[Option, ...]]:
        """The solutions of a range by the microbatches in flight."""
        # What is made of layers unlike those of all solved ranges is not looked at any further.
        if self._made_of(first, last) not in self._solved_layers:
            return {}
        return self._solved.get((self.solver.number(first, last), kind), {})

    def _made_of(self, first: int, last: int) -> tuple[int, ...]:
        if (first, last) not in self._layer_numbers:
            numbers = tuple(self.solver.number(layer, layer + 1) for layer in range(first, last))
            self._layer_numbers[first, last] = numbers
        return self._layer_numbers[first, last]

    def limit_bytes(self, submesh: Submesh, last: bool, again: bool = True) -> float:
        """Bytes that may be counted on a device of a submesh, by whether the stage on it has the last layer, and
        computes anything again."""
        key = self.solver.kind_of[submesh], last, again
        if key not in self._limits:
            usable = self.solver.kind_of.devices[key[0]].usable_memory_bytes
            self._limits[key] = self._reserve.limit(usable, last=last, again=again)
        return self._limits[key]

    def limit_of(self, option: Option, last: int, submesh: Submesh) -> float:
        """Bytes that may be counted on a device with a solved range that ends before the layer `last`."""
        return self.limit_bytes(submesh, last == len(self.program.layers), bool(option.tag.segments))

    def _limit_of(self, first: int, last: int, submesh: Submesh, again: bool) -> float:
        """Of a range of layers: one that has nothing to rematerialise keeps everything, whatever is asked of it."""
        again = again and bool(self.solver.segments(first, last))
        return self.limit_bytes(submesh, last == len(self.program.layers), again)

    def forget_estimates(self) -> None:
        """Estimate every range again, whatever it takes."""
        self.estimates.forget()
        self._estimated.clear()

    def release(self) -> None:
        """Free what solving ranges and parts has prepared, where few more will be solved."""
        self.solver.release()
        self.estimates.solver.release(problems=self.estimates.solver is not self.solver)

    def crossings(self) -> tuple[Crossing, ...]:
        """What layers share: values, those with the same producer and readers together, and parameters."""
        graph, cutter, layers = self.program.graph, self.program.cutter, self.program.layers
        layer_of = [number for number, (first, last) in enumerate(layers) for _ in range(first, last)]
        values: dict[tuple[int, ...], list[float]] = {}
        for value, equations in cutter.read_at.items():
            if not cutter.crosses(value):
                continue
            made = layer_of[cutter.made_at[value]]
            readers = sorted({layer_of[e] for e in equations} - {made})
            if readers:
                sums = values.setdefault((made, *readers), [0.0, 0.0])
                sums[0] += graph.values[value].bytes
                sums[1] += graph.values[value].bytes if graph.values[value].differentiated else 0.0
        held: dict[tuple[int, ...], float] = {}
        for position in graph.parameters:
            value = graph.inputs[position]
            equations = {e for e in cutter.read_at.get(value, ()) if e not in self.program.rows}
            holders = tuple(sorted({layer_of[e] for e in equations}))
            if len(holders) > 1:
                held[holders] = held.get(holders, 0.0) + graph.values[value].bytes
        return (
            *(Crossing(layers=k, forward_bytes=f, backward_bytes=b) for k, (f, b) in sorted(values.items())),
            *(Crossing(layers=k, once_bytes=size) for k, size in sorted(held.items())),
        )

    @cached_property
    def loose_ends(self) -> frozenset[int]:
        """As of `inter.problem.loose_ends`."""
        return loose_ends(self.crossings(), len(self.program.layers))

    # Solutions

    def solve(self, first: int, last: int, submesh: Submesh, in_flight: int) -> Sequence[Option]:
        """Solve a range, and have `options` say so from now on."""
        kind = self.solver.kind_of[submesh]
        self._solved_layers.add(self._made_of(first, last))
        known = self._solved.setdefault((self.solver.number(first, last), kind), {})
        if in_flight in known:
            return known[in_flight]
        limit = partial(self._limit_of, first, last, submesh)
        found = self._solved_ways(first, last, kind, in_flight, limit)
        known[in_flight] = best_of(found)
        self._ways[self.solver.number(first, last), kind, in_flight] = found
        return known[in_flight]

    def solved_ways(self, first: int, last: int, submesh: Submesh, in_flight: int) -> Sequence[Option]:
        """All solutions that `solve` has found for a range, also those that others dominate."""
        return self._ways.get((self.solver.number(first, last), self.solver.kind_of[submesh], in_flight), ())

    def _solved_ways(
        self, first: int, last: int, kind: int, in_flight: int, limit: Callable[[bool], float], *, shared: bool = False
    ) -> list[Option]:
        """The fastest way to run a range on each logical mesh that may have the fastest of all, in so many bytes of a
        device by rematerialisation. It is solved to the end on those alone that are not bound to be slower; the
        others are left out."""
        tried: list[tuple[float, Place, int]] = []
        found: list[Option] = []
        best = inf
        # Whatever memory there is: estimates of what fits bound nothing for certain.
        least_seconds = self.program.microbatches * float(self.estimates.least(kind)[0][first, last])
        ways = self.estimates.ranked(first, last, kind, in_flight, all_ways=shared)
        count = len(ways)
        if not shared:
            # A range may hold more than its parts; where nothing fits for that, what holds less is looked at too.
            others = self.estimates.ranked(first, last, kind, in_flight, all_ways=True)
            ways += [one for one in others if one not in ways]
        for position, (weight, number, again) in enumerate(ways):
            if weight >= best or (found and position >= count):
                break
            if found and self._left_seconds() < 0:
                self.left_open = min(self.left_open, least_seconds)
                break
            place = Place(first, last, kind, number)
            if (one := self._loosely(place, again, in_flight, limit(again > 0), best)) is not None:
                stage, remat = one
                found.append(option_of(stage))
                seconds = self.estimates.step_seconds(found[-1])
                tried.append((stage.certain_share * seconds, place, remat))
                best = min(best, seconds)
            elif self.solver.left_open:
                self.left_open = min(self.left_open, least_seconds)
        solved: list[Option] = []
        for number, (least, place, remat) in sorted(enumerate(tried), key=lambda one: one[1][0]):
            option, enough = found[number], (1 - self.solver.gap) * best
            late = self._left_seconds() < 0
            if option.tag.certain_share < 1 - self.solver.gap and least < enough and not late:
                # A way that is bound to be slower than another one need be bounded no closer.
                stage = self.solver.within(place, remat, in_flight, limit(remat > 0), enough_seconds=enough)
                if stage is not None:
                    option = option_of(better_of(stage, option.tag))
                seconds = self.estimates.step_seconds(option)
                best, least = min(best, seconds), option.tag.certain_share * seconds
            if option.tag.certain_share < 1 - self.solver.gap and least >= enough:
                continue  # what is uncertain is offered to no plan
            solved.append(option)
        return solved

    def _loosely(
        self, place: Place, again: float, in_flight: int, limit: float, best: float
    ) -> tuple[SolvedStage, int] | None:
        """The best solution in so many bytes of a device that forests find, and how it is rematerialised: as a ladder
        is so far up. Where that is neither nothing nor all, more and less is tried too, as long as that may be faster
        than `best` seconds of a step."""
        ladder = self.solver.ladder(place.first, place.last)
        at = ladder.number_at(again)
        if again not in (0.0, MIDDLE, 1.0) and at in (0, ladder.top):
            return None  # its parts have more segments than the range, or more rungs
        found: dict[int, SolvedStage | None] = {}

        def seconds(remat: int) -> float:
            if remat not in found:
                found[remat] = self.solver.within(place, remat, in_flight, limit, loosely=True)
            stage = found[remat]
            return inf if stage is None else self.estimates.step_seconds(option_of(stage))

        step = _STEP if self._is_free and 0 < again < 1 and ladder.top > 1 else 0.0
        while step and len(found) < _TRIES:
            # What does not fit may do so with more; what is much slower than another way is not looked into.
            here = seconds(at)
            if here > _MUCH * best and isfinite(here):
                break
            more = min(max(ladder.number_at(ladder.share_of(at) + step), at + 1), ladder.top - 1)
            less = max(min(ladder.number_at(ladder.share_of(at) - step), at - 1), 1)
            near = [one for one in (more, less) if one > at or (one < at and isfinite(here))]
            better = next((one for one in near if seconds(one) < here), None)
            if better is not None:
                at = better
            elif isfinite(here) and max(more - at, at - less) > 1:
                step /= 2
            elif isfinite(here) or not near:
                break
            else:
                at, step = more, 2 * step
        at = min(found, key=seconds, default=at)
        return (stage, at) if isfinite(seconds(at)) and (stage := found[at]) is not None else None

    def unsolved(self, problem: InterOpProblem, stages: Sequence[PlacedStage]) -> list[tuple[PlacedStage, int]]:
        """Of these stages those that are not solved, with the microbatches that are in flight at their places."""
        placed = [(stage, problem.in_flight(place)) for place, stage in enumerate(reversed(stages), start=1)]
        return [(s, count) for s, count in placed if not self.is_solved(s.first, s.last, s.submesh, count)]

    def solve_all(self, problem: InterOpProblem, stages: Sequence[PlacedStage]) -> int:
        """Solve what is not; how many there were.

        Raises:
          OutOfTime: if it is late.
        """
        left = self.unsolved(problem, stages)
        for stage, in_flight in left:
            self.check()
            self.solve(stage.first, stage.last, stage.submesh, in_flight)
        return len(left)

    def solve_within(
        self, first: int, last: int, submesh: Submesh, in_flight: int, limit_bytes: float
    ) -> Option | None:
        """The fastest way to run a range in so much of a device's memory; None if there is none."""
        kind = self.solver.kind_of[submesh]
        key = self.solver.number(first, last), kind, in_flight, limit_bytes
        if key not in self._within:
            found = self._solved_ways(first, last, kind, in_flight, lambda again: limit_bytes, shared=True)
            best = min(found, key=self.estimates.step_seconds, default=None)
            self._within[key] = best
        return self._within[key]

    def around(
        self, first: int, last: int, submesh: Submesh, in_flight: int, limit_bytes: float, stages: int
    ) -> Sequence[Option]:
        """Ways to run a range in about its share of the memory of a device with so many stages: one of them may have
        what others leave."""
        kind = self.solver.kind_of[submesh]
        key = self.solver.number(first, last), kind, in_flight, limit_bytes, stages
        if key not in self._around:
            found: list[Option] = []
            best = inf
            for weight, number, again in self.estimates.ranked(first, last, kind, in_flight, all_ways=True):
                if weight >= best:
                    break
                place = Place(first, last, kind, number)
                remat = self.solver.ladder(first, last).number_at(again)
                for stage in self.solver.around(place, remat, in_flight, limit_bytes, stages):
                    found.append(option_of(stage))
                    if stages * stage.own_bytes(in_flight) + stage.seconds.workspace_bytes <= limit_bytes:
                        best = min(best, self.estimates.step_seconds(found[-1]))
            self._around[key] = tuple(found)
        return self._around[key]

    def certified(self, option: Option, first: int, last: int, submesh: Submesh, in_flight: int) -> Option:
        """A solution with a lower bound of the seconds that any layouts take in the bytes that it holds, where there is
        time for it.

        Args:
          option: the solution.
          first: of its layers.
          last: one past the last of them.
          submesh: where it runs.
          in_flight: microbatches.
        """
        stage, kind = option.tag, self.solver.kind_of[submesh]
        if stage.certain_share >= 1 - self.solver.gap or self._left_seconds() < 0:
            return option
        place = Place(first, last, kind, self.solver.meshes[kind].index(stage.mesh))
        found = self.solver.within(place, stage.remat, in_flight, stage.held_bytes(in_flight))
        if found is None:
            return option
        least = min(found.chosen.solution.lower_bound / stage.chosen.solution.objective, 1.0)
        return option._replace(tag=stage.certain(max(least, stage.certain_share)))

    def adopted(self, option: Option, first: int, last: int) -> Option | None:
        """A solution of the same range in another program, where scans are cut otherwise, as one of this program; None
        if the range is not the same there."""
        return adopted(option, self.solver, first, last)


def adopted(option: Option, solver: StageSolver, first: int, last: int) -> Option | None:
    """As `StageCosts.adopted`, of the program of a solver."""
    solved = option.tag
    if not isinstance(solved, SolvedStage):
        return None
    cut = solver.cut(first, last)
    if cut.fingerprint != solved.cut.fingerprint:
        return None
    if solved not in solver.adopted:  # of equal ranges one is enough, wherever they are
        segments = solver.ladder_of(cut, first, last).at(solved.remat)
        solver.adopted[solved] = replace(solved, cut=cut, segments=segments)
    return option._replace(tag=solver.adopted[solved])


def option_of(stage: SolvedStage) -> Option:
    """A solved range as the stage search has it."""
    seconds = stage.seconds
    return Option(
        forward_seconds=seconds.forward_seconds,
        backward_seconds=seconds.backward_seconds,
        weight_seconds=seconds.weight_seconds,
        per_step_seconds=seconds.synchronise_seconds + seconds.update_seconds,
        constant_bytes=seconds.constant_bytes + seconds.workspace_bytes,
        workspace_bytes=seconds.workspace_bytes,
        in_flight_bytes=seconds.in_flight_bytes,
        tag=stage,
    )

"""Inter-operator parallelism: which layers on which submesh, as numbers.

**The problem.** Layers 0..L-1 are cut into stages, ranges of layers in order; stage i gets the submesh that follows the
one of stage i-1, and all devices are used. A stage on a submesh has *options* (logical mesh, rematerialisation), each
with seconds forward f and backward b of a microbatch, t of both, seconds s once a step, and bytes. With c and c' the
seconds of the transfers between stages i and i+1 and back, h those of the slowest edge of stage i one way, and B
microbatches, a stage is busy for M_i from its first forward to its last backward. With a whole backward that is at
least B t, B h and t + c + c' + M_(i+1), since the stages after it wait for its first forward, and it for their last
backward.

M_i is no less than what the table of orders in docs/stages.md adds: 1F1B waits where it has no more forwards to run
ahead; *adaptive* bounds all that run further ahead, and knows no more of them; *zero bubble* puts weight gradients off,
with as many microbatches in flight on every stage as there are stages, whose number must be given. *Eager 1F1B* is
bounded by adaptive: its objective, that of 1F1B with as many forwards ahead as memory has room for, finds plans.

A step ends with the last synchronisation: M_i + s_i after stage i begins, which is f + c of all stages before it. A
stage of which the next reads nothing (`InterOpProblem.loose`) waits for none after it, nor they for it. All objectives
but that of eager 1F1B are never more than the simulated step (tested): they bound what plans take.

Each stage has to hold its constant bytes and, for the microbatches the schedule keeps in flight at its place from
the end, its activations. Values read by several stages, or by one further down (skip connections), are an edge to each
reader; a parameter held by several stages adds the exchange of its gradient between each holder and the next to s.

**The method.** A dynamic program from the last stage to the first, so that the place from the end, which memory
depends on, is known. A state is (first layer, first device); its *labels* are the ways to do what follows, and one
label replaces another only if it is no worse in all that the objective and memory will ever ask of it: stages so far,
R, t, M and the end, and if those stages of both that earlier layers will still send something to are on the same
submeshes. That is exact for any such objective (multi-objective shortest paths: Martins, 1984). A known plan's
objective prunes what cannot become better: two small dynamic programs over the least seconds of each range at each
place say for every (layer, device, place) what the stages before it add at least, and the longest of them. The
same numbers say which labels are the most promising (A*). Brute force over all plans says the same in
tests/property/test_inter_op.py.

Cost: states x submeshes x layers x labels, of which the bounds leave few. Values read by very many stages make labels
incomparable; `beam` bounds the labels of a state, and `Found.lower_bound` says what that may have cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import numpy as np

from .bounds import LeastBefore, positions_of
from .problem import Found, InterOpProblem, Option, PlacedStage
from .submeshes import Submesh

# How many plans beside the best are handed back, to be simulated too. Chosen, not measured.
_OTHERS = 4


class _Label:
    """A way to run all layers from `first` on. Slots, since there are very many."""

    __slots__ = ("after", "apart", "busy", "chain_seconds", "end", "round_trip", "stage", "stages")

    def __init__(
        self,
        after: _Label | None,
        stage: PlacedStage | None,
        stages: int,
        busy: float,
        round_trip: float,
        chain_seconds: tuple[float, float],
        end: float,
        apart: float,
    ) -> None:
        self.after, self.stage, self.stages = after, stage, stages
        self.busy, self.round_trip, self.chain_seconds, self.end = busy, round_trip, chain_seconds, end
        self.apart = apart  # the end of stages that do not wait for the first, from the start of the step

    def no_worse(self, other: _Label, *, counted: bool) -> bool:
        return (
            (self.stages == other.stages or (self.stages < other.stages and not counted))
            and self.end <= other.end
            and self.apart <= other.apart
            and self.busy <= other.busy
            and self.round_trip <= other.round_trip
            and self.chain_seconds[0] <= other.chain_seconds[0]
            and self.chain_seconds[1] <= other.chain_seconds[1]
        )

    @property
    def seconds(self) -> float:
        """Of a step, where it has all layers."""
        return max(self.end, self.apart)

    def chain(self) -> list[PlacedStage]:
        """Its stages, in program order."""
        found, label = [], self
        while label.stage is not None:
            found.append(label.stage)
            assert label.after is not None
            label = label.after
        return found


_NOTHING = _Label(None, None, 0, 0.0, 0.0, (0.0, 0.0), 0.0, 0.0)


def solve_inter_op(
    problem: InterOpProblem,
    *,
    beam: int = 256,
    upper_bound: float = inf,
    check: Callable[[], None] = lambda: None,
) -> Found | None:
    """The best staged plan, or None if none fits (or none is below `upper_bound`).

    Args:
      problem: the numbers.
      beam: the most labels a state may have; the best by objective are kept.
      upper_bound: seconds; plans that take longer are of no interest.
      check: called now and then; it may raise something, where there is no time left.
    """
    search = _Search(problem, upper_bound, check)
    # A narrow search first: its plan prunes the wide one.
    narrow = search.run(1)
    if beam == 1:
        return narrow
    if narrow is not None:
        search.bound = narrow.seconds * (1 + 1e-12)
    wide = search.run(beam)
    while wide is None and narrow is None and isfinite(search.dropped):
        beam *= 4  # labels of no plan have kept those of all plans out
        wide = search.run(beam)
    if wide is None and narrow is not None:
        return replace(narrow, lower_bound=min(narrow.seconds, search.dropped))
    return wide


class _Search:
    def __init__(self, problem: InterOpProblem, bound: float, check: Callable[[], None]) -> None:
        self.problem, self.bound, self._check = problem, bound, check
        # What plans take at least whose labels there was no room for.
        self.dropped = inf
        self.ending: dict[int, list[Submesh]] = {}
        for submesh in problem.submeshes:
            self.ending.setdefault(submesh.stop, []).append(submesh)
        self._moved: dict[tuple[Submesh, Submesh, float], float] = {}
        # Crossings that reach from before a layer to it or beyond: all that a state's future edges depend on.
        self.open = [
            [n for n, one in enumerate(problem.crossings) if one.layers[0] < i <= one.layers[-1]]
            for i in range(problem.layers + 1)
        ]
        self.most = problem.most_places
        # Of labels with as many stages alone one can replace another: in 1F1B more stages have more in flight.
        self._counted = problem.num_stages is not None or problem.order == "one_f_one_b"
        self._positions = positions_of(problem)
        kinds = {submesh: problem.kind(submesh) for submesh in problem.submeshes}
        alike = {kind: self._by_place(submesh) for kind, submesh in {kinds[one]: one for one in kinds}.items()}
        self._tables = {submesh: alike[kind] for submesh, kind in kinds.items()}
        self.left = self._least_left()
        self._left_lists = [(total.tolist(), periods.tolist()) for total, periods in self.left]  # for single numbers
        self._steps: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def _by_place(self, submesh: Submesh) -> tuple[np.ndarray, np.ndarray]:
        """What each range on a submesh takes at least at each place from the end, and what of it stages after it wait
        for, of a split backward the forward pass alone: each `[place - 1, first, last]`."""
        problem, layers = self.problem, self.problem.layers
        in_flight = [problem.in_flight(place) for place in range(1, self.most + 1)]
        if problem.fastest is not None:
            seconds, forward = problem.fastest(submesh, in_flight)
        elif problem.least is not None:
            seconds, forward = (np.broadcast_to(one, (self.most, *one.shape)) for one in problem.least(submesh))
        else:
            seconds = np.full((self.most, layers + 1, layers + 1), inf)
            forward = seconds.copy()
            for place in range(self.most):
                for first in range(layers):
                    for last in range(first + 1, layers + 1):
                        options = problem.options(first, last, submesh, in_flight[place])
                        fitting = [option for option in options if problem.fits(option, submesh, place + 1)]
                        seconds[place, first, last] = min((option.seconds for option in fitting), default=inf)
                        forward[place, first, last] = min((option.forward_seconds for option in fitting), default=inf)
        return seconds, forward if problem.order == "zero_bubble" else seconds

    def _least_left(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """By places taken, what the layers before a layer on the devices before a position add at least, and what all
        microbatches take on the longest of their stages: each `[layer, position]`."""
        shape = (self.problem.layers + 1, len(self._positions))
        before = LeastBefore(self._positions, self._tables, self.problem.loose)
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for place in range(self.most, -1, -1):
            self._check()
            tables = before.at(place, *found[-1]) if found else (np.full(shape, inf), np.full(shape, inf))
            if self.problem.num_stages in (None, place):
                tables[0][0, 0] = tables[1][0, 0] = 0.0
            found.append(tables)
        times = self.problem.microbatches
        return [(total, times * period) for total, period in reversed(found)]

    def run(self, beam: int) -> Found | None:
        """The best plan with so many labels for each state."""
        problem, self.dropped = self.problem, inf
        states: list[dict[int, dict[Any, list[_Label]]]] = [{} for _ in range(problem.layers + 1)]
        states[problem.layers][problem.devices] = {(): [_NOTHING]}
        for last in range(problem.layers, 0, -1):
            for device in sorted(states[last]):
                labels = [label for group in states[last][device].values() for label in group]
                if len(labels) > beam:
                    labels.sort(key=lambda label: (self._promise(label, last, device), label.stages))
                    self.dropped = min(self.dropped, self._promise(labels[beam], last, device))
                    del labels[beam:]
                for label in labels:
                    self._check()
                    self._extend(states, label, last, device)
            states[last] = {}
        done = [label for group in states[0].get(0, {}).values() for label in group]
        if not done:
            return None
        done.sort(key=lambda label: (label.seconds, label.stages))
        chains = [tuple(label.chain()) for label in done[: _OTHERS + 1]]
        seconds = done[0].seconds
        bound = min(seconds, self.dropped)
        return Found(seconds=seconds, stages=chains[0], lower_bound=bound, others=tuple(chains[1:]))

    def _promise(self, label: _Label, last: int, device: int) -> float:
        """What the best plan with this label takes at least."""
        total, longest = (table[last][self._positions[device]] for table in self._left_lists[label.stages])
        return max(label.busy + total, longest, label.end, label.apart)

    def _extend(self, states: list[dict[int, dict[Any, list[_Label]]]], label: _Label, last: int, device: int) -> None:
        problem, place = self.problem, label.stages + 1
        if place > self.most or device not in self.ending:
            return
        in_flight = problem.in_flight(place)
        total, longest = self._step(device, last, place)
        least = np.maximum(label.busy + total, longest)
        worth = np.isfinite(total) & (least <= self.bound)
        for number, submesh in enumerate(self.ending[device]):
            start = self._positions[submesh.first]
            for first in np.flatnonzero(worth[number]).tolist():
                if (first == 0) != (submesh.first == 0):
                    continue
                alone = first == 0 and place == 1
                total_left, longest_left = (table[first][start] for table in self._left_lists[place])
                edges: tuple[float, float, float, float] | None = None
                for option in problem.options(first, last, submesh, in_flight):
                    if not problem.fits(option, submesh, place):
                        continue
                    if edges is None:
                        edges = self._edges(label, first, last, submesh)
                    stage = PlacedStage(first, last, submesh, option)
                    new = self._extended(label, stage, place, *edges)
                    # What comes after the last backward is not counted against plans of several stages: estimates of
                    # it may be too high.
                    if max(new.busy + total_left, longest_left, new.seconds if alone else 0.0) > self.bound:
                        continue
                    self._offer(states[first].setdefault(submesh.first, {}), new, first)

    def _step(self, device: int, last: int, place: int) -> tuple[np.ndarray, np.ndarray]:
        """For a stage at a place that ends before layer `last` at a device, on each submesh and from each first layer:
        what it and all before it add at least, and what all microbatches take on the longest of them: each `[submesh,
        first]`."""
        key = device, last, place
        if key not in self._steps:
            sums, longest, times = [], [], self.problem.microbatches
            total, longest_left = self.left[place]
            for submesh in self.ending[device]:
                seconds, passage = (table[place - 1, :last, last] for table in self._tables[submesh])
                start = self._positions[submesh.first]
                around = passage + total[:last, start]
                sums.append(np.where(np.isfinite(around), 0.0, inf) if last in self.problem.loose else around)
                longest.append(np.maximum(times * seconds, longest_left[:last, start]))
            self._steps[key] = np.array(sums), np.array(longest)
        return self._steps[key]

    def _extended(
        self, label: _Label, stage: PlacedStage, place: int, there: float, back: float, widest: float, exchange: float
    ) -> _Label:
        """The label with a stage in front, at this place from the end; edges as of `_edges`."""
        order, count, option, after = self.problem.order, self.problem.microbatches, stage.option, label
        if not there and stage.last in self.problem.loose:
            label = _NOTHING
        forward, backward, weights = option.forward_seconds, option.backward_seconds, option.weight_seconds
        work, trip = count * option.seconds, option.seconds + there + back
        round_trip, chain = 0.0, (0.0, 0.0)
        match order:
            case "gpipe":
                one, two = label.chain_seconds
                round_trip = label.round_trip + trip
                chain = max(one, forward, there), max(two, backward, back)
                busy = round_trip + (count - 1) * sum(chain)
            case "zero_bubble":
                trip -= weights
                round_trip = label.round_trip + trip
                most = min(count, self.problem.num_stages or self.most)
                chain = max(work - most * weights, trip + label.chain_seconds[0]), option.seconds - weights
                held_back = self._held_back(option, weights, place, round_trip, trip + label.chain_seconds[1])
                busy = max(work, count * widest, chain[0] + weights, held_back)
            case "adaptive":
                busy = max(work, count * widest, trip + label.busy)
            case "one_f_one_b":
                round_trip = label.round_trip + trip
                chain = 0.0, option.seconds
                held_back = self._held_back(option, 0.0, place, round_trip, trip + label.chain_seconds[1])
                busy = max(work, count * widest, trip + label.busy, held_back)
            case "eager_one_f_one_b":
                round_trip = label.round_trip + trip
                room = self.problem.room(option, stage.submesh, place)
                busy = max(work, count * widest, trip + label.busy, self._held_back(option, 0.0, room, round_trip, 0.0))
        end = max(busy + option.per_step_seconds + exchange, forward + there + label.end)
        apart = after.apart if label is after else after.seconds
        return _Label(after, stage, place, busy, round_trip, chain, end, apart)

    def _held_back(self, option: Option, weights: float, ahead: int, round_trip: float, pair: float) -> float:
        """What a stage is busy for at least where it runs so many forwards ahead of its backwards, or of its input
        gradients.

        Args:
          option: of the stage.
          weights: seconds of the weight gradients that are put off.
          ahead: forwards up to the first backward; the next stage runs one less ahead where `pair` is given.
          round_trip: of a microbatch to the last stage and back, without weight gradients.
          pair: of one to the next stage and back, likewise; 0 for no more than the stage's own seconds.
        """
        count, seconds, way = self.problem.microbatches, option.seconds, option.seconds - weights
        forward, backward, ahead = option.forward_seconds, option.backward_seconds, min(count, ahead)
        # Up to its first backward there are so many forwards to run, and as many backwards after its last forward.
        least = round_trip + count * seconds - min(ahead * forward + backward, forward + ahead * backward)
        if count > ahead:
            # The next forward waits for the first backward, and the last backward a round trip for the last forward.
            # Between them it waits round trips, or for the next stage.
            pairs, odd = divmod(count - 1 - ahead, 2)
            rounds, rest = divmod(count - 1, ahead)
            between = max((count - 1 - ahead) * seconds, pairs * max(pair, 2 * way) + odd * way)
            least = max(least, 2 * round_trip + between, (rounds + 1) * round_trip + rest * way)
        return least + weights

    def _edges(self, label: _Label, first: int, last: int, submesh: Submesh) -> tuple[float, float, float, float]:
        """Seconds to the next stage and back, of the slowest edge one way, and of the exchange of gradients."""
        problem = self.problem
        forward = backward = widest = exchange = 0.0
        crossings = [problem.crossings[n] for n in self.open[last]]
        pending = [one for one in crossings if one.once_bytes > 0 and any(first <= n < last for n in one.layers)]
        made = [one for one in crossings if one.once_bytes == 0 and first <= one.layers[0] < last]
        following, neighbour = label, True
        while following.stage is not None and (pending or made):
            stage = following.stage
            out = back = once = 0.0
            for one in made:
                if any(stage.first <= reader < stage.last for reader in one.layers[1:]):
                    out += one.forward_bytes
                    back += one.backward_bytes
            for one in list(pending):
                if any(stage.first <= n < stage.last for n in one.layers):
                    pending.remove(one)  # its next holder sums with the ones after it
                    once += one.once_bytes
            forward_here, backward_here = (self._seconds(submesh, stage.submesh, size) for size in (out, back))
            exchange += self._seconds(submesh, stage.submesh, once)
            if neighbour:
                forward, backward = forward_here, backward_here
            widest = max(widest, forward_here, backward_here)
            assert following.after is not None
            following, neighbour = following.after, False
        return forward, backward, widest, exchange

    def _seconds(self, source: Submesh, target: Submesh, size: float) -> float:
        if size <= 0:
            return 0.0
        key = (source, target, size)
        if key not in self._moved:
            self._moved[key] = self.problem.transfer_seconds(source, target, size)
        return self._moved[key]

    def _signature(self, label: _Label, first: int) -> tuple[Any, ...]:
        """Of each stage that earlier layers will send something: where it is, what, and whether it is the next one."""
        waiting = {n: self.problem.crossings[n] for n in self.open[first]}
        found = []
        following, place = label, 0
        while following.stage is not None and waiting:
            stage = following.stage
            reads = tuple(n for n, one in waiting.items() if any(stage.first <= x < stage.last for x in one.layers))
            if reads:
                found.append((place == 0, stage.submesh, reads))
            for n in reads:
                # A parameter's next holder is the one that matters; of a value, every reader up to the last does.
                if waiting[n].once_bytes or waiting[n].layers[-1] < stage.last:
                    del waiting[n]
            assert following.after is not None
            following, place = following.after, place + 1
        return tuple(found)

    def _offer(self, state: dict[Any, list[_Label]], new: _Label, first: int) -> None:
        signature = self._signature(new, first)
        group = state.setdefault(signature, [])
        counted = self._counted
        if any(old.no_worse(new, counted=counted) for old in group):
            return
        group[:] = [old for old in group if not new.no_worse(old, counted=counted)]
        group.append(new)

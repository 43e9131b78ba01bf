"""Inter-operator parallelism: which layers on which submesh, as numbers.

**The problem.** Layers 0..L-1 are cut into stages, ranges of layers in order; stage i gets the submesh that follows the
one of stage i-1, and all devices are used. A stage on a submesh has *options* (logical mesh, rematerialisation), each
with seconds forward f and backward b of a microbatch, seconds s once a step, and bytes. The objective, for B
microbatches, is Alpa's (OSDI '22) with what it leaves out:

    sum_i (f_i + b_i) + sum_i C_i + (B - 1) P + S

* C_i = seconds of the transfers between stages i and i+1, both ways.
* P, the period, by schedule. 1F1B waits for its transfers: max_i (f_i + b_i + C_i). Eager 1F1B hides them: the largest
  of all f_i + b_i and of the seconds of any one edge, one way. GPipe: max(f, c) + max(b, c'). Zero bubble (ZB-H1) fills
  the wait for transfers with weight gradients, w_i of b_i: max_i (f_i + b_i + max(0, C_i - w_i)); and of each stage but
  the last only max(f_i, b_i - w_i, f_i + b_i - 2 w_i) stands in the first sum, since weight gradients fill the
  pipeline's ends. As many microbatches are in flight on every stage as there are stages, whose number must be given.
* S = max_i (s_i - sum_(k<i) (b_k + c'_k)): what of the gradient synchronisation and update is left after the last
  backward of the first stage; that of later stages is done while earlier ones still work. c' are cotangents' transfers.
  In zero bubble all stages end together, and S is the largest s_i.

and each stage has to hold its constant bytes and, for the microbatches the schedule keeps in flight at its place from
the end, its activations. Values read by several stages, or by one further down (skip connections), are an edge to each
reader; a parameter held by several stages adds the exchange of its gradient between each holder and the next to s.

**The method.** A dynamic program from the last stage to the first, so that the place from the end, which memory
depends on, is known. A state is (first layer, first device); its *labels* are the ways to do what follows, and one
label replaces another only if it is no worse in all that the objective and memory will ever ask of it: stages so far,
sum, period, and S, and if those stages of both that earlier layers will still send something to are on the same
submeshes. That is exact for any such objective (multi-objective shortest paths: Martins, 1984). A known plan's
objective prunes what cannot become better: two small dynamic programs over the least seconds of each range at each
place say for every (layer, device, place) what the stages before it add at least to the sum and to the period. The
same numbers say which labels are the most promising (A*). Brute force over all plans says the same in
tests/property/test_inter_op.py.

Cost: states x submeshes x layers x labels, of which the bounds leave few. Values read by very many stages make labels
incomparable; `beam` bounds the labels of a state, and `Found.lower_bound` says what that may have cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from .bounds import LeastBefore, positions_of
from .problem import Found, InterOpProblem, Option, PlacedStage
from .submeshes import Submesh

# How many plans beside the best are handed back.
_OTHERS = 4


class _Label:
    """A way to run all layers from `first` on. Slots, since there are very many."""

    __slots__ = ("after", "late", "periods", "seconds", "stage", "stages")

    def __init__(
        self,
        after: _Label | None,
        stage: PlacedStage | None,
        stages: int,
        seconds: float,
        periods: tuple[float, float],
        late: float,
    ) -> None:
        self.after, self.stage, self.stages = after, stage, stages
        self.seconds, self.periods, self.late = seconds, periods, late

    def no_worse(self, other: _Label, *, counted: bool) -> bool:
        return (
            (self.stages == other.stages or (self.stages < other.stages and not counted))
            and self.seconds <= other.seconds
            and self.periods[0] <= other.periods[0]
            and self.periods[1] <= other.periods[1]
            and self.late <= other.late
        )

    def chain(self) -> list[PlacedStage]:
        """Its stages, in program order."""
        found, label = [], self
        while label.stage is not None:
            found.append(label.stage)
            assert label.after is not None
            label = label.after
        return found


def solve_inter_op(
    problem: InterOpProblem,
    *,
    beam: int = 256,
    upper_bound: float = inf,
    alone_bound: float = inf,
    check: Callable[[], None] = lambda: None,
) -> Found | None:
    """The best staged plan, or None if none fits (or none is below `upper_bound`).

    Args:
      problem: the numbers.
      beam: the most labels a state may have; the best by objective are kept.
      upper_bound: seconds; plans that take longer are of no interest.
      alone_bound: the same of plans of one stage; what is proven is of the others.
      check: called now and then; it may raise something, where there is no time left.
    """
    search = _Search(problem, upper_bound, alone_bound, check)
    # A narrow search first: its plan prunes the wide one.
    narrow = search.run(1)
    if beam == 1:
        return narrow
    if narrow is not None:
        search.bound = narrow.seconds * (1 + 1e-12)
    wide = search.run(beam)
    if wide is None and narrow is not None:
        return replace(narrow, lower_bound=min(narrow.seconds, search.dropped))
    return wide


class _Search:
    def __init__(self, problem: InterOpProblem, bound: float, alone: float, check: Callable[[], None]) -> None:
        self.problem, self.bound, self.alone, self._check = problem, bound, alone, check
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
        self._positions = positions_of(problem)
        kinds = {submesh: problem.kind(submesh) for submesh in problem.submeshes}
        alike = {kind: self._by_place(submesh) for kind, submesh in {kinds[one]: one for one in kinds}.items()}
        self._tables = {submesh: alike[kind] for submesh, kind in kinds.items()}
        self.left = self._least_left()
        self._left_lists = [(total.tolist(), periods.tolist()) for total, periods in self.left]  # for single numbers
        self._steps: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def _by_place(self, submesh: Submesh) -> tuple[np.ndarray, np.ndarray]:
        """What each range on a submesh takes at least at each place from the end, and what it adds to the sum: each
        `[place - 1, first, last]`."""
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
        """By places taken, what the layers before a layer on the devices before a position add at least to the sum, and
        with their period to the objective: each `[layer, position]`."""
        shape = (self.problem.layers + 1, len(self._positions))
        before = LeastBefore(self._positions, self._tables)
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for place in range(self.most, -1, -1):
            self._check()
            tables = before.at(place, *found[-1]) if found else (np.full(shape, inf), np.full(shape, inf))
            if self.problem.num_stages in (None, place):
                tables[0][0, 0] = tables[1][0, 0] = 0.0
            found.append(tables)
        return [(total, self._in_all(period)) for total, period in reversed(found)]

    def _in_all(self, period: np.ndarray) -> np.ndarray:
        """What a period adds to the objective; of a single microbatch nothing, however long it is."""
        return (self.problem.microbatches - 1) * period if self.problem.microbatches > 1 else np.zeros_like(period)

    def run(self, beam: int) -> Found | None:
        """The best plan with so many labels for each state."""
        problem, self.dropped = self.problem, inf
        states: list[dict[int, dict[Any, list[_Label]]]] = [{} for _ in range(problem.layers + 1)]
        end = _Label(None, None, 0, 0.0, (0.0, 0.0), 0.0)
        states[problem.layers][problem.devices] = {(): [end]}
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
        done.sort(key=lambda label: (self._objective(label), label.stages))
        chains = [tuple(label.chain()) for label in done[: _OTHERS + 1]]
        seconds = self._objective(done[0])
        bound = min(seconds, self.dropped)
        return Found(seconds=seconds, stages=chains[0], lower_bound=bound, others=tuple(chains[1:]))

    def _objective(self, label: _Label) -> float:
        return label.seconds + (self.problem.microbatches - 1) * sum(label.periods) + label.late

    def _promise(self, label: _Label, last: int, device: int) -> float:
        """What the best plan with this label takes at least."""
        total, periods = (table[last][self._positions[device]] for table in self._left_lists[label.stages])
        own = (self.problem.microbatches - 1) * sum(label.periods)
        return label.seconds + total + max(own, periods) + label.late

    def _extend(self, states: list[dict[int, dict[Any, list[_Label]]]], label: _Label, last: int, device: int) -> None:
        problem, place = self.problem, label.stages + 1
        if place > self.most or device not in self.ending:
            return
        in_flight, rest = problem.in_flight(place), problem.microbatches - 1
        total, periods = self._step(device, last, place)
        least = label.seconds + total + np.maximum(periods, rest * sum(label.periods))
        worth = np.isfinite(total) & (least <= self.bound)
        for number, submesh in enumerate(self.ending[device]):
            start = self._positions[submesh.first]
            for first in np.flatnonzero(worth[number]).tolist():
                if (first == 0) != (submesh.first == 0):
                    continue
                alone = first == 0 and place == 1
                bound = min(self.bound, self.alone) if alone else self.bound
                total_left, periods_left = (table[first][start] for table in self._left_lists[place])
                edges: tuple[float, float, float, float] | None = None
                for option in problem.options(first, last, submesh, in_flight):
                    if not problem.fits(option, submesh, place):
                        continue
                    if edges is None:
                        edges = self._edges(label, first, last, submesh)
                    forward, backward, widest, exchange = edges
                    seconds = label.seconds + self._passage(option, place) + forward + backward
                    periods = self._periods(label, option, forward, backward, widest)
                    done = 0.0 if problem.order == "zero_bubble" else option.backward_seconds + backward
                    late = max(0.0, option.once_seconds + exchange, label.late - done)
                    # What is late is not counted against plans of several stages: estimates of them may be too high.
                    after = late if alone else 0.0
                    if seconds + total_left + max(rest * sum(periods), periods_left) + after > bound:
                        continue
                    new = _Label(label, PlacedStage(first, last, submesh, option), place, seconds, periods, late)
                    self._offer(states[first].setdefault(submesh.first, {}), new, first)

    def _step(self, device: int, last: int, place: int) -> tuple[np.ndarray, np.ndarray]:
        """For a stage at a place that ends before layer `last` at a device, on each submesh and from each first layer:
        what it and all before it add at least to the sum, and with their period to the objective: each `[submesh,
        first]`."""
        key = device, last, place
        if key not in self._steps:
            sums, longest = [], []
            total, periods = self.left[place]
            for submesh in self.ending[device]:
                seconds, passage = (table[place - 1, :last, last] for table in self._tables[submesh])
                start = self._positions[submesh.first]
                sums.append(passage + total[:last, start])
                longest.append(np.maximum(self._in_all(seconds), periods[:last, start]))
            self._steps[key] = np.array(sums), np.array(longest)
        return self._steps[key]

    def _passage(self, option: Option, place: int) -> float:
        """What a stage at this place from the end adds to the first sum."""
        return option.passage_seconds if self.problem.order == "zero_bubble" and place > 1 else option.seconds

    def _periods(
        self, label: _Label, option: Option, forward: float, backward: float, widest: float
    ) -> tuple[float, float]:
        """The period with this stage in front; GPipe's in its two parts."""
        one, two = label.periods
        match self.problem.order:
            case "one_f_one_b":
                return max(one, option.seconds + forward + backward, widest), two
            case "eager_one_f_one_b":
                return max(one, option.seconds, widest), two
            case "zero_bubble":
                exposed = max(0.0, forward + backward - option.weight_seconds)
                return max(one, option.seconds + exposed, widest), two
            case "gpipe":
                return max(one, option.forward_seconds, forward), max(two, option.backward_seconds, backward)

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
        counted = self.problem.num_stages is not None
        if any(old.no_worse(new, counted=counted) for old in group):
            return
        group[:] = [old for old in group if not new.no_worse(old, counted=counted)]
        group.append(new)

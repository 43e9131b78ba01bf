"""What a range of layers will cost, estimated from its parts without solving it.

Each part (a layer, a repeated block inside one, or a piece of a scan) is solved by itself on each logical mesh, and the
seconds are added up. That leaves out only the conversions between parts that want different layouts, so that an
estimate is nearly always too low, by a few percent where parts are alike. Equal parts are solved once.

Memory: where the fastest layouts of all parts fit together, that is the estimate. Where they do not, each part is
solved again with a price on memory, the same for all, and the estimate lies between the last price at which they do not
fit and the first at which they do: what one multiplier for the whole range would find (Everett, 1963). As few
segments are computed again as fit, at the price at which that takes the fewest seconds. Meshes whose
fastest layouts, whatever their memory, are slower than what fits on another are left, and so are those on which no
range can be a part of a plan that is fast enough (`focus`).

All ranges of layers that may be of interest are looked at together, for all numbers of microbatches in flight: sums
over ranges are differences of running sums, so a table of them is a few operations on small arrays once the parts are
solved. Tables are held of the ranges that fit alone, a tenth of all pairs of layers where a plan is known.

Known limits: between equal parts that would rather leave their sums partial an estimate is too high, since every part
alone has to finish them; what a range rematerialises in one segment, its parts rematerialise in several and keep more;
at a price of memory a part has the bytes of what a forest finds there, which may be more than those of the best by what
`part_rows` leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from math import ceil, inf, log

import numpy as np

from ...program.ladder import ALL, MIDDLE, NONE, SELECTIVE
from ...program.staged import StagedProgram
from ..inter.problem import Option, best_of
from .range_table import (
    AGAIN,
    BACKWARD,
    CONSTANT,
    FIELDS,
    FORWARD,
    KEPT,
    ONCE,
    PARTS_ALONE,
    WORKSPACE,
    Ranges,
    RangeTable,
    mixed,
    option_of,
)
from .reserve import MemoryReserve
from .shared_memory import PricedStages, between, least_seconds
from .solver import StageSolver
from .summed_parts import PRICES, SummedParts

# Below this share of the memory limit rematerialisation is not tried. Chosen, not measured.
_EASY = 0.5

# Of a whole program some segments are tried where all of them would need no more than this share of the memory. Chosen,
# not measured.
_NEAR = 1.25

# Some segments are computed again where all or none take this much longer than what would do without memory.
_WORTH = 1.02

# How far a range is between nothing and all, as of `Ladder.number_at`.
_SHARES = {NONE: 0.0, SELECTIVE: MIDDLE, ALL: 1.0}

# In place of one of these: as far up as fits, between nothing and this one. The fewest bytes are those of this one.
_MIXED, _MIXED_SELECTIVE = -ALL, -SELECTIVE

# What such a way is between. Seconds and bytes there are taken to lie on a line; what a ladder has there is near it.
_LEGS = ((NONE, SELECTIVE), (SELECTIVE, ALL))


class StageEstimates:
    """Estimates of ranges of layers of one program.

    Args:
      program: in layers.
      solver: of a program of the same equations in `parts`.
      remat: "none", "selective", "layer", or None to choose for each range.
      coarser: of the same layers in fewer microbatches, or None. Cutting a microbatch makes no work less: what they
        take is a bound that saves looking at most logical meshes.
      check: as of `PartRows`.
      most_layers: of a stage; None for no bound.
    """

    def __init__(
        self, program: StagedProgram, solver: StageSolver, remat: str | None, coarser: StageEstimates | None = None,
        check: Callable[[], None] = lambda: None, most_layers: int | None = None,
    ) -> None:  # fmt: skip
        self.program = program
        self.solver = solver
        self._check = check
        self._same = 1 + solver.gap  # ways whose seconds differ by less are the same: ranges are solved no closer
        self._wishes = {None: [NONE, SELECTIVE, ALL], "none": [NONE], "selective": [SELECTIVE], "layer": [ALL]}[remat]
        starts = {start: number for number, (start, _) in enumerate(solver.program.layers)}
        # Of each layer the number of its first part, and the number of all parts.
        self._starts = np.array([*(starts[start] for start, _ in program.layers), len(solver.program.layers)])
        self._most_layers = len(program.layers) if most_layers is None else most_layers
        same = coarser is not None and np.array_equal(coarser._starts, self._starts)
        self._coarser = coarser if same else None
        self._sums = SummedParts(solver, self._starts, program.microbatches, check)
        self._reserve, self._prices = MemoryReserve(), PRICES
        self._most: Mapping[int, np.ndarray] = {}
        self._free: dict[int, list[tuple[float, int, np.ndarray]]] = {}
        self._fastest: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._tables: dict[tuple[int, tuple[int, ...], float], RangeTable] = {}
        self._places: dict[tuple[int, int, float], tuple[RangeTable, int]] = {}
        self._layer_sums: dict[tuple[int, int, int, int, float], np.ndarray] = {}

    def reserve(self, reserve: MemoryReserve) -> None:
        """From now on so many bytes of a device may not be counted; prices stay what they are."""
        self._reserve = reserve
        self._clear()

    def easy(self) -> StageEstimates:
        """A view without ranges whose fastest layouts do not fit, with tables of its own."""
        view = copy(self)
        view._prices, view._tables, view._places = (), {}, {}
        return view

    def focus(self, most_seconds: Mapping[int, np.ndarray]) -> bool:
        """From now on only ranges are of interest that take, in one microbatch, no longer than this.

        Args:
          most_seconds: for a kind of submesh, `[layers + 1, layers + 1]`; kinds that are not there have no bound.

        Returns:
          Whether some were of no interest before that are now: all estimates are then forgotten.
        """
        before, self._most = self._most, most_seconds
        wider = any(kind not in most_seconds or (most_seconds[kind] > most).any() for kind, most in before.items())
        if wider:
            self._clear()
        return wider

    def forget(self) -> None:
        """Estimate every range again, whatever it takes."""
        self._most = {}
        self._clear()

    def _clear(self) -> None:
        self._tables.clear()
        self._places.clear()

    def least(self, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a microbatch, both passes and forward, that no way to run a range of layers on submeshes of one
        kind is below, each `[layers + 1, layers + 1]` by first layer and one past the last; infinite for no range."""
        if self._coarser is not None:
            share = self._coarser.program.microbatches / self.program.microbatches
            both, forward = self._coarser.least(kind)
            return share * both, share * forward
        if kind not in self._fastest:
            none = np.full((1, 3, len(self._starts), len(self._starts)), np.inf)
            both, forward, _ = np.concatenate([none, *(one[None] for _, _, one in self._freely(kind))]).min(axis=0)
            self._fastest[kind] = PARTS_ALONE * both, PARTS_ALONE * forward
        return self._fastest[kind]

    def least_bytes(self, kind: int) -> float:
        """Bytes on a device of a kind of submesh that no layouts of all layers are below, with one microbatch."""
        whole, meshes = np.array([[0], [len(self._starts) - 1]]), range(len(self.solver.meshes[kind]))
        return min(self._least(kind, n, remat, whole).sum() for n in meshes for remat in self._wishes)

    def _freely(self, kind: int) -> list[tuple[float, int, np.ndarray]]:
        """Of each logical mesh of a kind that has layouts, the fastest first: seconds of all ranges together, its
        number, and what each range takes where memory has no price: `[seconds of both passes, forward and once, first,
        last]`."""
        if kind not in self._free:
            found, layers = [], len(self._starts)
            ranges = np.array(np.triu_indices(layers, 1))
            for number in range(len(self.solver.meshes[kind])):
                sums = self._sums(kind, number, self._wishes[0], 0, 1, ranges)
                seconds, once = sums[FORWARD] + sums[BACKWARD], sums[ONCE]
                finite = np.isfinite(seconds)
                if finite.any():
                    every = np.full((3, layers, layers), np.inf)
                    every[:, *ranges] = seconds, sums[FORWARD], once
                    weight = self.program.microbatches * seconds[finite] + once[finite]
                    found.append((float(weight.sum()), number, every))
            self._free[kind] = sorted(found, key=lambda one: one[:2])
        return self._free[kind]

    def fastest(self, kind: int, in_flight: Sequence[int], share: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """As `least`, of estimates that fit memory with so many microbatches in flight: each `[in flight, layers + 1,
        layers + 1]`, for microbatches of this share of the program's."""
        table = self._table(kind, tuple(in_flight), share)
        return table.fastest, table.fastest_forward

    def shared(
        self, cuts: np.ndarray, in_flight: np.ndarray, ranks: int, kind: int, share: float, most_seconds: float = inf
    ) -> np.ndarray:
        """Lower bounds, as far as estimates are, on the seconds of a microbatch of this share on each rank of equal
        submeshes, with its part of what runs once a step, where stages are dealt to ranks in turn and share their
        memory: `[rank]`; infinite for all ranks if nothing fits one or it takes longer than `most_seconds`.

        Args:
          cuts: bounds of the stages, in layers and fractions of them.
          in_flight: microbatches of each stage.
          ranks: how many, on submeshes of one kind.
          kind: which.
          share: of the program's microbatch.
          most_seconds: of interest.
        """
        layers, stages, steps = len(self._starts) - 1, len(in_flight), self.program.microbatches
        every = np.arange(layers)
        # Sums over the layers up to each, and each layer by itself.
        ranges = np.concatenate([[np.zeros(layers, int), every + 1], [every, every + 1]], axis=1)
        within = (cuts[:-1, None] < every + 1) & (every < cuts[1:, None])

        def of_ranks(each: np.ndarray) -> np.ndarray:
            return np.bincount(np.arange(stages) % ranks, each, ranks)

        of = self._coarser or self
        each = share / steps * np.array([[of.program.microbatches], [1.0]])  # of seconds a microbatch, and once a step
        alone = {number: (each * between(one[::2, 0, 1:], cuts)).sum(axis=0) for _, number, one in of._freely(kind)}
        fastest = np.min([np.full(stages, inf), *alone.values()], axis=0)
        free = of_ranks(fastest)
        if not np.isfinite(free).all() or free.max() > most_seconds:
            return np.full(ranks, inf)
        # A mesh is of interest where a rank with one stage on it may be fast enough.
        spare = np.tile(most_seconds - free, stages // ranks)
        meshes = [number for number, seconds in alone.items() if (seconds - fastest <= spare).any()]
        about = 4.0 ** ceil(log(max(in_flight.mean() * share, 1.0), 4) - 1e-9)
        inner, *_, final = self._limits(kind, self._wishes[-1])
        limits = np.array([inner] * (ranks - 1) + [min(inner, final)])
        workspace = np.full(stages, inf)

        def priced(number: int, remat: int, most: int) -> PricedStages:
            unit = self._sums.free_weight(kind, number) / self._usable(kind)
            seconds, held = [], []
            for price in range(most + 1):
                key = kind, number, remat, price, about if price else 1.0
                if key not in self._layer_sums:
                    self._layer_sums[key] = self._sums(*key, ranges, (about,))
                sums = self._layer_sums[key]
                forward, backward, _, once, constant, kept = between(sums[:WORKSPACE, :layers], cuts)
                seconds.append(steps * (forward + backward) + once)
                held.append(constant + share * in_flight * kept)
                largest = np.where(within, share * sums[WORKSPACE, layers:], 0.0).max(axis=1)
                np.minimum(workspace, largest, out=workspace)
            prices = unit * np.array([0.0, *PRICES[:most]])
            return PricedStages(prices=prices, seconds=np.array(seconds), held=np.array(held))

        easy = [priced(number, self._wishes[0], 0) for number in meshes]
        best = np.argmin([one.seconds[0] for one in easy], axis=0)
        held = np.array([one.held[0] for one in easy])[best, np.arange(stages)]
        if (of_ranks(held) <= limits - workspace.reshape(-1, ranks).max(axis=0)).all():
            return free
        ways = [priced(number, remat, len(PRICES)) for number in meshes for remat in self._wishes]
        limits -= workspace.reshape(-1, ranks).max(axis=0)
        found = np.maximum(share / steps * least_seconds(ways, limits), free)
        return found if found.max() <= most_seconds else np.full(ranks, inf)

    def estimate(self, first: int, last: int, kind: int, in_flight: int, share: float = 1.0) -> tuple[Option, ...]:
        """Ways to run the layers `first` to before `last` on submeshes of one kind, in microbatches of this share of
        the program's: as if these took and kept that share of what its own do."""
        table, at = self._place(kind, in_flight, share)
        return best_of([option_of(way, number) for number, way in table.ways_of(first, last, at)])

    def ranked(
        self, first: int, last: int, kind: int, in_flight: int, *, all_ways: bool = False
    ) -> list[tuple[float, int, float]]:
        """The least seconds that a stage can be expected to take in a step, the number of its logical mesh, and the
        way to rematerialise it as far as that can matter (`Ladder.number_at`: nothing, all segments on a rung, or what
        memory asks for); the least first.

        Args:
          first: of its layers.
          last: one past the last of them.
          kind: of submesh.
          in_flight: microbatches.
          all_ways: whether it may have less than all of a device's memory, so that rematerialisation can matter where
            all would do without.
        """
        table, at = self._place(kind, in_flight, 1.0)
        found = [
            (self.step_seconds(option_of(way, number)), number, way[AGAIN])
            for number, way in table.ways_of(first, last, at)
        ]
        left, extremes = table.left_of(first, last), [_SHARES[remat] for remat in self._wishes]
        if all_ways:  # nothing is faster for being computed twice
            told = {(number, again) for _, number, again in found}
            found += [(weight, n, again) for weight, n, _ in found for again in extremes if (n, again) not in told]
        return sorted([*found, *((weight, number, again) for weight, number in left for again in extremes)])

    def step_seconds(self, option: Option, share: float = 1.0) -> float:
        """Seconds a step of a stage that sets the period: what its problem minimises."""
        return self.program.microbatches / share * option.seconds + option.per_step_seconds

    def _usable(self, kind: int) -> float:
        return self.solver.kind_of.devices[kind].usable_memory_bytes

    def _limits(self, kind: int, remat: int) -> np.ndarray:
        """Bytes that may be counted on a device of a kind of submesh, by the layer that ends a range."""
        ends = range(len(self._starts))
        return np.array(
            [self._reserve.limit(self._usable(kind), last=end == ends[-1], again=remat != 0) for end in ends]
        )

    def _place(self, kind: int, in_flight: int, share: float) -> tuple[RangeTable, int]:
        """A table that has so many in flight, and where."""
        key = kind, in_flight, share
        if key not in self._places:
            self._table(kind, (in_flight,), share)
        return self._places[key]

    def _table(self, kind: int, in_flight: tuple[int, ...], share: float) -> RangeTable:
        key = kind, in_flight, share
        if key not in self._tables:
            self._check()
            ranges = np.array(np.triu_indices(len(self._starts), 1))
            ranges = ranges[:, ranges[1] - ranges[0] <= self._most_layers]
            most = self._most[kind][*ranges] if kind in self._most else np.full(ranges.shape[1], np.inf)
            self._tables[key] = table = self._made(kind, in_flight, share, ranges, most)
            for place, number in enumerate(in_flight):
                self._places[kind, number, share] = table, place
        return self._tables[key]

    def _made(
        self, kind: int, in_flight: tuple[int, ...], share: float, ranges: Ranges, most: np.ndarray
    ) -> RangeTable:  # fmt: skip
        """The table of these ranges, as far as they take no longer than `most` in one microbatch."""
        times = np.array(in_flight, dtype=float)[:, None]
        steps = self.program.microbatches / share
        of = self._coarser if self._coarser is not None else self
        scale = share * of.program.microbatches / self.program.microbatches
        bounds = [(number, scale * every[0, *ranges], every[2, *ranges]) for _, number, every in of._freely(kind)]
        open_ranges = np.any([low <= most for _, low, _ in bounds], axis=0) if bounds else np.zeros(len(most), bool)
        ranges, most = ranges[:, open_ranges], most[open_ranges]
        best = np.full((2, len(in_flight), len(most)), np.inf)
        wishes = [*self._wishes, _MIXED_SELECTIVE, _MIXED] if len(self._wishes) > 1 and self._prices else self._wishes
        ways, fields, left = [], [], []
        for number, every_low, every_once in bounds:
            low = every_low[open_ranges]
            weight = steps * low + every_once[open_ranges]
            better = (best[0] <= self._same * low) & (best[1] <= self._same * weight)
            open_ = (low <= most) & ~better
            looked_at = False
            # Where the lower rung does, with the layouts that are the fastest there, nothing is higher.
            selective_does = np.zeros(open_.shape, bool)
            for remat in wishes:
                limits = self._limits(kind, remat)[ranges[1]]
                constant, kept, workspace = self._least(kind, number, abs(remat), ranges)
                wanted = open_ & (constant + share * (times * kept + workspace) <= limits)
                if remat < 0:
                    wanted &= (best[0] > _WORTH * low) | (best[1] > _WORTH * weight)
                if remat != SELECTIVE:
                    wanted &= selective_does if remat == _MIXED_SELECTIVE else ~selective_does
                if not wanted.any():
                    continue
                found = self._priced(kind, number, remat, in_flight, share, ranges, wanted, limits, most)
                looked_at = True
                ways.append(number)
                fields.append(found)
                seconds = found[FORWARD] + found[BACKWARD]
                held = found[CONSTANT] + times * found[KEPT]
                np.minimum(best[0], seconds, out=best[0])
                np.minimum(best[1], steps * seconds + found[ONCE], out=best[1])
                if remat == SELECTIVE:
                    fastest = self._of_share(self._sums(kind, number, SELECTIVE, 0, 1.0, ranges), share, SELECTIVE)
                    selective_does = seconds <= self._same * (fastest[FORWARD] + fastest[BACKWARD])
                if remat == NONE:
                    # Where memory does not bind there is nothing to gain by computing anything twice.
                    open_ = open_ & ~(np.isfinite(seconds) & (held <= _EASY * limits))
            if not looked_at:
                left.append((number, np.where(low <= most, weight, np.inf)))
        fit = np.isfinite(best[0]).any(axis=0)
        order = np.argsort(~fit, kind="stable")
        none = np.zeros((0, FIELDS, len(in_flight), fit.sum()))
        return RangeTable(
            ways=tuple(ways), ranges=ranges[:, order], layers=len(self._starts),
            fields=np.array([one[:, :, fit] for one in fields]) if fields else none,
            left=tuple((number, low[order]) for number, low in left),
        )  # fmt: skip

    def _priced(
        self, kind: int, number: int, remat: int, in_flight: tuple[int, ...], share: float, ranges: Ranges,
        wanted: np.ndarray, limits: np.ndarray, most: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Ranges on one logical mesh at the least price of memory at which they fit: `[field, in flight, range]`,
        infinite for those that are not wanted or never fit."""
        fits = np.full((FIELDS, *wanted.shape), np.inf)
        # Neighbouring numbers in flight give neighbouring layouts; bytes are counted for the one that is asked for.
        about = np.array([4.0 ** ceil(log(count * share, 4) - 1e-9) for count in in_flight])
        levels = sorted(set(about.tolist()))
        for level in levels:
            rows = np.flatnonzero(about == level)
            columns = np.flatnonzero(wanted[rows].any(axis=0))
            if len(columns):
                times = np.array(in_flight, dtype=float)[rows, None]
                here = rows[:, None], columns
                priced = self._mixed if remat < 0 else self._least_price
                fits[:, *here] = priced(
                    kind, number, remat, level, levels, times, share, ranges[:, columns], wanted[here],
                    limits[columns], most[columns],
                )  # fmt: skip
        return fits

    def _least_price(
        self, kind: int, number: int, remat: int, about: float, others: Sequence[float], times: np.ndarray,
        share: float, ranges: Ranges, wanted: np.ndarray, limits: np.ndarray, most: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        found = np.full((FIELDS, *wanted.shape), np.inf)
        before: np.ndarray | None = None
        over: np.ndarray | None = None
        for price in range(len(self._prices) + 1):
            sums = self._sums(kind, number, remat, price, about if price else 1.0, ranges, others)
            now = self._of_share(sums, share, remat)
            held = now[CONSTANT] + times * now[KEPT]
            here = np.broadcast_to(now[:, None], found.shape)
            wanted = wanted & np.isfinite(now[FORWARD])
            take = wanted & (held <= limits)
            if before is None or over is None:
                wanted = wanted & (now[FORWARD] + now[BACKWARD] <= most)
                take = take & wanted
                found[:, take] = here[:, take]
            elif take.any():
                # Between the last price at which it does not fit and this one.
                most_held = np.broadcast_to(limits, take.shape)[take]
                way = (over[take] - most_held) / (over[take] - held[take])
                found[:, take] = (1 - way) * before[:, take] + way * here[:, take]
            wanted = wanted & ~take
            if not wanted.any():
                break
            before, over = here, held
        if self.solver.alone and self._prices and before is not None and over is not None:
            # Layouts between those that some price finds may fit: of the whole program that is worth finding out.
            found[:, wanted] = before[:, wanted]
            found[CONSTANT] -= np.where(wanted, np.maximum(over - limits, 0.0), 0.0)
        return found

    def _mixed(
        self, kind: int, number: int, remat: int, about: float, others: Sequence[float], times: np.ndarray,
        share: float, ranges: Ranges, wanted: np.ndarray, limits: np.ndarray, most: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """As `_least_price`, between two rungs of the ladder, at the price at which that takes the fewest seconds."""
        found = np.full((FIELDS, *wanted.shape), np.inf)
        first, last = ranges
        steps = self._sums.steps[:, last] - self._sums.steps[:, first]
        for price in range(len(self._prices) + 1):
            level = about if price else 1.0
            ways = {
                way: self._of_share(self._sums(kind, number, way, price, level, ranges, others), share, way)
                for way in (NONE, SELECTIVE, ALL)
                if way <= -remat
            }
            below, again = next(ways[low] for low, high in _LEGS if high == -remat), ways[-remat]
            take = np.zeros(wanted.shape, bool)
            for leg, (low, high) in enumerate(_LEGS):
                if high not in ways:
                    continue
                now = mixed(ways[low], ways[high], limits, times, steps[leg])
                now[AGAIN] = _SHARES[low] + (_SHARES[high] - _SHARES[low]) * now[AGAIN]
                seconds = now[FORWARD] + now[BACKWARD]
                better = wanted & (seconds < found[FORWARD] + found[BACKWARD]) & (seconds <= most)
                found[:, better] = now[:, better]
                take |= better
            held = again[CONSTANT] + times * again[KEPT]
            if not take.any() and not (wanted & np.isinf(found[FORWARD]) & (held > limits)).any():
                break  # at higher prices what fits is slower
        if self.solver.alone:
            # A few segments may need less beside what is kept than all of them do, or than their parts.
            half = np.repeat((below + again)[:, None] / 2, len(times), axis=1)
            near = wanted & np.isinf(found[FORWARD]) & (held <= _NEAR * limits)
            half[CONSTANT] = np.minimum(half[CONSTANT], limits - times * half[KEPT])
            found[:, near] = half[:, near]
        return found

    def _of_share(self, sums: np.ndarray, share: float, remat: int) -> np.ndarray:
        """The fields of microbatches of this share, workspace among what is there throughout."""
        forward, backward, weight, once, constant, kept, workspace = sums
        fixed = constant + share * workspace
        again = np.full(len(kept), _SHARES[remat])
        return np.array([share * forward, share * backward, share * weight, once, fixed, share * kept, again])

    def _least(self, kind: int, number: int, remat: int, ranges: Ranges) -> np.ndarray:
        """Bytes on a device that no layout of a range is below: throughout, for each microbatch in flight, and while
        computed again: `[3, range]`. From fewer microbatches, if any: what one keeps shrinks with it at most."""
        if self._coarser is not None:
            share = self._coarser.program.microbatches / self.program.microbatches
            constant, kept, workspace = self._coarser._least(kind, number, remat, ranges)
            return np.array([constant, share * kept, share * workspace])
        return self._sums.least_bytes(kind, number, remat, ranges)

"""What a range of layers will cost, estimated from its parts without solving it.

Each part (a layer, or a repeated block inside one) is solved by itself on each logical mesh, and the seconds are added
up. That leaves out only the conversions between parts that want different layouts, so that an estimate is nearly always
too low, by a few percent where parts are alike. Equal parts are solved once.

Memory: where the fastest layouts of all parts fit together, that is the estimate. Where they do not, each part is
solved again with a price on memory, the same for all, and the estimate lies between the last price at which they do not
fit and the first at which they do: what one multiplier for the whole range would find (Everett, 1963). With and without
rematerialisation. Meshes whose fastest layouts, whatever their memory, are slower than what fits on another are left.

Sums over ranges are differences of running sums: an estimate takes microseconds once its parts are solved.

Known limits: between equal parts that would rather leave their sums partial an estimate is too high, since every part
alone has to finish them; a parameter that several parts of a range read counts in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import ceil, log

import numpy as np

from ..program.staged import StagedProgram
from .inter_op import Option
from .stage_solver import Place, SolvedStage, StageSolver

# Prices of memory, in units of the whole program's seconds over the limit.
_PRICES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)

# Below this share of the memory limit rematerialisation is not tried.
_EASY = 0.5

# Ranges solved whole can be faster than their parts by themselves, by no more than this.
_PARTS_ALONE = 0.97

# Less than this between two ways is no difference worth looking at.
_SAME = 1.01

# A layer is taken apart into this many equal blocks at most.
_MOST_BLOCKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """All parts on one logical mesh at one price of memory: running sums, one more than there are parts.

    Args:
      sums: `[parts + 1, 9]`: seconds forward, backward, of weight gradients, of receiving, once, shared once; bytes
        throughout and in flight; parts that have no layout.
      fixed: what each part spends on the one collective that a range shares, seconds.
      workspace: bytes that each part takes while it is computed again.
    """

    sums: np.ndarray
    fixed: tuple[float, ...]
    workspace: tuple[float, ...]


class StageEstimates:
    """Estimates of ranges of layers of one program.

    Args:
      program: in layers.
      solver: of a program of the same equations in `parts`.
      remat: "none", "layer", or None to choose for each range.
      coarser: of the same layers in fewer microbatches, or None. Cutting a microbatch makes no work less: what they
        take is a bound that saves looking at most logical meshes.
    """

    def __init__(
        self, program: StagedProgram, solver: StageSolver, remat: str | None, coarser: StageEstimates | None = None
    ) -> None:
        self.program = program
        self.solver = solver
        # Ranges that alone take longer than this, in all microbatches, are left out.
        self.bound_seconds = float("inf")
        # While it is set, so are ranges whose fastest layouts do not fit.
        self.only_easy = False
        self._remat = remat
        self._limit = self._unit = solver.limit_bytes
        starts = {start: number for number, (start, _) in enumerate(solver.program.layers)}
        self._starts = [starts[start] for start, _ in program.layers] + [len(solver.program.layers)]
        self._coarser = coarser if coarser is not None and coarser._starts == self._starts else None
        self._columns: dict[tuple[int, int, str, int, float], _Column] = {}
        self._parts: dict[tuple[int, int, int, str, int, float], tuple[tuple[float, ...], float]] = {}
        self._ladders: dict[tuple[int, int, int, str, float], list[SolvedStage | None]] = {}
        self._leasts: dict[tuple[int, int, str], tuple[np.ndarray, tuple[float, ...]]] = {}
        self._weights: dict[tuple[int, int], float] = {}
        self._fastest: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def limit(self, limit_bytes: float) -> None:
        """From now on so many bytes may be counted on a device; prices stay what they are."""
        self._limit = self.solver.limit_bytes = limit_bytes

    def least(self, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a microbatch, both passes and forward, that no way to run a range of layers on submeshes of one
        kind is below, each `[layers + 1, layers + 1]` by first layer and one past the last; infinite for no range."""
        if self._coarser is not None:
            share = self._coarser.program.microbatches / self.program.microbatches
            both, forward = self._coarser.least(kind)
            return share * both, share * forward
        if kind not in self._fastest:
            starts = np.array(self._starts)
            remat = "none" if self._remat in (None, "none") else "layer"
            fastest = np.full((2, len(starts), len(starts)), np.inf)
            for number in range(len(self.solver.meshes[kind])):
                sums = self._column(kind, number, remat, 0, 1).sums
                received = sums[starts, 3][None, :] - sums[np.minimum(starts + 1, len(sums) - 1), 3][:, None]
                forward = np.maximum(sums[starts, 0][None, :] - sums[starts, 0][:, None] - received, 0.0)
                both = forward + np.maximum(sums[starts, 1][None, :] - sums[starts, 1][:, None], 0.0)
                missing = sums[starts, 8][None, :] > sums[starts, 8][:, None]
                np.minimum(fastest, np.where(missing, np.inf, [both, forward]), out=fastest)
            fastest[:, ~np.triu(np.ones(fastest.shape[1:], dtype=bool), 1)] = np.inf
            self._fastest[kind] = _PARTS_ALONE * fastest[0], _PARTS_ALONE * fastest[1]
        return self._fastest[kind]

    def estimate(self, first: int, last: int, kind: int, in_flight: int, share: float = 1.0) -> tuple[Option, ...]:
        """Ways to run the layers `first` to before `last` on submeshes of one kind, in microbatches of this share of
        the program's: as if these took and kept that share of what its own do."""
        ways = self._ways(first, last, kind, in_flight, share)
        return best_of([option for _, _, _, option in ways if option is not None])

    def ranked(self, first: int, last: int, kind: int, in_flight: int) -> list[tuple[float, int, str]]:
        """Logical meshes, each with and without rematerialisation as far as that can matter, with the least seconds
        that such a stage can be expected to take in a step; the least first."""
        ways = self._ways(first, last, kind, in_flight)
        return sorted((self.weight(option) if option else weight, n, remat) for weight, n, remat, option in ways)

    def _ways(
        self, first: int, last: int, kind: int, in_flight: int, share: float = 1.0
    ) -> Iterator[tuple[float, int, str, Option | None]]:
        """Each way with what it takes at least; None for the estimate of one that another is better than whatever
        memory makes of it."""
        parts = self._starts[first], self._starts[last]
        wishes = [remat for remat in ("none", "layer") if self._remat in (None, remat)]
        found: list[Option] = []
        for weight, seconds, number in self._bounds(*parts, kind, wishes[0], share):
            if any(o.seconds <= _SAME * seconds and self.weight(o, share) <= _SAME * weight for o in found):
                yield from ((weight, number, remat, None) for remat in wishes)
                continue
            fits = [r for r in wishes if self._at_least(*parts, kind, number, r, in_flight, share) <= self._limit]
            fastest = self._sum(*parts, kind, number, wishes[0], 0, in_flight, share) if fits else None
            if fastest is None or not self._is_of_interest(fastest, share):
                continue
            weight = self.weight(fastest, share)
            if any(o.seconds <= fastest.seconds and self.weight(o, share) <= weight for o in found):
                yield from ((weight, number, remat, None) for remat in wishes)
                continue
            for remat in fits:
                option = self._on(*parts, kind, number, remat, in_flight, share)
                if option is not None:
                    found.append(option)
                    yield weight, number, remat, option
                    if option.constant_bytes + in_flight * option.in_flight_bytes <= _EASY * self._limit:
                        break  # memory does not bind: nothing to gain by computing anything twice

    def _bounds(self, first: int, last: int, kind: int, remat: str, share: float) -> list[tuple[float, float, int]]:
        """Of each logical mesh on which a range can be of interest what it takes in a step at least, the seconds of a
        microbatch, and its number, ascending."""
        of = self._coarser if self._coarser is not None else self
        share = share * of.program.microbatches / self.program.microbatches
        found = []
        for number in range(len(self.solver.meshes[kind])):
            option = of._sum(first, last, kind, number, remat, 0, 1, 1.0)
            if option is not None and of.program.microbatches * option.seconds <= self.bound_seconds:
                found.append((of.weight(option), share * option.seconds, number))
        return sorted(found)

    def weight(self, option: Option, share: float = 1.0) -> float:
        """Seconds a step of a stage that sets the period: what its problem minimises."""
        return self.program.microbatches / share * option.seconds + option.once_seconds

    def _is_of_interest(self, option: Option, share: float) -> bool:
        return self.program.microbatches / share * option.seconds <= self.bound_seconds

    def _on(
        self, first: int, last: int, kind: int, number: int, remat: str, in_flight: int, share: float
    ) -> Option | None:
        """Parts `first` to before `last` on one logical mesh: the least price of memory at which they fit together."""
        before: Option | None = None
        for price in range(len(_PRICES) + 1):
            option = self._sum(first, last, kind, number, remat, price, in_flight, share)
            if option is None:
                return None
            held = option.constant_bytes + in_flight * option.in_flight_bytes
            if held <= self._limit:
                if before is None:
                    return option if self._is_of_interest(option, share) else None
                over = before.constant_bytes + in_flight * before.in_flight_bytes
                return _between(before, option, (over - self._limit) / (over - held))
            if price == 0 and (
                self.only_easy
                or not self._is_of_interest(option, share)
                or self._least(first, last, kind, number, remat, in_flight, share) > self._limit
            ):
                return None
            before = option
        return None

    def _at_least(
        self, first: int, last: int, kind: int, number: int, remat: str, in_flight: int, share: float
    ) -> float:
        """As `_least`, from fewer microbatches where there are any: what a microbatch keeps shrinks with it at most."""
        if self._coarser is None:
            return self._least(first, last, kind, number, remat, in_flight, share)
        share = share * self._coarser.program.microbatches / self.program.microbatches
        return self._coarser._least(first, last, kind, number, remat, in_flight, share)

    def _least(self, first: int, last: int, kind: int, number: int, remat: str, in_flight: int, share: float) -> float:
        """Bytes on a device that no layout of the parts is below, for microbatches of this share of these."""
        key = kind, number, remat
        if key not in self._leasts:
            rows, again = [(0.0, 0.0, 0.0)], []
            for part in range(self._starts[-1]):
                place = Place(part, part + 1, kind, number)
                built = self.solver.problem(place, "none")
                assert built is not None
                constant, kept, received = built[0].least_bytes
                workspace = 0.0
                if remat == "layer":
                    # At best all of it is split over all devices: no problem need be built to know that.
                    segments, whole, kept_whole = self.solver.segments(part, part + 1)
                    devices = self.solver.meshes[kind][number].num_devices
                    if segments:
                        workspace, kept = whole / devices, received + kept_whole / devices
                rows.append((constant, kept, received))
                again.append(workspace)
            self._leasts[key] = np.cumsum(rows, axis=0), tuple(again)
        sums, workspace = self._leasts[key]
        constant, kept, _ = sums[last] - sums[first]
        # Inside a range what a part receives another one keeps, or nobody.
        received = sums[last, 2] - sums[first + 1, 2]
        return float(constant + share * (in_flight * (kept - received) + max(workspace[first:last])))

    def _sum(
        self, first: int, last: int, kind: int, number: int, remat: str, price: int, in_flight: int, share: float
    ) -> Option | None:
        """The parts of a range, each by itself at one price of memory."""
        # Neighbouring numbers in flight give neighbouring layouts; bytes are counted for the one that is asked for.
        about = 1.0
        if price > 0:
            about = 4.0 ** ceil(log(in_flight * share, 4) - 1e-9)
        column = self._column(kind, number, remat, price, about)
        total = column.sums[last] - column.sums[first]
        forward, backward, weight, _, once, shared, constant, kept, missing = total.tolist()
        if missing:
            return None
        # Inside the range nothing is received, and gradients are summed by one collective.
        received = float(column.sums[last, 3] - column.sums[first + 1, 3])
        return Option(
            forward_seconds=share * max(0.0, forward - received),
            backward_seconds=share * max(0.0, backward),
            weight_seconds=share * min(max(0.0, weight), max(0.0, backward)),
            once_seconds=max(0.0, once - shared + max(column.fixed[first:last])),
            constant_bytes=constant + share * max(column.workspace[first:last]),
            in_flight_bytes=share * kept,
            tag=number,
        )

    def _column(self, kind: int, number: int, remat: str, price: int, in_flight: float) -> _Column:
        key = kind, number, remat, price, in_flight
        if key not in self._columns:
            rows: list[tuple[float, ...]] = [(0.0,) * 9]
            fixed, workspace = [], []
            for part in range(self._starts[-1]):
                row, again = self._part(Place(part, part + 1, kind, number), remat, price, in_flight)
                rows.append(row)
                fixed.append(row[5])
                workspace.append(again)
            self._columns[key] = _Column(sums=np.cumsum(rows, axis=0), fixed=tuple(fixed), workspace=tuple(workspace))
        return self._columns[key]

    def _part(self, place: Place, remat: str, price: int, in_flight: float) -> tuple[tuple[float, ...], float]:
        """A part by itself at one price of memory (0 for none): a row of a column, and its workspace."""
        key = (self.solver.number(place.first, place.last), place.kind, place.mesh, remat, price, in_flight)
        if key not in self._parts:
            self._parts[key] = self._solve_part(place, remat, price, in_flight)
        return self._parts[key]

    def _solve_part(self, place: Place, remat: str, price: int, in_flight: float) -> tuple[tuple[float, ...], float]:
        if remat == "layer" and self.solver.problem(place, remat) is None:
            remat = "none"  # it has nothing to compute again
        if price == 0:
            stage = self.solver.free(place, remat)
        else:
            stage = self._ladder(place, remat, in_flight)[price - 1]
        if stage is None:
            return (*(0.0,) * 8, 1.0), 0.0
        boundary, fixed = stage.boundary
        one, again = stage.seconds, stage.problem.workspace_bytes
        row = (
            one.forward_seconds, one.backward_seconds, one.weight_seconds, boundary,
            one.synchronise_seconds + one.update_seconds, fixed, one.constant_bytes - again, one.in_flight_bytes, 0.0,
        )  # fmt: skip
        return row, again

    def _ladder(self, place: Place, remat: str, in_flight: float) -> list[SolvedStage | None]:
        """A part by itself at all prices of memory."""
        key = (self.solver.number(place.first, place.last), place.kind, place.mesh, remat, in_flight)
        if key not in self._ladders:
            unit = self._free_weight(place.kind, place.mesh) / self._unit
            prices = [(price * unit, in_flight) for price in _PRICES]
            self._ladders[key] = self.solver.priced(place, remat, prices)
        return self._ladders[key]

    def _free_weight(self, kind: int, number: int) -> float:
        """Seconds a step of all parts on one logical mesh: with the limit, the scale of prices."""
        if (kind, number) not in self._weights:
            total = self._column(kind, number, "none", 0, 1).sums[-1]
            self._weights[kind, number] = float(self.program.microbatches * (total[0] + total[1]) + total[4])
        return self._weights[kind, number]


def in_parts(program: StagedProgram) -> StagedProgram:
    """The program with layers of several equal blocks taken apart into these, wherever they repeat, and pieces of scans
    apart from what stands before and after them.

    A network of 48 blocks in 16 layers has 16 layers of three: solving a block is a third of the work. And the first and
    the last piece of a scan are no more work then than the others.
    """
    bounds = {a for a, _ in program.layers} | {program.equations} | _around_scans(program) | _between_blocks(program)
    if len(bounds) == len(program.layers) + 1:
        return program
    return replace(program, layers=tuple(pairwise(sorted(bounds))))


def _around_scans(program: StagedProgram) -> set[int]:
    """Where pieces of scans begin and end."""
    starts = set(program.piece_starts.values())
    return starts | {scan + 1 for pieces in program.pieces for scan in pieces}


def _between_blocks(program: StagedProgram) -> set[int]:
    """Where blocks of the most common layer begin and end, if it has several equal ones."""
    signatures: list[list[object]] = [[] for _ in range(program.equations)]
    values = program.graph.values
    for operator in program.graph.operators:
        shapes = tuple(values[v].shape for v in operator.results if v is not None)
        signatures[operator.path[0]].append((operator.name, operator.flops, operator.repeats, shapes))
    written = [repr(one) for one in signatures]
    counts = Counter(tuple(written[a:b]) for a, b in program.layers)
    common, _ = counts.most_common(1)[0]
    length = len(common)
    blocks = next(
        (k for k in range(min(_MOST_BLOCKS, length), 1, -1) if length % k == 0 and common == common[: length // k] * k),
        1,
    )
    if blocks == 1:
        return set()
    size, block = length // blocks, list(common[: length // blocks])
    anchor = next(a for a, b in program.layers if tuple(written[a:b]) == common) % size
    places = [p for p in range(anchor, program.equations, size) if written[p : p + size] == block]
    return {bound for place in places for bound in (place, place + size)}


def _between(slow: Option, fits: Option, share: float) -> Option:
    """What lies `share` of the way from one option to the next."""
    names = (field.name for field in fields(Option) if field.name != "tag")
    mixed = {name: (1 - share) * getattr(slow, name) + share * getattr(fits, name) for name in names}
    return Option(**mixed, tag=fits.tag)


def best_of(options: Sequence[Option]) -> tuple[Option, ...]:
    """Those that no other is at least as good as in everything; the first of equals."""
    kept: list[Option] = []
    for option in sorted(options, key=_criteria):
        if not any(all(a <= b for a, b in zip(_criteria(other), _criteria(option), strict=True)) for other in kept):
            kept.append(option)
    return tuple(kept)


def _criteria(option: Option) -> tuple[float, ...]:
    return (
        option.seconds, option.forward_seconds, option.backward_seconds, option.once_seconds, option.constant_bytes,
        option.in_flight_bytes,
    )  # fmt: skip

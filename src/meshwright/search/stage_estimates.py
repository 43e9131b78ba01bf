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

import numpy as np

from ..program.staged import StagedProgram
from .inter_op import Option
from .stage_solver import Place, StageSolver

# Prices of memory, in units of the whole program's seconds over the limit.
_PRICES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)

# Below this share of the memory limit rematerialisation is not tried.
_EASY = 0.5

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
    """

    def __init__(self, program: StagedProgram, solver: StageSolver, remat: str | None) -> None:
        self.program = program
        self.solver = solver
        # Ranges that alone take longer than this, in all microbatches, are left out.
        self.bound_seconds = float("inf")
        # While it is set, so are ranges whose fastest layouts do not fit.
        self.only_easy = False
        self._remat = remat
        self._limit = solver.limit_bytes
        starts = {start: number for number, (start, _) in enumerate(solver.program.layers)}
        self._starts = [starts[start] for start, _ in program.layers] + [len(solver.program.layers)]
        self._columns: dict[tuple[int, int, str, int, int], _Column] = {}
        self._parts: dict[tuple[int, int, int, str, int, int], tuple[tuple[float, ...], float]] = {}
        self._leasts: dict[tuple[int, int, str], np.ndarray] = {}
        self._weights: dict[tuple[int, int], float] = {}

    def estimate(self, first: int, last: int, kind: int, in_flight: int) -> tuple[Option, ...]:
        """Ways to run the layers `first` to before `last` on submeshes of one kind."""
        return best_of([option for _, _, _, option in self._ways(first, last, kind, in_flight) if option is not None])

    def ranked(self, first: int, last: int, kind: int, in_flight: int) -> list[tuple[float, int, str]]:
        """Logical meshes, each with and without rematerialisation as far as that can matter, with the least seconds
        that such a stage can be expected to take in a step; the least first."""
        ways = self._ways(first, last, kind, in_flight)
        return sorted((self.weight(option) if option else weight, n, remat) for weight, n, remat, option in ways)

    def _ways(
        self, first: int, last: int, kind: int, in_flight: int
    ) -> Iterator[tuple[float, int, str, Option | None]]:
        """Each way with what it takes at least; None for the estimate of one that another is better than whatever
        memory makes of it."""
        parts = self._starts[first], self._starts[last]
        wishes = [remat for remat in ("none", "layer") if self._remat in (None, remat)]
        free = []
        for number in range(len(self.solver.meshes[kind])):
            option = self._sum(*parts, kind, number, wishes[0], 0, in_flight)
            if option is not None and self._is_of_interest(option):
                free.append((self.weight(option), number, option))
        found: list[Option] = []
        for weight, number, fastest in sorted(free, key=lambda one: one[:2]):
            if any(o.seconds <= fastest.seconds and self.weight(o) <= weight for o in found):
                yield from ((weight, number, remat, None) for remat in wishes)
                continue
            for remat in wishes:
                option = self._on(*parts, kind, number, remat, in_flight)
                if option is not None:
                    found.append(option)
                    yield weight, number, remat, option
                    if option.constant_bytes + in_flight * option.in_flight_bytes <= _EASY * self._limit:
                        break  # memory does not bind: nothing to gain by computing anything twice

    def weight(self, option: Option) -> float:
        """Seconds a step of a stage that sets the period: what its problem minimises."""
        return self.program.microbatches * option.seconds + option.once_seconds

    def _is_of_interest(self, option: Option) -> bool:
        return self.program.microbatches * option.seconds <= self.bound_seconds

    def _on(self, first: int, last: int, kind: int, number: int, remat: str, in_flight: int) -> Option | None:
        """Parts `first` to before `last` on one logical mesh: the least price of memory at which they fit together."""
        before: Option | None = None
        for price in range(len(_PRICES) + 1):
            option = self._sum(first, last, kind, number, remat, price, in_flight)
            if option is None:
                return None
            held = option.constant_bytes + in_flight * option.in_flight_bytes
            if held <= self._limit:
                if before is None:
                    return option if self._is_of_interest(option) else None
                over = before.constant_bytes + in_flight * before.in_flight_bytes
                return _between(before, option, (over - self._limit) / (over - held))
            if price == 0 and (
                self.only_easy
                or not self._is_of_interest(option)
                or self._least(first, last, kind, number, remat, in_flight) > self._limit
            ):
                return None
            before = option
        return None

    def _least(self, first: int, last: int, kind: int, number: int, remat: str, in_flight: int) -> float:
        """Bytes on a device that no layout of the parts is below."""
        key = kind, number, remat
        if key not in self._leasts:
            rows = [(0.0, 0.0, 0.0)]
            for part in range(self._starts[-1]):
                place = Place(part, part + 1, kind, number)
                built = self.solver.problem(place, remat) or self.solver.problem(place, "none")
                assert built is not None
                rows.append(built[0].least_bytes)
            self._leasts[key] = np.cumsum(rows, axis=0)
        sums = self._leasts[key]
        constant, kept, _ = sums[last] - sums[first]
        # Inside a range what a part receives another one keeps, or nobody.
        received = sums[last, 2] - sums[first + 1, 2]
        return float(constant + in_flight * (kept - received))

    def _sum(
        self, first: int, last: int, kind: int, number: int, remat: str, price: int, in_flight: int
    ) -> Option | None:
        """The parts of a range, each by itself at one price of memory."""
        # Neighbouring numbers in flight give neighbouring layouts; bytes are counted for the one that is asked for.
        about = 1
        while price > 0 and about < in_flight:
            about *= 4
        column = self._column(kind, number, remat, price, about)
        total = column.sums[last] - column.sums[first]
        forward, backward, weight, _, once, shared, constant, kept, missing = total.tolist()
        if missing:
            return None
        # Inside the range nothing is received, and gradients are summed by one collective.
        received = float(column.sums[last, 3] - column.sums[first + 1, 3])
        return Option(
            forward_seconds=max(0.0, forward - received),
            backward_seconds=max(0.0, backward),
            weight_seconds=min(max(0.0, weight), max(0.0, backward)),
            once_seconds=max(0.0, once - shared + max(column.fixed[first:last])),
            constant_bytes=constant + max(column.workspace[first:last]),
            in_flight_bytes=kept,
            tag=number,
        )

    def _column(self, kind: int, number: int, remat: str, price: int, in_flight: int) -> _Column:
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

    def _part(self, place: Place, remat: str, price: int, in_flight: int) -> tuple[tuple[float, ...], float]:
        """A part by itself at one price of memory (0 for none): a row of a column, and its workspace."""
        key = (self.solver.number(place.first, place.last), place.kind, place.mesh, remat, price, in_flight)
        if key not in self._parts:
            self._parts[key] = self._solve_part(place, remat, price, in_flight)
        return self._parts[key]

    def _solve_part(self, place: Place, remat: str, price: int, in_flight: int) -> tuple[tuple[float, ...], float]:
        if remat == "layer" and self.solver.problem(place, remat) is None:
            remat = "none"  # it has nothing to compute again
        if price == 0:
            stage = self.solver.free(place, remat)
        else:
            seconds = _PRICES[price - 1] * self._free_weight(place.kind, place.mesh) / self._limit
            stage = self.solver.priced(place, remat, seconds, in_flight)
        if stage is None:
            return (*(0.0,) * 8, 1.0), 0.0
        boundary, fixed = stage.boundary
        one, again = stage.seconds, stage.problem.workspace_bytes
        row = (
            one.forward_seconds, one.backward_seconds, one.weight_seconds, boundary,
            one.synchronise_seconds + one.update_seconds, fixed, one.constant_bytes - again, one.in_flight_bytes, 0.0,
        )  # fmt: skip
        return row, again

    def _free_weight(self, kind: int, number: int) -> float:
        """Seconds a step of all parts on one logical mesh: with the limit, the scale of prices."""
        if (kind, number) not in self._weights:
            total = self._column(kind, number, "none", 0, 1).sums[-1]
            self._weights[kind, number] = float(self.program.microbatches * (total[0] + total[1]) + total[4])
        return self._weights[kind, number]


def in_parts(program: StagedProgram) -> StagedProgram:
    """The program with layers of several equal blocks taken apart into these, wherever they repeat.

    A network of 48 blocks in 16 layers has 16 layers of three: solving a block is a third of the work.
    """
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
        return program
    size, block = length // blocks, list(common[: length // blocks])
    anchor = next(a for a, b in program.layers if tuple(written[a:b]) == common) % size
    bounds = {a for a, _ in program.layers} | {program.equations}
    for place in range(anchor, program.equations, size):
        if written[place : place + size] == block:
            bounds |= {place, place + size}
    return replace(program, layers=tuple(pairwise(sorted(bounds))))


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

"""Parts of a program priced by themselves, as rows of numbers that are summed to ranges of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..intra.workspace import AS_BAD
from .problem import StageSeconds
from .solver import Place, StageSolver

# A row of a column of `estimates`: seconds forward, backward, of weight gradients, of receiving, once, shared
# once; bytes throughout and in flight; 1 for a part that has no layout. And its workspace, bytes.
PartRow = tuple[tuple[float, ...], float]

NO_PART: PartRow = (*(0.0,) * 8, 1.0), 0.0

# A part counts as what it takes at least. Where more than this is uncertain it is solved to the end; of a large part,
# for which that takes a tenth of a second, where more than the second is. What is left open, mostly less than 3
# percent, costs less to solve where it matters, in ranges: solved to 3 percent, gpt3-39b and gpt3-175b took a tenth
# more time, for the same plans and gaps; where half is left open of small parts too, the searches take no less.
_LOOSE, _LOOSE_IF_LARGE = 0.2, 0.5

# Operators of a large part.
_LARGE = 150

# In place of the number of a price: the fewest bytes, whatever the seconds.
_AT_LEAST = -1


class OutOfTime(Exception):
    """The time limit ended the pricing of a part; finished rows are kept."""


def may_be_loose(operators: int) -> float:
    """The gap to which a part of so many operators is solved, as a share of its seconds."""
    return _LOOSE_IF_LARGE if operators > _LARGE else _LOOSE


class PartRows:
    """The rows of all parts of a program, each computed on first use.

    Args:
      solver: of the program, whose layers are the parts.
      check: called before anything is found out; raises `OutOfTime` where there is no time for it.
    """

    def __init__(self, solver: StageSolver, check: Callable[[], None] = lambda: None) -> None:
        self._solver, self._check = solver, check
        self._rows: dict[tuple[Any, ...], PartRow] = {}

    def at_least(self, place: Place, remat: str) -> PartRow:
        """Lower bounds on the bytes of a part over all layouts: throughout, for each microbatch in flight, and of that
        what it receives; and its workspace.

        Args:
          place: of the part.
          remat: "none" or "layer".

        Raises:
          OutOfTime: if it is late.
        """
        solver = self._solver
        key = *self._key(place, remat), _AT_LEAST, 1.0
        if key not in self._rows:
            self._check()
            least = solver.problem(place, "none")[0].least_bytes
            kept, workspace = least.kept, least.workspace
            if remat == "layer" and solver.segments(place.first, place.last):
                # At best all of it is split over all devices: no problem need be built to know that.
                devices = solver.meshes[place.kind][place.mesh].num_devices
                kept = least.received + solver.kept_bytes(place.first, place.last) / devices
                workspace = AS_BAD * solver.graph(place.first, place.last, remat)[1].bytes / devices
            self._rows[key] = (least.constant, kept, least.received), workspace
        return self._rows[key]

    def priced(
        self, place: Place, remat: str, prices: Sequence[float], number: int, in_flight: float,
        others: Sequence[float] = (),
    ) -> PartRow:  # fmt: skip
        """The row of a part at one price of memory, and its workspace.

        Args:
          place: of the part.
          remat: "none" or "layer".
          prices: in seconds a byte, all of them: they are found out together.
          number: 0 for no price, else from 1 which one.
          in_flight: microbatches.
          others: numbers of microbatches in flight that may be asked for next: they are found out together too.

        Raises:
          OutOfTime: if it is late.
        """
        about = self._key(place, remat)
        if (*about, number, in_flight) not in self._rows:
            self._check()
            solver = self._solver
            # It may have nothing to compute again.
            wish = remat if remat == "none" or solver.segments(place.first, place.last) else "none"
            asked: dict[tuple[int, float], tuple[float, float]] = {(0, in_flight): (0.0, 1)}
            if number:
                unknown = [one for one in {in_flight, *others} if (*about, number, one) not in self._rows]
                rungs = list(enumerate(prices, start=1))
                asked = {(rung, one): (price, one) for one in sorted(unknown) for rung, price in rungs}
            gap = may_be_loose(len(solver.cut(place.first, place.last).graph.operators))
            found = solver.choices_at(place, wish, list(asked.values()), gap=gap)
            built = solver.problem(place, wish)
            for key, one in zip(asked, found, strict=True):
                if one is None or one.choices is None:
                    self._rows[*about, *key] = NO_PART
                    continue
                self._rows[*about, *key] = part_row(*built[0].as_part(one.choices), one.share)
        return self._rows[*about, number, in_flight]

    def _key(self, place: Place, remat: str) -> tuple[Any, ...]:
        return self._solver.number(place.first, place.last), place.kind, place.mesh, remat


def part_row(seconds: StageSeconds, boundary: tuple[float, float], share: float) -> PartRow:
    """A part's row with the certain share of its seconds.

    Args:
      seconds: of the layouts that have been found.
      boundary: what it saves as a part of a longer range (`StageProblem.boundary_seconds`).
      share: of its seconds, what is certain to be needed.
    """
    received, fixed = boundary
    each = (
        seconds.forward_seconds, seconds.backward_seconds, seconds.weight_seconds, received,
        seconds.synchronise_seconds + seconds.update_seconds, fixed,
    )  # fmt: skip
    row = (*(share * one for one in each), seconds.constant_bytes, seconds.in_flight_bytes, 0.0)
    return row, seconds.workspace_bytes

"""Parts of a program priced by themselves, as rows of numbers that are summed to ranges of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..intra.workspace import AS_BAD
from .problem import AsPart
from .solver import Place, StageSolver


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """A part by itself.

    Args:
      sums: that add up over the parts of a range: seconds forward, backward, of weight gradients, of receiving, once,
        once for the range; bytes throughout and in flight; 1 for a part that has no layout.
      workspace: bytes while its backward pass runs, without `cotangents`.
      cotangents: bytes of the cotangents of what it receives.
      inputs: what of the sums a range has once however many parts read it (`AsPart.inputs`).
      outputs: seconds of writing each output (`AsPart.output_seconds`).
    """

    sums: tuple[float, ...]
    workspace: float
    cotangents: float
    inputs: np.ndarray
    outputs: np.ndarray


# A part counts as what it takes at least. Where more than this is uncertain it is solved to the end; of a large part,
# for which that takes a tenth of a second, where more than the second is. What is left open, mostly less than 3
# percent, costs less to solve where it matters, in ranges: solved to 3 percent, gpt3-39b and gpt3-175b took a tenth
# more time, for the same plans and gaps; where half is left open of small parts too, the searches take no less.
_LOOSE, _LOOSE_IF_LARGE = 0.2, 0.5

# Operators of a large part.
_LARGE = 150

# In place of the number of a price: the fewest bytes, whatever the seconds.
AT_LEAST = -1


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

    def at_least(self, place: Place, remat: int) -> PartRow:
        """Lower bounds on the bytes of a part over all layouts; its seconds are zero.

        Args:
          place: of the part.
          remat: the way to rematerialise it (`program.ladder`).

        Raises:
          OutOfTime: if it is late.
        """
        solver = self._solver
        key = *self._key(place, remat), AT_LEAST, 1.0
        if key not in self._rows:
            self._check()
            problem = solver.problem(place, 0)[0]
            least, inputs = problem.least_bytes, problem.least_input_bytes
            kept, workspace = least.kept, least.workspace
            if remat and solver.segments(place.first, place.last):
                # At best all of it is split over all devices: no problem need be built to know that.
                devices = solver.meshes[place.kind][place.mesh].num_devices
                kept = inputs[:, 1].sum() + solver.kept_bytes(place.first, place.last, remat) / devices
                workspace = AS_BAD * solver.graph(place.first, place.last, remat)[1].bytes / devices
            self._rows[key] = PartRow(
                sums=(*(0.0,) * 6, least.constant, kept, 0.0), workspace=workspace, cotangents=0.0,
                inputs=np.concatenate([np.zeros((len(inputs), 2)), inputs], axis=1),
                outputs=np.zeros(len(solver.cut(place.first, place.last).outputs)),
            )  # fmt: skip
        return self._rows[key]

    def priced(
        self, place: Place, remat: int, prices: Sequence[float], number: int, in_flight: float,
        others: Sequence[float] = (),
    ) -> PartRow:  # fmt: skip
        """The row of a part at one price of memory.

        Args:
          place: of the part.
          remat: the way to rematerialise it (`program.ladder`).
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
            wish = remat if not remat or solver.segments(place.first, place.last) else 0
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
                    self._rows[*about, *key] = _no_part(len(built[2].inputs), len(built[2].outputs))
                    continue
                self._rows[*about, *key] = part_row(built[0].as_part(one.choices), one.share)
        return self._rows[*about, number, in_flight]

    def _key(self, place: Place, remat: int) -> tuple[Any, ...]:
        way = self._solver.ladder(place.first, place.last).number(remat) if remat else 0
        return self._solver.number(place.first, place.last), place.kind, place.mesh, way


def _no_part(inputs: int, outputs: int) -> PartRow:
    """The row of a part that has no layout, by how many inputs and outputs it has."""
    none = np.zeros(outputs)
    return PartRow(sums=(*(0.0,) * 8, 1.0), workspace=0.0, cotangents=0.0, inputs=np.zeros((inputs, 4)), outputs=none)


def part_row(part: AsPart, share: float) -> PartRow:
    """A part's row with the certain share of its seconds.

    Args:
      part: in the layouts that have been found.
      share: of its seconds, what is certain to be needed.
    """
    seconds = part.seconds
    each = (
        seconds.forward_seconds, seconds.backward_seconds, seconds.weight_seconds, part.received_seconds,
        seconds.synchronise_seconds + seconds.update_seconds, part.fixed_seconds,
    )  # fmt: skip
    return PartRow(
        sums=(*(share * one for one in each), seconds.constant_bytes, seconds.in_flight_bytes, 0.0),
        workspace=seconds.workspace_bytes - part.cotangent_bytes,
        cotangents=part.cotangent_bytes,
        inputs=part.inputs * (share, share, 1.0, 1.0),
        outputs=share * part.output_seconds,
    )

"""What several parts of a range have, and the range has once: a parameter, an input of the program, a value that one
part makes and another one keeps. And what parts write for each other and a range does not: a value that is computed
where it is read.

Every part is priced by itself, with all that it reads. A range is the sum of its parts less what was counted before:
the input of a part counts for nothing where an earlier part of the range has it (its *owner* is the last such part).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from ...cost.efficiency import profile_of
from ...program.cut import Cut
from ...program.residuals import is_fusible, is_had_again, is_stored, kept_inputs
from .solver import StageSolver


class SharedInputs:
    """The inputs of parts that an earlier part has too.

    Args:
      solver: of the program whose layers are the parts.
      starts: of each layer its first part, and the number of parts.
      remat: the way to rematerialise each part (`program.ladder`).
      loosely: whether a value counts as kept wherever it is made or received. Sums are then lower bounds: where nobody
        keeps it, a range may keep something smaller that it is made from.
    """

    def __init__(self, solver: StageSolver, starts: Sequence[int], remat: int, *, loosely: bool) -> None:
        self._solver, self._layers = solver, len(starts)
        cuts = [solver.cut(part, part + 1) for part in range(starts[-1])]
        first_row = np.cumsum([0, *(len(cut.inputs) for cut in cuts)])
        layer = np.searchsorted(starts, range(starts[-1]), side="right") - 1
        pairs = [*self._pairs(cuts, remat, loosely=loosely)]
        parts, inputs, owners = np.array(pairs, dtype=int).reshape(-1, 3).T
        self._rows = first_row[parts] + inputs
        self._last = layer[parts] + 1
        # Layers from the owner's to the part's: mostly none or one, more for tied parameters and skip connections.
        self._distances, self._which = np.unique(layer[parts] - layer[owners], return_inverse=True)
        self._unwritten = [np.array([self._is_unwritten(cut, value) for value in cut.outputs], float) for cut in cuts]

    def running_sums(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """What owners have too, by distance from them and by layer: running sums, `[distance, layers + 1, column]`.

        Args:
          inputs: of each part what its inputs take, `[inputs, columns]`.
        """
        rows = np.concatenate(inputs)
        found = np.zeros((len(self._distances), self._layers, rows.shape[1]))
        np.add.at(found, (self._which, self._last), rows[self._rows])
        return np.cumsum(found, axis=1)

    def twice(self, sums: np.ndarray, ranges: np.ndarray) -> np.ndarray:
        """What the sums over the parts of ranges of layers count more than once: `[column, range]`.

        Args:
          sums: as of `running_sums`.
          ranges: `[2, range]`: the first layer of each, and one past the last.
        """
        first, last = ranges
        found = np.zeros((len(first), sums.shape[2]))
        for one, distance in zip(sums, self._distances, strict=True):
            found += one[last] - one[np.minimum(first + distance, last)]  # of parts whose owner is in the range as well
        return found.T

    def unwritten(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """Seconds of writing what the whole program computes where it is read: running sums over parts, `[parts + 1]`.

        Args:
          outputs: of each part the seconds of writing each output.
        """
        each = [float(seconds @ unwritten) for seconds, unwritten in zip(outputs, self._unwritten, strict=True)]
        return np.cumsum([0.0, *each])

    def _pairs(self, cuts: Sequence[Cut], remat: int, *, loosely: bool) -> Iterator[tuple[int, int, int]]:
        """Part, number of its input, and the owner."""
        owners: dict[Hashable, int] = {}
        for part, cut in enumerate(cuts):
            graph, _ = self._solver.graph(part, part + 1, remat)
            keys: list[Hashable] = [*cut.parameters, *(f"input {i}" for i in cut.program_inputs), *cut.received]
            stays = kept_inputs(graph)
            always = len(keys) - len(cut.received)
            for number, (key, value) in enumerate(zip(keys, graph.inputs, strict=True)):
                if key in owners:
                    yield part, number, owners[key]
                if number < always or loosely or value in stays:
                    owners[key] = part
            for value, made in zip(cut.sent, cut.sent_values, strict=True):
                if loosely or is_had_again(graph, made, one_program=self._solver.alone, platform=self._solver.platform):
                    owners[value] = part

    def _is_unwritten(self, cut: Cut, output: int | None) -> bool:
        """Whether the whole program computes an output of a part where it is read."""
        graph, device = self._solver.program.graph, self._solver.submeshes.cluster.device
        sent = [value for value, made in zip(cut.sent, cut.made, strict=True) if made == output]
        makers = [graph.operators[graph.producer[value][0]] for value in sent]
        joined = profile_of(device).joined
        return bool(sent) and all(
            is_fusible(maker) and not maker.is_link and not is_stored(graph, maker, joined=joined) for maker in makers
        )

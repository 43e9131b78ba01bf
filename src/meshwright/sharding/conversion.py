"""Moving a value from the spec it has to the spec its user needs, as a list of collectives.

Forward and backward are decided together: each step names the collective it runs on the value and the one its transpose
runs on the cotangent (the table of `docs/architecture.md`):

    from        to          forward          backward
    partial     replicated  all_reduce       -
    partial     broadcast   all_reduce       all_reduce
    partial     sharded     reduce_scatter   all_gather
    sharded     replicated  all_gather       - (slice)
    sharded     broadcast   all_gather       reduce_scatter
    sharded     sharded     all_to_all       all_to_all
    replicated  sharded     - (slice)        all_gather
    replicated  broadcast   -                all_reduce
    broadcast   sharded     - (slice)        - (zero padding)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from .spec import Spec

Kind = Literal["slice", "reduce_scatter", "all_to_all", "all_reduce", "all_gather", "mark_broadcast"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]


@dataclass(frozen=True, slots=True)
class Step:
    """One move over `axes`.

    Args:
      kind: what happens to the value.
      axes: the axes it happens over, major first.
      from_dim: the dim that stops being split (all_gather, all_to_all).
      to_dim: the dim that starts being split (slice, reduce_scatter, all_to_all).
      partial_cotangent: whether the cotangent is partial over `axes` after the step (the value is `broadcast` then)
        or, for a slice, before it.
      still_split: axes that split the value on the larger side of the step: its buffer is the value over their sizes.
    """

    kind: Kind
    axes: tuple[str, ...]
    from_dim: int | None
    to_dim: int | None
    partial_cotangent: bool
    still_split: tuple[str, ...]

    @property
    def forward(self) -> Collective | None:
        """The collective run on the value, None when no bytes move."""
        return None if self.kind in ("slice", "mark_broadcast") else self.kind

    @property
    def backward(self) -> Collective | None:
        """The collective run on the cotangent, None when no bytes move."""
        match self.kind, self.partial_cotangent:
            case "slice", False:
                return "all_gather"
            case "reduce_scatter", _:
                return "all_gather"
            case "all_to_all", _:
                return "all_to_all"
            case (("all_reduce" | "mark_broadcast"), True):
                return "all_reduce"
            case "all_gather", True:
                return "reduce_scatter"
        return None

    @property
    def strided(self) -> bool:
        """Whether it gathers or scatters along another dim than the first: what goes to one device lies in pieces."""
        dim = self.from_dim if self.kind == "all_gather" else self.to_dim
        return self.kind in ("slice", "reduce_scatter", "all_gather") and dim != 0

    def buffer_fraction(self, sizes: Mapping[str, int]) -> float:
        """Fraction of the whole value in the buffer the collective is priced by, the same forward and backward."""
        fraction = 1.0
        for axis in self.still_split:
            fraction /= sizes[axis]
        return fraction


Conversion = tuple[Step, ...]


@lru_cache(maxsize=1 << 20)
def convert(source: Spec, target: Spec) -> Conversion | None:
    """The steps from `source` to `target`; empty when nothing is to be done, None where no conversion exists.

    None is returned for a target that is partial where the source is not (a value cannot be un-summed) and for
    broadcast to replicated (its cotangent would be counted once per device).

    Moves that make the buffer smaller come first, so that later ones carry fewer bytes: slices and reduce-scatters,
    then all-to-alls, all-reduces, and all-gathers last.
    """
    if source == target:
        return ()
    if len(source.dims) != len(target.dims) or not target.partial <= source.partial:
        return None
    target_dim = {axis: d for d, axes in enumerate(target.dims) for axis in axes}
    if any(axis not in target.broadcast and axis not in target_dim for axis in source.broadcast):
        return None
    walk = _Walk(source, target, target_dim)
    while walk.shrink() or walk.exchange() or walk.sum_up() or walk.gather():
        pass
    walk.mark()
    return tuple(walk.steps)


class _Walk:
    """The state of a value on its way from one spec to another."""

    def __init__(self, source: Spec, target: Spec, target_dim: Mapping[str, int]) -> None:
        self.dims = [list(axes) for axes in source.dims]
        self.partial = set(source.partial)
        self.broadcast = set(source.broadcast)
        self.want = target
        self.target_dim = target_dim
        self.split = set(source.sharded_axes)
        self.steps: list[Step] = []

    def _take(
        self, kind: Kind, axes: tuple[str, ...], *, from_dim: int | None = None, to_dim: int | None = None,
        partial_cotangent: bool = False, still_split: tuple[str, ...],
    ) -> None:  # fmt: skip
        last = self.steps[-1] if self.steps else None
        same = last is not None and (last.kind, last.from_dim, last.to_dim, last.partial_cotangent) == (
            kind, from_dim, to_dim, partial_cotangent,
        )  # fmt: skip
        if same and last is not None and kind == "all_gather":
            # Gathers come off the minor end: the later axis is the major one, and its buffer the larger.
            axes, self.steps[-1:] = (*axes, *last.axes), []
        elif same and last is not None and kind in ("slice", "reduce_scatter"):
            axes, still_split, self.steps[-1:] = (*last.axes, *axes), last.still_split, []
        self.steps.append(Step(kind, axes, from_dim, to_dim, partial_cotangent, still_split))

    def _splits(self) -> tuple[str, ...]:
        return tuple(sorted(self.split))

    def _wanted_next(self, d: int) -> str | None:
        """The axis that dim `d` must gain next, if it has none to lose first."""
        have, want = self.dims[d], self.want.dims[d]
        return want[len(have)] if len(have) < len(want) and list(want[: len(have)]) == have else None

    def _surplus(self, d: int) -> str | None:
        """The minor axis of dim `d` if it must go."""
        have = self.dims[d]
        return have[-1] if have and have != list(self.want.dims[d][: len(have)]) else None

    def shrink(self) -> bool:
        for d in range(len(self.dims)):
            axis = self._wanted_next(d)
            if axis is None or axis in self.split:
                continue
            before = self._splits()
            if axis in self.partial:
                self.partial.discard(axis)
                self._take("reduce_scatter", (axis,), to_dim=d, still_split=before)
            else:
                marked = axis in self.broadcast
                self.broadcast.discard(axis)
                self._take("slice", (axis,), to_dim=d, partial_cotangent=marked, still_split=before)
            self.dims[d].append(axis)
            self.split.add(axis)
            return True
        return False

    def exchange(self) -> bool:
        for d in range(len(self.dims)):
            axis = self._surplus(d)
            to = self.target_dim.get(axis) if axis is not None else None
            if axis is not None and to is not None and self._wanted_next(to) == axis:
                self._take("all_to_all", (axis,), from_dim=d, to_dim=to, still_split=self._splits())
                self.dims[d].pop()
                self.dims[to].append(axis)
                return True
        return False

    def sum_up(self) -> bool:
        axes = sorted(self.partial - self.want.partial - set(self.target_dim))
        for marked in (True, False):
            chosen = tuple(a for a in axes if (a in self.want.broadcast) == marked)
            if chosen:
                self._take("all_reduce", chosen, partial_cotangent=marked, still_split=self._splits())
                self.partial.difference_update(chosen)
                if marked:
                    self.broadcast.update(chosen)
        return bool(axes)

    def gather(self) -> bool:
        for d in range(len(self.dims)):
            axis = self._surplus(d)
            if axis is not None:
                marked = axis in self.want.broadcast
                self.dims[d].pop()
                self.split.discard(axis)
                if marked:
                    self.broadcast.add(axis)
                self._take("all_gather", (axis,), from_dim=d, partial_cotangent=marked, still_split=self._splits())
                return True
        return False

    def mark(self) -> None:
        marks = tuple(sorted(self.want.broadcast - self.broadcast))
        if marks:
            self._take("mark_broadcast", marks, partial_cotangent=True, still_split=self._splits())

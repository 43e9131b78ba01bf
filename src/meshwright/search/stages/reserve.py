"""The memory that a search has to leave free, or may count beyond what there is, learned from plans written out.

Searches count bytes from layouts; the bytes of the resulting programs are known once these are traced. The two differ
most for the head of a model, where several copies of the scores, the largest array, live at once. So the difference is
learned separately for the last stage, for stages that rematerialise nothing, and for all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

# In the same number of microbatches a tenth more than what is too much is taken off what was counted: in relation to
# that the second of these at least, twice as much with each plan that had been too large before, and at most the third.
_TO_SPARE, _LEAST_STEP, _LARGEST_STEP = 1.1, 0.002, 0.1


@dataclass(frozen=True, slots=True)
class MemoryReserve:
    """The bytes of a device that a search leaves free; negative where it counts more than there is.

    >>> MemoryReserve(1e9, 2e9, margin=1.25).limit(10e9, last=True)
    6000000000.0

    Args:
      inner: of any stage but the last.
      final: of the stage with the last layer.
      margin: a device has to hold so many times what is predicted.
      plain: of an inner stage that computes nothing again, where that is more; None where that is not known.
    """

    inner: float = 0.0
    final: float = 0.0
    margin: float = 1.0
    plain: float | None = None

    def is_less_than(self, other: MemoryReserve) -> bool:
        """Whether some stage has more memory than with another reserve."""
        return self.inner < other.inner or self.final < other.final or self._unrepeated < other._unrepeated

    @property
    def _unrepeated(self) -> float:
        """Of an inner stage that computes nothing again."""
        return self.inner if self.plain is None else max(self.inner, self.plain)

    def limit(self, usable_bytes: float, *, last: bool, again: bool = True) -> float:
        """Bytes that may be counted on a device.

        Args:
          usable_bytes: of the device.
          last: whether the stage on it has the last layer.
          again: whether the stage computes anything again.
        """
        inner = self.inner if again else self._unrepeated
        return max(usable_bytes / self.margin - (self.final if last else inner), 1.0)


def nothing_reserved(microbatches: int) -> MemoryReserve:
    """No reserve, in any number of microbatches."""
    del microbatches
    return MemoryReserve()


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenOut:
    """A rank of a plan that was written out.

    Args:
      microbatches: of the plan.
      rank: its number.
      last: whether it has the last layer.
      plain: whether some stage of it computes nothing again, and it has not the last layer.
      counted: bytes on a device.
      peak: what there is.
      usable: of a device.
      fits: whether the plan did; else this rank was too large.
      before: how many plans in this number of microbatches had been too large.
    """

    microbatches: int
    rank: int
    last: bool
    plain: bool
    counted: float
    peak: float
    usable: float
    fits: bool
    before: int


class MissedMemory:
    """The reserve for each number of microbatches, learned from the traced peaks of plans.

    The bytes that a search misses are mostly those of a microbatch: half of them in half a microbatch, and as many in a
    larger one, where the search may find a plan that keeps less. So are those that it counts and no program needs. Once
    a plan in a number of microbatches was written out, what others have shown does not count there; nor, once one was
    too large, what a plan that fits has shown.

    Args:
      margin: what peaks may be off by: a plan is too large from a device's memory over this on.
    """

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._seen: list[_WrittenOut] = []
        self._too_large: Counter[int] = Counter()
        self._extrapolates = True

    @property
    def known(self) -> MissedMemory:
        """The same with nothing reserved in numbers of microbatches in which no plan was too large, and with what was
        counted in vain."""
        same = copy(self)
        same._extrapolates = False
        return same

    def __call__(self, microbatches: int) -> MemoryReserve:
        """The reserve for so many microbatches."""
        inner, final, plain = (
            self._of(microbatches, [one for one in self._seen if (one.last, one.plain) == kind])
            for kind in ((False, False), (True, False), (False, True))
        )
        return MemoryReserve(inner or 0.0, final or 0.0, self._margin, plain)

    def limit_of_rank(self, microbatches: int, rank: int, usable_bytes: float) -> float:
        """The bytes that may be counted on a device of one rank, where all plans have the same ranks: all of them until
        a plan was too large there, since a count may also be too high.

        Args:
          microbatches: of the plans.
          rank: its number.
          usable_bytes: of a device.
        """
        seen = [one for one in self._seen if one.rank == rank]
        missed = self._of(microbatches, seen)
        limit = usable_bytes if missed is None else usable_bytes / self._margin - missed
        return max(limit, usable_bytes if all(one.fits for one in seen) else 1.0)

    def _of(self, microbatches: int, seen: Sequence[_WrittenOut]) -> float | None:
        """The reserve by what was seen; None by nothing."""
        own = [one for one in seen if one.microbatches == microbatches]
        others = [one for one in seen if one.fits != self._extrapolates]
        reserves = [self._by(one, microbatches) for one in [one for one in own if not one.fits] or own or others]
        return max(reserves, default=None)

    def _by(self, one: _WrittenOut, microbatches: int) -> float:
        """The reserve in so many microbatches by one rank of a plan."""
        # What was not seen may be the same for any plan, or grow with what was: the milder of the two is tried in
        # another number of microbatches. What was counted in vain is taken to be the same, which is less.
        part, most = min(one.microbatches / microbatches, 1.0), one.usable / self._margin
        if one.fits:
            return min(part * (one.peak - one.counted), 0.0)
        unseen, share = part * (one.peak - one.counted), part * (1 - one.counted / one.peak)
        limit = max(most - unseen, most * (1 - min(share, 1.0)))
        if microbatches == one.microbatches:
            too_much = max(_TO_SPARE * (one.peak - most), _LEAST_STEP * 2**one.before * one.counted)
            limit = min(limit, one.counted - min(too_much, _LARGEST_STEP * one.counted))
        return most - limit

    def learn(
        self, microbatches: int, counted: Sequence[float], peaks: Sequence[float], usable: Sequence[float],
        plain: Sequence[bool],
    ) -> None:  # fmt: skip
        """Record a plan that was written out, by rank: the counted bytes, the traced peak, the usable bytes, and
        whether some stage rematerialises nothing. Of a plan that is too large ranks that fit are ignored; of plans that
        fit the last one in a number of microbatches counts."""
        ranks = enumerate(zip(counted, peaks, usable, plain, strict=True))
        fits = all(self._margin * peak <= most for peak, most in zip(peaks, usable, strict=True))
        if fits:
            self._seen = [one for one in self._seen if not one.fits or one.microbatches != microbatches]
        for rank, (seen, peak, most, keeps) in ranks:
            if fits or self._margin * peak > most:
                last = rank == len(peaks) - 1
                self._seen.append(
                    _WrittenOut(
                        microbatches=microbatches, rank=rank, last=last, plain=keeps and not last, counted=seen,
                        peak=peak, usable=most, fits=fits, before=self._too_large[microbatches],
                    )
                )  # fmt: skip
        self._too_large[microbatches] += not fits

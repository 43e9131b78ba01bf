"""What a preset takes and keeps at least: what saves looking at most of many settings.

Two bounds, which rule out nothing that could win or fit:

* A pipeline takes at least what any of its ranks does in all microbatches, after what the stages before it do forward
  for the first one and before what these do backward for the last one. Some stages are enough to know that.
* Cutting a microbatch makes no work less, and what it keeps shrinks with it at most. So what a preset takes in few
  microbatches says what it takes and keeps in more of them at least, without tracing those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from ..schedule import make_schedule
from .preset import Preset

# Microbatches for each rank after which what a pipeline keeps in flight does not change.
_STEADY = 4

# Schedules that are priced as another one: what they keep in flight and how long a microbatch takes is the same.
_PRICED_AS: Mapping[str | None, str] = {None: "one_f_one_b", "pipedream": "one_f_one_b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLeast:
    """What a stage takes at least.

    Args:
      forward_seconds: of a microbatch.
      backward_seconds: of a microbatch.
      once_seconds: of a step, beside its microbatches.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    once_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a microbatch, both passes."""
        return self.forward_seconds + self.backward_seconds


def least_step_seconds(stages: Sequence[StageLeast], ranks: int, microbatches: float) -> float:
    """No schedule with a whole backward takes less, whatever it is and however fast values move.

    >>> one = StageLeast(forward_seconds=1.0, backward_seconds=2.0)
    >>> least_step_seconds([one] * 4, 4, 8)
    33.0

    Args:
      stages: in program order, stage s on rank s mod `ranks`.
      ranks: groups of devices.
      microbatches: in a step.
    """
    least = before = after = 0.0
    for rank in range(ranks):
        work = microbatches * sum(stage.seconds for stage in stages[rank::ranks])
        once = max(sum(stage.once_seconds for stage in stages[rank::ranks]), after + stages[0].once_seconds)
        least = max(least, before + work + once)
        before += stages[rank].forward_seconds
        after += stages[rank].backward_seconds
    return least


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to run a stage, with or without rematerialisation, at its least in everything.

    Args:
      seconds: what it takes.
      constant_bytes: on a device.
      kept_bytes: on a device, for each microbatch in flight.
    """

    seconds: StageLeast
    constant_bytes: float
    kept_bytes: float

    def part(self, share: float) -> Way:
        """Of a part of the stage that is this share of it."""
        one = self.seconds
        seconds = StageLeast(
            forward_seconds=share * one.forward_seconds, backward_seconds=share * one.backward_seconds,
            once_seconds=share * one.once_seconds,
        )  # fmt: skip
        return Way(seconds=seconds, constant_bytes=share * self.constant_bytes, kept_bytes=share * self.kept_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What a preset takes at least, in its own number of microbatches and all that are larger.

    Args:
      preset: with all sizes.
      microbatches: of which this is known.
      stages: the ways to run each, the fastest first.
    """

    preset: Preset
    microbatches: int
    stages: tuple[tuple[Way, ...], ...]

    def step_seconds(self, microbatches: int, limit_bytes: Sequence[float]) -> float:
        """What a step of so many microbatches takes at least; infinite if it cannot fit.

        Args:
          microbatches: in a step.
          limit_bytes: what may be held on a device of each rank.
        """
        share, ranks = self.microbatches / microbatches, self.preset.stages
        in_flight = microbatches_in_flight(self.preset, microbatches)
        held = [
            [way.constant_bytes + share * count * way.kept_bytes for way in ways]
            for ways, count in zip(self.stages, in_flight, strict=True)
        ]
        found = []
        for stage, ways in enumerate(self.stages):
            rank = stage % ranks
            left = limit_bytes[rank] - sum(map(min, held[rank::ranks])) + min(held[stage])
            fastest = next((way for way, size in zip(ways, held[stage], strict=True) if size <= left), None)
            if fastest is None:
                return inf
            one = fastest.seconds
            found.append(
                replace(one, forward_seconds=share * one.forward_seconds, backward_seconds=share * one.backward_seconds)
            )
        return least_step_seconds(found, ranks, microbatches)

    def interleaved(self, preset: Preset) -> Floor:
        """The same with each stage in several, which together take and keep no less.

        Args:
          preset: with more stages for each group of devices, and else the same.
        """
        parts = tuple(tuple(way.part(1 / preset.chunks) for way in ways) for ways in self.stages)
        return Floor(preset=preset, microbatches=self.microbatches, stages=parts * preset.chunks)


def microbatches_in_flight(preset: Preset, microbatches: int) -> tuple[int, ...]:
    """How many microbatches each stage of a preset holds at once.

    >>> from .families import megatron
    >>> microbatches_in_flight(megatron(pp=4), 64)
    (4, 3, 2, 1)
    """
    schedule = searched_schedule(preset)
    return _in_flight(schedule, preset.stages, preset.chunks, microbatches)


@lru_cache(maxsize=1 << 10)
def _in_flight(schedule: str, ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    if schedule == "gpipe":
        return (microbatches,) * ranks
    count = min(microbatches, _STEADY * chunks * ranks)
    options = {"chunks": chunks} if chunks > 1 else {}
    return make_schedule(schedule, ranks * chunks, count, **options).in_flight


def searched_schedule(preset: Preset) -> str:
    """The schedule as which that of a preset is priced; of several stages on each rank its interleaved form."""
    if preset.chunks > 1:
        return "interleaved_one_f_one_b"
    return _PRICED_AS.get(preset.schedule, preset.schedule or "one_f_one_b")

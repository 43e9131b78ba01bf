"""What devices hold: stages that share devices keep their state side by side and share one workspace."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from ..plan import Plan
from .table import format_bytes, format_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Predicted memory of the devices of a rank.

    Args:
      stages: on it, counted from 0.
      held_bytes: on one device, at most.
      limit_bytes: what a device may use; infinite where nothing limits it.
    """

    stages: tuple[int, ...]
    held_bytes: float
    limit_bytes: float

    @property
    def share(self) -> float:
        """How much of its limit a device holds; 0 where there is none."""
        return self.held_bytes / self.limit_bytes if self.limit_bytes > 0 and isfinite(self.limit_bytes) else 0.0


def rank_memory(plan: Plan) -> tuple[RankMemory, ...]:
    """The memory of each rank of a plan, in the order of their first stages."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for number, stage in enumerate(plan.stages):
        ranks.setdefault(stage.devices, []).append(number)
    found = []
    for numbers in ranks.values():
        stages = [plan.stages[number] for number in numbers]
        own = sum(stage.memory.total - stage.memory.workspace for stage in stages)
        found.append(
            RankMemory(
                stages=tuple(numbers), held_bytes=own + max(stage.memory.workspace for stage in stages),
                limit_bytes=min(stage.memory_limit_bytes for stage in stages),
            )
        )  # fmt: skip
    return tuple(found)


def memory_words(held_bytes: float, limit_bytes: float, of: str = "") -> str:
    """Bytes, and how much `of` their limit that is.

    >>> memory_words(2.0**30, 2.0**31), memory_words(2.0**30, 2.0**31, " of the limit")
    ('1.0 GiB (50.0 %)', '1.0 GiB (50.0 % of the limit)')
    """
    limited = limit_bytes > 0 and isfinite(limit_bytes)
    return format_bytes(held_bytes) + (f" ({format_percent(held_bytes / limit_bytes)}{of})" if limited else "")

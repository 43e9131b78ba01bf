"""What the plans of one search hold once they are written out, and what the search misses of that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import inf

from .cluster import Cluster
from .errors import MemoryExceeded, size_words
from .one_stage_planning import MARGIN
from .plan import Plan
from .presets.written import held_bytes, usable_bytes, written_out
from .program.staged import StagedProgram
from .runtime.pipeline.stage_memory import StageMemory
from .search.memory_reserve import MissedMemory


class PlanMemory:
    """The memory of plans for one program, each stage that is like another counted once.

    Args:
      platform: of the devices.
      tell: called with a few words before programs are traced.

    Attributes:
      missed: what the search may not count, as plans that are too large have shown.
      leanest: the least that the fullest device of a plan that was too large has to have, bytes.
    """

    def __init__(self, platform: str, tell: Callable[[str], None]) -> None:
        self.missed = MissedMemory(MARGIN)
        self.leanest = inf
        self._platform, self._tell = platform, tell
        self._known: dict[Hashable, StageMemory] = {}

    def written_out(self, plan: Plan, program: StagedProgram, counted: Sequence[float]) -> tuple[Plan, bool]:
        """The plan with what its programs need, and whether that fits.

        Args:
          plan: as it was found.
          program: cut into its stages.
          counted: by the search, on a device of each rank.
        """
        self._tell("predicting memory")
        plan = written_out(plan, program, self._platform, known=self._known)
        return plan, self._fits(plan, held_bytes(plan), counted)

    def too_large(self, cluster: Cluster) -> MemoryExceeded:
        """What to say where no plan fits.

        Args:
          cluster: that they were for.
        """
        device = cluster.device
        return MemoryExceeded(
            refused=f"a plan of several stages for {cluster.num_devices} x {device.kind}",
            got=f"{size_words(device.usable_memory_bytes)} usable on a device",
            needed=f"about {size_words(self.leanest)} on a device, the predicted peak of the leanest plan found",
            where="the stage search", try_="more devices, a smaller batch",
        )  # fmt: skip

    def _fits(self, plan: Plan, peaks: Sequence[float], counted: Sequence[float]) -> bool:
        """Whether these peaks do; else what was missed is learned."""
        usable = usable_bytes(plan)
        if all(MARGIN * peak <= most for peak, most in zip(peaks, usable, strict=True)):
            return True
        self.leanest = min(self.leanest, MARGIN * max(peaks))
        self.missed.learn(plan.microbatches, counted, peaks, usable, _plain_ranks(plan))
        return False


def _plain_ranks(plan: Plan) -> list[bool]:
    """Of each rank, whether some stage of it computes nothing again."""
    found: dict[tuple[int, ...], bool] = {}
    for stage in plan.stages:
        found[stage.devices] = found.get(stage.devices, False) or not stage.rematerialised
    return list(found.values())

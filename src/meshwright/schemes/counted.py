"""What a device sends and holds under a planned preset, counted as its plan counts it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ..plan import Memory
from ..search.intra.account import issued
from ..search.result import SearchResult
from ..simulate.of_plan import plan_schedule
from .formulas import KINDS, evaluate, sent

# Mesh axes of presets, by the letter of their size in formulas.
_LETTERS = {"data": "d", "model": "t", "expert": "e"}

_KINDS = (*KINDS, "workspace")

# What collectives are counted by: kind, sizes of their axes, when; as of `formulas.Move`.
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One device of a rank, in one step.

    Args:
      buffers: bytes in the buffers of its collectives.
      sent_bytes: what it sends of them.
      memory: what it holds at its peak.
    """

    buffers: Mapping[Key, float]
    sent_bytes: float
    memory: Memory


def counted_ranks(found: SearchResult) -> list[Counted]:
    """A device of every rank.

    Args:
      found: the plan of a preset, with the stages that the search solved.
    """
    plan, ranks = found.plan, plan_schedule(found.plan).stage_ranks
    sizes = {_LETTERS[name]: size for name, size in plan.stages[0].mesh}
    buffers: list[dict[Key, float]] = [defaultdict(float) for _ in range(max(ranks) + 1)]
    for stage, rank in zip(found.stages, ranks, strict=True):
        solved = stage.option.tag
        for one in issued(solved.problem, solved.chosen):
            letters = "".join(sorted(_LETTERS[axis] for axis in one.axes if solved.problem.sizes[axis] > 1))
            kind = "central" if (one.kind, one.when) == ("permute", "step") else one.kind
            if letters:
                buffers[rank][kind, letters, one.when] += one.count * one.size_bytes
    for move in plan.transfers:
        each = plan.microbatches * move.bytes / len(plan.stages[move.source].devices)
        buffers[ranks[move.source]]["send", "p", "forward"] += each
        buffers[ranks[move.target]]["send", "p", "backward"] += each * move.differentiated
    counted = []
    for rank, mine in enumerate(buffers):
        held = [stage.memory for stage, at in zip(plan.stages, ranks, strict=True) if at == rank]
        counted.append(
            Counted(
                buffers=mine,
                sent_bytes=sum(evaluate(sent(*key[:2], "S"), {**sizes, "S": size}) for key, size in mine.items()),
                memory=Memory(**{kind: sum(getattr(one, kind) for one in held) for kind in _KINDS}),
            )
        )
    return counted

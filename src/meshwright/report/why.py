"""Why a plan takes what it takes: where the seconds of its devices go, and what binds.

The plan is simulated once more from the numbers it carries; nothing is priced anew. Of a step, every rank (the devices
of a stage; of interleaved stages, of all that share them) spends

* compute, as its stages say,
* collectives, as far as neither compute hides them nor they each other: what the step takes beyond compute and updates,
  and no more than all of them; what is hidden is told beside,
* other work: the update, and what kernels and sums of gradients cost beyond all that,
* transfers: how much shorter the whole step would be if values moved between stages in no time,
* bubble: the rest, in which it waits for other ranks to have work for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from ..plan import Plan, Stage
from ..simulate import Timeline, plan_timing, simulate_plan, step_seconds
from .table import format_bytes, format_percent, format_seconds, format_table

# From this share of the limit on, memory is said to bind.
BINDS = 0.9

# Stages whose slowest takes no longer than the mean by this much are said to be balanced.
_BALANCED = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Where a step of one rank goes, seconds; the fields add up to the step.

    Args:
      stages: on it.
      compute: of products, convolutions and elementwise work.
      collectives: of its stages, and sums of gradients between stages; what nothing hides.
      other: update, launches, sums of gradients.
      transfers: that hold up the whole pipeline.
      bubble: waiting for work.
      hidden: collectives behind compute; no part of the step's time.
    """

    stages: tuple[int, ...]
    compute: float
    collectives: float
    other: float
    transfers: float
    bubble: float
    hidden: float

    @property
    def busy(self) -> float:
        """At work."""
        return self.compute + self.collectives + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What can be said of a plan.

    Args:
      ranks: where their time goes.
      balance: mean over largest work of a rank, 1 for equal work.
      binds: what a faster step would have to change, the weightiest first, in words.
    """

    ranks: tuple[RankSeconds, ...]
    balance: float
    binds: tuple[str, ...]


def why(plan: Plan) -> Why | None:
    """Where the time of a plan goes; None for one that does nothing.

    Args:
      plan: priced, of one stage or several.

    Raises:
      PlanError: if nobody has priced it.
    """
    if not any(stage.forward_seconds for stage in plan.stages):
        return None
    timeline = simulate_plan(plan)
    step = timeline.step_seconds
    exposed = step - _without_transfers(plan, timeline)
    ranks = []
    for rank, busy in enumerate(timeline.busy_seconds):
        mine = [n for n, held_by in enumerate(timeline.schedule.stage_ranks) if held_by == rank]
        stages = [plan.stages[n] for n in mine]
        compute = min(sum(stage.compute_seconds for stage in stages), busy)
        updates = min(sum(stage.update_seconds for stage in stages), busy - compute)
        inside = sum(stage.communication_seconds for stage in stages)
        between = sum(stage.synchronise_seconds for stage in stages if _is_shared(stage, plan))
        collectives = min(inside + between, busy - compute - updates)
        ranks.append(
            RankSeconds(
                stages=tuple(mine), compute=compute, collectives=collectives, other=busy - compute - collectives,
                transfers=min(exposed, step - busy), bubble=max(step - busy - exposed, 0.0),
                hidden=max(inside - collectives, 0.0),
            )
        )  # fmt: skip
    largest = max(rank.busy for rank in ranks)
    balance = sum(rank.busy for rank in ranks) / (len(ranks) * largest) if largest > 0 else 1.0
    return Why(ranks=tuple(ranks), balance=balance, binds=tuple(_binds(plan, ranks, step, balance)))


def _is_shared(stage: Stage, plan: Plan) -> bool:
    """Whether other stages have parameters of this one, so that gradients are summed between stages."""
    names = {parameter.name for parameter in stage.parameters}
    return any(names & {p.name for p in other.parameters} for other in plan.stages if other is not stage)


def _without_transfers(plan: Plan, timeline: Timeline) -> float:
    """Seconds of a step if values moved between stages in no time."""
    timing = plan_timing(plan)
    edges = tuple(replace(edge, forward_seconds=0.0, backward_seconds=0.0) for edge in timing.edges)
    return min(step_seconds(timeline.schedule, replace(timing, edges=edges)), timeline.step_seconds)


def _binds(plan: Plan, ranks: Sequence[RankSeconds], step: float, balance: float) -> Iterator[str]:
    slowest = max(ranks, key=lambda rank: rank.busy)
    shares = {
        "compute": slowest.compute, "exposed collectives": slowest.collectives,
        "update, launches and sums of gradients": slowest.other, "transfers between stages": slowest.transfers,
        "the bubble": slowest.bubble,
    }  # fmt: skip
    told = [f"{name} {format_percent(s / step)}" for name, s in sorted(shares.items(), key=lambda x: -x[1]) if s > 0]
    yield f"the step of the busiest devices (stage {_numbers(slowest.stages)}): {', '.join(told)}"
    if balance * _BALANCED < 1:
        yield f"work is uneven: the others wait for stage {_numbers(slowest.stages)}, balance {format_percent(balance)}"
    elif len(ranks) > 1:
        yield f"work is even: balance {format_percent(balance)}"
    full = [number for number, stage in enumerate(plan.stages) if memory_share(stage) >= BINDS]
    if full:
        most = max(memory_share(plan.stages[number]) for number in full)
        yield f"memory binds on stage {_numbers(full)}: up to {format_percent(most)} of what a device has"
    again = [number for number, stage in enumerate(plan.stages) if stage.rematerialised]
    if again:
        forward = {n: plan.microbatches_of(n) * plan.stages[n].forward_seconds for n in again}
        work = max(sum(forward.get(n, 0.0) for n in rank.stages) for rank in ranks) / step
        yield (
            f"memory makes stage {_numbers(again)} rematerialise: up to {format_percent(work)} of the step is spent on "
            f"activations that are computed again"
        )
    if not full and not again:
        free = min(stage.memory_limit_bytes - stage.memory.total for stage in plan.stages)
        if isfinite(free):
            yield f"memory does not bind: every device has {format_bytes(free)} or more left"


def memory_share(stage: Stage) -> float:
    """How much of its limit a stage holds; 0 where there is none."""
    limit = stage.memory_limit_bytes
    return stage.memory.total / limit if limit > 0 and isfinite(limit) else 0.0


def why_table(found: Why) -> str:
    """A row for each rank; equal neighbours in one."""
    rows: list[tuple[tuple[int, ...], tuple[str, ...]]] = []
    for rank in found.ranks:
        step = rank.busy + rank.transfers + rank.bubble
        parts = (rank.compute, rank.collectives, rank.other, rank.transfers, rank.bubble)
        shares = [f"{format_seconds(s)} ({format_percent(s / step)})" if step > 0 else "-" for s in parts]
        cells = (*shares, format_seconds(rank.hidden))
        if rows and rows[-1][1] == cells:
            rows[-1] = ((*rows[-1][0], *rank.stages), cells)
        else:
            rows.append((rank.stages, cells))
    heads = (
        "stages", "compute", "exposed collectives", "update and other", "waiting for transfers", "bubble",
        "collectives hidden",
    )  # fmt: skip
    return format_table(heads, [(_numbers(stages), *cells) for stages, cells in rows], left=1)


def _numbers(stages: Sequence[int]) -> str:
    """Stages, counted from 1, neighbours together.

    >>> _numbers([0, 1, 2, 5])
    '1 to 3, 6'
    """
    runs: list[list[int]] = []
    for number in sorted(stages):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0] + 1) if len(run) == 1 else f"{run[0] + 1} to {run[-1] + 1}" for run in runs)

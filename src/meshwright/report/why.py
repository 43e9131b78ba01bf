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
from ..plan.words import number_words, stage_words
from ..simulate import Timeline, plan_timing, simulate_plan, step_seconds
from .groups import grouped
from .memory import rank_memory
from .table import format_bytes, format_percent, format_seconds, format_table

# From this share of the limit on, memory is said to bind.
BINDS = 0.9

# A smaller share of a step is printed as 0.0 %, and not at all among what binds.
_SHOWN = 0.0005

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
    noun = "replica" if plan.shares else "stage"
    # Where stages share devices these have the number of their rank: all of their stages would be long to say.
    shared = any(len(rank.stages) > 1 for rank in ranks)
    busiest = stage_words([ranks.index(slowest)], "rank") if shared else stage_words(slowest.stages, noun)
    told = [
        f"{name} {format_percent(s / step)}"
        for name, s in sorted(shares.items(), key=lambda x: -x[1])
        if s >= _SHOWN * step
    ]
    yield f"the step of the busiest devices ({busiest}): {', '.join(told)}"
    if balance * _BALANCED < 1:
        yield f"work is uneven: the others wait for {busiest}, balance {format_percent(balance)}"
    elif len(ranks) > 1:
        yield f"work is even: balance {format_percent(balance)}"
    memory = rank_memory(plan)
    full = [number for number, rank in enumerate(memory) if rank.share >= BINDS]
    if full:
        stages = [stage for number in full for stage in memory[number].stages]
        most = max(memory[number].share for number in full)
        where = stage_words(full, "rank") if shared else stage_words(stages, noun)
        yield f"memory binds on {where}: up to {format_percent(most)} of what a device has"
    again = [number for number, stage in enumerate(plan.stages) if stage.remat == "layer"]
    cheap = [number for number, stage in enumerate(plan.stages) if stage.remat == "selective"]
    if cheap:
        yield f"memory makes {stage_words(cheap, noun)} compute cheap results again; those of products are kept"
    if again:
        forward = {n: plan.microbatches_of(n) * plan.stages[n].forward_seconds for n in again}
        work = max(sum(forward.get(n, 0.0) for n in rank.stages) for rank in ranks) / step
        yield (
            f"memory makes {stage_words(again, noun)} rematerialise: up to {format_percent(work)} of the step is spent "
            f"on activations that are computed again"
        )
    if not full and not again and not cheap:
        free = min(rank.limit_bytes - rank.held_bytes for rank in memory)
        if isfinite(free):
            yield f"memory does not bind: every device has {format_bytes(free)} or more left"


def why_table(found: Why, *, noun: str = "stage", width: int | None = None) -> str:
    """A row for ranks of which the same is printed, called by their stages where each has only one; hidden collectives
    only where there are any.

    Args:
      found: of a plan.
      noun: stage or replica.
      width: of the page, characters.
    """
    shared = any(len(rank.stages) > 1 for rank in found.ranks)
    of = "ranks" if shared else f"{noun}s"
    heads = (of, "compute", "exposed collectives", "update and other", "transfers", "bubble")
    hidden = any(rank.hidden for rank in found.ranks)
    rows: list[tuple[str, ...]] = []
    for ranks, cells in grouped([_cells(rank, hidden=hidden) for rank in found.ranks]):
        numbers = ranks if shared else [stage for rank in ranks for stage in found.ranks[rank].stages]
        rows.append((number_words(numbers), *cells))
    return format_table((*heads, *(["hidden collectives"] if hidden else [])), rows, width=width)


def _cells(rank: RankSeconds, *, hidden: bool) -> tuple[str, ...]:
    step = rank.busy + rank.transfers + rank.bubble
    parts = (rank.compute, rank.collectives, rank.other, rank.transfers, rank.bubble)
    shares = [f"{format_seconds(s)} ({format_percent(s / step)})" if step > 0 else "-" for s in parts]
    return (*shares, *([format_seconds(rank.hidden)] if hidden else []))

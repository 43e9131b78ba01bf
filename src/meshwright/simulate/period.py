"""The steady state of a pipeline in closed form: seconds a microbatch when it runs for ever.

In a schedule that alternates forwards and backwards, stage i starts a microbatch's forward K_i - 1 microbatches before
its backward. Everything then moves in circles: from the forward of stage i up the edges to stage j >= i, there over to
a backward K_j - 1 microbatches older, down the edges to stage i and over to a forward K_i newer. One turn advances
K_i - K_j + 1 microbatches, so none can take less than

    (sum of f_k + b_k over i..j + both ways of the transfers between + w_i) / (K_i - K_j + 1)

seconds, b being input gradients and w weight gradients when they are split (w_i = 0 otherwise), and updates of an
asynchronous schedule counting as w_i. The period is the largest of these over all i <= j, or a transfer that alone
takes longer (a maximum cycle mean: Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992; larger
circles split into these). With j = i it is the time of the slowest stage.

Cost: quadratic in the stages. Known limits: chains of stages, one on each rank; schedules that alternate.
"""

from __future__ import annotations

from ..errors import PlanError
from ..schedule import Kind, Mode, Schedule, neighbours
from .events import channel_seconds, slot_seconds
from .timing import Timing


def steady_period_seconds(schedule: Schedule, timing: Timing) -> float:
    """Seconds a microbatch in the steady state, transfers being asynchronous.

    >>> from meshwright.schedule import one_f_one_b
    >>> timing = Timing.uniform(stages=4, forward_seconds=1, backward_seconds=2, transfer_seconds=0.5)
    >>> steady_period_seconds(one_f_one_b(4, 64), timing)
    3.75

    Args:
      schedule: one that alternates forwards and backwards on a chain of stages, with microbatches enough to do so.
      timing: of its stages and edges.

    Raises:
      PlanError: the schedule is none of those, or the timing lacks what it has.
    """
    depths = _depths(schedule)
    table, channels = slot_seconds(schedule, timing), channel_seconds(schedule, timing)
    split, asynchronous = schedule.splits_backward, schedule.mode is Mode.ASYNCHRONOUS
    kinds = list(Kind)
    before_send = (Kind.FORWARD, Kind.BACKWARD_INPUT if split else Kind.BACKWARD)
    after_send = ((Kind.BACKWARD_WEIGHT,) if split else ()) + ((Kind.UPDATE,) if asynchronous else ())
    through, behind = (
        [sum(table[stage * len(kinds) + kinds.index(kind)] for kind in some) for stage in range(schedule.stages)]
        for some in (before_send, after_send)
    )
    period = max(channels, default=0.0)
    for first, depth in enumerate(depths):
        turn = behind[first]
        for last in range(first, schedule.stages):
            turn += through[last]
            if last > first:
                turn += channels[2 * last - 2] + channels[2 * last - 1]
            period = max(period, turn / (depth - depths[last] + 1))
    return period


def _depths(schedule: Schedule) -> tuple[int, ...]:
    """K of each stage: its forwards before its first backward, that one's own included."""
    if schedule.edges != neighbours(schedule.stages) or len(schedule.ranks) != schedule.stages:
        raise _refusal(f"{len(schedule.ranks)} ranks, edges {', '.join(map(str, schedule.edges))}", schedule)
    depths = []
    for program in schedule.ranks:
        first = next((place for place, one in enumerate(program) if one.kind is not Kind.FORWARD), len(program))
        if first >= schedule.microbatches and schedule.microbatches > 1:
            raise _refusal(f"{first} forwards before any backward", schedule)
        depths.append(first)
    return tuple(depths)


def _refusal(got: str, schedule: Schedule) -> PlanError:
    return PlanError(
        refused=f"a period in closed form of {schedule.name}",
        got=got,
        needed="a chain of stages, one on each rank, that alternate forwards and backwards",
        where=str(schedule),
        try_="more microbatches, or the slope of `simulate` over two numbers of microbatches",
    )

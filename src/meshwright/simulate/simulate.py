"""The predicted timeline of a schedule.

A rank runs its instructions one after the other, in order, each as soon as what it reads has arrived. What happens on
the links between ranks is one of two things:

* `"asynchronous"` (the default): a value leaves as soon as it exists, beside the compute of both ends. Each direction
  of each edge is a channel that carries one value at a time, in order.
* `"blocking"`: a transfer occupies both ranks, in the one order of `schedule.global_order`, as when each process makes
  blocking calls.

Known limits: edges do not share links (a skip connection and a neighbour's transfer both get the whole link); compute
does not slow down while a transfer runs beside it; a stage's collectives are part of its seconds.
"""

from __future__ import annotations

from typing import Literal

from ..errors import PlanError
from ..schedule import Schedule
from .events import run_events
from .timeline import Timeline
from .timing import Timing


def simulate(
    schedule: Schedule, timing: Timing, *, transfers: Literal["asynchronous", "blocking"] = "asynchronous"
) -> Timeline:
    """Run a schedule with given times.

    >>> from meshwright.schedule import one_f_one_b
    >>> timing = Timing.uniform(stages=4, forward_seconds=1, backward_seconds=2, transfer_seconds=0.5)
    >>> simulate(one_f_one_b(4, 64), timing).step_seconds
    251.0

    Args:
      schedule: sound, as all schedules made by functions of `meshwright.schedule` are.
      timing: of its stages and edges.
      transfers: beside the compute of both ends ("asynchronous") or in its place ("blocking").

    Returns:
      When everything starts and ends; what follows from that is computed when asked for.

    Raises:
      PlanError: the timing lacks a stage, an edge or the parts of a split backward, or updates of an asynchronous
        schedule are to wait for all stages.
      ScheduleError: the schedule deadlocks.
    """
    if transfers not in ("asynchronous", "blocking"):
        raise PlanError(
            refused="to simulate",
            got=f"transfers={transfers!r}",
            needed="'asynchronous' or 'blocking'",
            where="simulate(transfers=...)",
            try_="leaving it out",
        )
    blocking = transfers == "blocking"
    events = run_events(schedule, timing, blocking=blocking)
    return Timeline(schedule=schedule, timing=timing, blocking=blocking, raw=events)

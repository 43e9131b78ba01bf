"""A timeline as text: what every rank does over the step, and what the step's time is made of.

Shows the numbers of the timeline and computes none.
"""

from __future__ import annotations

from ..simulate import Timeline
from .table import format_bytes, format_percent, format_seconds, format_table

# What a column of the chart shows: the instruction that takes most of it, by its microbatch.
_MARKS = {"forward": "0123456789", "backward": "abcdefghij", "backward_input": "abcdefghij", "backward_weight": "w"}
_OTHER = {"synchronise": "s", "update": "u"}
_IDLE = "."


def timeline_text(timeline: Timeline, *, width: int = 96) -> str:
    """The timeline as a chart, a row for each rank, with a table below it.

    >>> from meshwright.schedule import gpipe
    >>> from meshwright.simulate import Timing, simulate
    >>> timing = Timing.uniform(stages=2, forward_seconds=1.0, backward_seconds=1.0)
    >>> print(timeline_text(simulate(gpipe(2, 3), timing), width=8).splitlines()[0])
    rank 1  012..cba

    Args:
      timeline: to show.
      width: columns of the chart.
    """
    ranks = len(timeline.schedule.ranks)
    head = len(f"rank {ranks}")
    lines = [f"{f'rank {rank + 1}':{head}}  {row}" for rank, row in enumerate(_rows(timeline, width))]
    lines.append("forwards by the last digit of their microbatch, backwards a to j, w weight gradients,")
    lines.append("s synchronise, u update, . idle")
    parts = [
        f"step {format_seconds(timeline.step_seconds)}",
        f"bubbles {format_percent(timeline.bubble_fraction)}",
        f"exposed communication {format_seconds(timeline.exposed_communication_seconds)}",
    ]
    return "\n".join([*lines, "", f"predicted: {', '.join(parts)}", "", _table(timeline)])


def _rows(timeline: Timeline, width: int) -> list[str]:
    column = timeline.step_seconds / width if timeline.step_seconds > 0 else 1.0
    shares: list[list[dict[str, float]]] = [[{} for _ in range(width)] for _ in timeline.schedule.ranks]
    for event in timeline.events:
        first = min(int(event.start_seconds / column), width - 1)
        last = min(int(event.end_seconds / column), width - 1)
        marks = _MARKS.get(event.kind, _OTHER.get(event.kind, "?"))
        mark = marks[(event.microbatch or 0) % len(marks)]
        for place in range(first, last + 1):
            start, end = max(event.start_seconds, place * column), min(event.end_seconds, (place + 1) * column)
            row = shares[event.rank][place]
            row[mark] = row.get(mark, 0.0) + max(0.0, end - start)
    return ["".join(_most(column, share) for share in row) for row in shares]


def _most(column: float, share: dict[str, float]) -> str:
    """The mark of what takes most of a column."""
    idle = column - sum(share.values())
    mark = max(share, key=lambda one: (share[one], one), default=_IDLE)
    return mark if share.get(mark, 0.0) >= idle else _IDLE


def _table(timeline: Timeline) -> str:
    rows = [
        (str(rank + 1), format_seconds(busy), format_percent(busy / timeline.step_seconds), format_bytes(peak))
        for rank, (busy, peak) in enumerate(zip(timeline.busy_seconds, timeline.peak_bytes, strict=True))
    ]
    return format_table(("rank", "at work", "of the step", "peak memory of a device"), rows, left=1)

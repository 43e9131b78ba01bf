"""A timeline as a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is the Trace Event Format in JSON: one track for each rank, one for each direction of each edge, arrows from
an instruction over a transfer to the instruction that reads it, and a counter of memory for each rank. What lies on the
critical path says so in its arguments. Times in the file are microseconds, as the format asks.

Shows the numbers of the timeline and computes none.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from ..schedule import Direction
from ..simulate import Event, Timeline, TransferEvent

_RANKS, _LINKS = 1, 2
_READERS = {
    Direction.FORWARD: ("forward",),
    Direction.BACKWARD: ("backward", "backward_input"),
}
_VALUES = {Direction.FORWARD: "activations", Direction.BACKWARD: "cotangents"}


def write_trace(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write the trace of a timeline.

    Args:
      timeline: to show.
      path: of the file, replaced if it exists.

    Raises:
      OSError: it cannot be written.
    """
    Path(path).write_text(json.dumps(timeline_trace(timeline), separators=(",", ":")), encoding="utf-8")


def timeline_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace of a timeline as the object that goes into the file.

    >>> from meshwright.schedule import inference
    >>> from meshwright.simulate import Timing, simulate
    >>> timing = Timing.uniform(stages=1, forward_seconds=0.5, backward_seconds=1.0)
    >>> trace = timeline_trace(simulate(inference(1, 1), timing))
    >>> [(e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    [('forward 0', 0.0, 500000.0)]
    """
    critical = set(timeline.critical_path)
    edges = timeline.schedule.edges
    tracks = {(edge, way): 2 * i + j for i, edge in enumerate(edges) for j, way in enumerate(Direction)}
    used = {(one.edge, one.direction) for one in timeline.transfers}
    records = _names(
        timeline, {f"{edge} {_VALUES[way]}": tracks[edge, way] for edge, way in tracks if (edge, way) in used}
    )
    for event in timeline.events:
        microbatch = "" if event.microbatch is None else f" {event.microbatch}"
        where = {"pid": _RANKS, "tid": event.rank}
        records.append(_slice(event, f"{event.kind}{microbatch}", event.kind, where, {"stage": event.stage}, critical))
    for one in timeline.transfers:
        where = {"pid": _LINKS, "tid": tracks[one.edge, one.direction]}
        name = f"{_VALUES[one.direction]} {one.microbatch}"
        records.append(_slice(one, name, "transfer", where, {"edge": str(one.edge)}, critical))
    records += _arrows(timeline, tracks)
    for rank, curve in enumerate(timeline.memory):
        for seconds, held in curve:
            count = {"name": f"rank {rank} memory", "ph": "C", "ts": _microseconds(seconds), "pid": _RANKS}
            records.append({**count, "args": {"MiB": held / 2**20}})
    return {"traceEvents": records, "displayTimeUnit": "ms", "otherData": {"schedule": str(timeline.schedule)}}


def _names(timeline: Timeline, links: dict[str, int]) -> list[dict[str, Any]]:
    """What the tracks are called, and their order."""
    ranks = {f"rank {rank}": rank for rank in range(len(timeline.schedule.ranks))}
    records: list[dict[str, Any]] = []
    for pid, process, threads in ((_RANKS, "ranks", ranks), (_LINKS, "links", links)):
        if not threads:
            continue
        records.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}})
        for name, tid in threads.items():
            records.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
            order = {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            records.append(order)
    return records


def _slice(
    event: Event | TransferEvent,
    name: str,
    category: str,
    where: dict[str, int],
    arguments: dict[str, Any],
    critical: set[Event | TransferEvent],
) -> dict[str, Any]:
    start, end = _microseconds(event.start_seconds), _microseconds(event.end_seconds)
    arguments = {**arguments, "microbatch": event.microbatch, "critical": event in critical}
    return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": end - start, **where, "args": arguments}


def _arrows(timeline: Timeline, tracks: dict[tuple[Any, Direction], int]) -> list[dict[str, Any]]:
    """From the instruction that computes a value over its transfer to the one that reads it."""
    at = {(event.kind, event.stage, event.microbatch): event for event in timeline.events}

    def find(one: TransferEvent, stage: int) -> Event:
        kinds = _READERS[one.direction]
        return next(at[kind, stage, one.microbatch] for kind in kinds if (kind, stage, one.microbatch) in at)

    records = []
    for number, one in enumerate(timeline.transfers):
        stages = (one.edge.source, one.edge.target)
        sender, receiver = stages if one.direction is Direction.FORWARD else stages[::-1]
        common = {"name": "value", "cat": "value", "id": number}
        stops: tuple[tuple[str, float, int, int], ...] = (
            ("s", find(one, sender).start_seconds, _RANKS, one.sender),
            ("t", one.start_seconds, _LINKS, tracks[one.edge, one.direction]),
            ("f", find(one, receiver).start_seconds, _RANKS, one.receiver),
        )
        for phase, seconds, pid, tid in stops:
            # "e": the arrow ends in the slice around its time, not in the next one.
            ending = {"bp": "e"} if phase == "f" else {}
            records.append({**common, "ph": phase, "ts": _microseconds(seconds), "pid": pid, "tid": tid, **ending})
    return records


def _microseconds(seconds: float) -> float:
    return seconds * 1e6

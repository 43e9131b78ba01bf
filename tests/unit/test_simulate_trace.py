"""The trace file shows the timeline's numbers, in the form Perfetto reads."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.report.trace import timeline_trace, write_trace
from meshwright.schedule import Schedule, inference, interleaved_one_f_one_b, one_f_one_b, pipedream, zero_bubble
from meshwright.simulate import Timeline, Timing, simulate


def timeline_of(schedule: Schedule) -> Timeline:
    timing = Timing.uniform(
        stages=schedule.stages, forward_seconds=1.0, backward_seconds=2.0, weight_seconds=1.0, transfer_seconds=0.5
    )
    stages = tuple(replace(stage, constant_bytes=2.0**20, in_flight_bytes=2.0**19) for stage in timing.stages)
    return simulate(schedule, replace(timing, stages=stages))


@pytest.mark.parametrize(
    "schedule",
    [
        one_f_one_b(3, 4),
        pipedream(2, 3),
        zero_bubble(3, 4),
        interleaved_one_f_one_b(4, 4, chunks=2),
        inference(2, 2),
        one_f_one_b(1, 2),
    ],
    ids=str,
)
def test_a_trace_shows_all_and_only_what_the_timeline_says(schedule: Schedule) -> None:
    timeline = timeline_of(schedule)
    records = timeline_trace(timeline)["traceEvents"]
    slices = [r for r in records if r["ph"] == "X"]
    assert len(slices) == len(timeline.events) + len(timeline.transfers)
    assert sum(r["args"]["critical"] for r in slices) == len(timeline.critical_path)
    assert max(r["ts"] + r["dur"] for r in slices) == timeline.step_seconds * 1e6
    shown = Counter((r["tid"], r["cat"], r["ts"], r["dur"]) for r in slices if r["cat"] != "transfer")
    told = Counter(
        (e.rank, e.kind, e.start_seconds * 1e6, (e.end_seconds - e.start_seconds) * 1e6) for e in timeline.events
    )
    assert shown == told
    # Every arrow starts, passes and ends inside a slice of the track it names.
    arrows = [r for r in records if r["ph"] in "stf"]
    assert len(arrows) == 3 * len(timeline.transfers)
    for arrow in arrows:
        assert any(
            (s["pid"], s["tid"]) == (arrow["pid"], arrow["tid"]) and s["ts"] <= arrow["ts"] < s["ts"] + s["dur"]
            for s in slices
        )
    counters = [r for r in records if r["ph"] == "C"]
    assert max(r["args"]["MiB"] for r in counters) * 2**20 == max(timeline.peak_bytes)
    tracks = {(r["pid"], r["tid"]) for r in slices}
    assert {(r["pid"], r["tid"]) for r in records if r.get("name") == "thread_name"} == tracks


def test_a_trace_is_written_as_json(tmp_path: Path) -> None:
    timeline = timeline_of(one_f_one_b(2, 2))
    write_trace(timeline, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == timeline_trace(timeline)
    with pytest.raises(OSError, match="No such file"):
        write_trace(timeline, tmp_path / "nowhere" / "trace.json")

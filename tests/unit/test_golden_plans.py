"""What a change of the planner is held to: the judging of rows beside a record."""

from __future__ import annotations

from typing import Any

import pytest
from golden_plans import described, judged, most_step_seconds, summary


def row(step: float | None, *, stages: int = 1, wall: float = 10.0, **more: Any) -> dict[str, Any]:
    """A row as measured; of a refused request where there is no step."""
    plan = {"step_seconds": step, "stages": stages} if step is not None else {"failed": "refused"}
    known = {"wall_seconds": wall, "cpu_seconds": 8.0, "resident_bytes_of_all": 4e8}
    return {"status": 0 if step is not None else 2, **known, **plan, **more}


def judge(mine: dict[str, Any], golden: dict[str, Any], name: str = "gpt/c/8/auto", **more: Any) -> dict[str, Any]:
    return judged(name, mine, golden, **{"against": None, "wall": False, **more})


@pytest.mark.parametrize(("step", "wrong"), [(0.9, 0), (1.0, 0), (1.0049, 0), (1.0051, 1)])
def test_a_step_may_not_take_longer_than_recorded(step: float, wrong: int) -> None:
    one = judge(row(2.0 * step), {"gpt/c/8/auto": row(2.0)})
    assert one["step_ratio"] == pytest.approx(step)
    assert len(one["wrong"]) == wrong


def test_wall_clock_time_is_judged_where_that_is_asked_for() -> None:
    golden, late = {"gpt/c/8/auto": row(2.0)}, row(2.0, wall=12.6)
    assert judge(late, golden)["wall_ratio"] == pytest.approx(1.26)
    assert judge(late, golden)["wrong"] == []
    assert judge(late, golden, wall=True)["wrong"] == ["the command takes 1.26 times as long"]


def test_another_version_run_beside_replaces_recorded_times_but_not_steps() -> None:
    golden = {"gpt/c/8/auto": row(2.0, wall=1.0)}
    one = judge(row(2.1), golden, against=row(2.1, wall=8.0), wall=True)
    assert one["wall_ratio"] == pytest.approx(1.25)
    assert one["step_ratio"] == pytest.approx(1.05)
    assert len(one["wrong"]) == 1


def test_what_fails_has_to_have_failed_alike() -> None:
    golden = {"gpt/c/8/auto": row(2.0)}
    assert judge(row(None), golden)["wrong"] == ["fails"]
    assert judge(row(None), {"gpt/c/8/auto": row(None)})["wrong"] == []
    assert judge(row(None) | {"status": 1}, {"gpt/c/8/auto": row(None)})["wrong"] == ["fails"]
    assert judge(row(None), {})["wrong"] == ["fails"]
    found = judge(row(2.0), {"gpt/c/8/auto": row(None)})
    assert (found["step_ratio"], found["wrong"]) == (None, [])


def test_one_stage_is_held_to_the_better_of_two_searches() -> None:
    golden = {"gpt/c/8/1": row(3.0), "gpt/c/8/auto": row(2.5)}
    assert most_step_seconds("gpt/c/8/1", golden) == 2.5
    golden["gpt/c/8/1"] = row(2.0)
    assert most_step_seconds("gpt/c/8/auto", golden) == 2.0


def test_one_stage_is_not_held_to_several() -> None:
    golden = {"gpt/c/8/1": row(3.0, staged_step_seconds=2.8), "gpt/c/8/auto": row(2.5, stages=2)}
    assert most_step_seconds("gpt/c/8/1", golden) == 2.8
    assert most_step_seconds("gpt/c/8/auto", golden) == 2.5


def test_the_summary_names_the_worst_row() -> None:
    golden = {"a/c/8/auto": row(2.0), "b/c/8/auto": row(2.0), "d/c/8/auto": row(None)}
    those = [
        judge(row(2.0, wall=20.0), golden, "a/c/8/auto"), judge(row(2.2, wall=10.0), golden, "b/c/8/auto"),
        judge(row(None, wall=30.0), golden, "d/c/8/auto"),
    ]  # fmt: skip
    found = summary(those)
    assert found["step_ratio"] == pytest.approx({"worst": 1.1, "median": 1.05, "of": "b/c/8/auto"})
    assert (found["wall_ratio"]["worst"], found["wall_ratio"]["median"]) == pytest.approx((3.0, 2.0))
    assert list(found["wrong"]) == ["b/c/8/auto"]


def test_stages_on_the_same_devices_hold_memory_together() -> None:
    def stage(devices: list[int], held: float) -> dict[str, Any]:
        return {"devices": devices, "mesh": {"x": 2}, "remat": "none", "memory_bytes": {"total": held}}

    found = described({
        "predicted": {"step_seconds": 1.5}, "microbatches": 8,
        "planning": {"optimality_gap": 0.0, "seconds": 3.0, "trace_seconds": 1.0},
        "schedule": "interleaved", "schedule_options": {"chunks": 2},
        "stages": [stage([0, 1], 5.0), stage([2, 3], 7.0), stage([0, 1], 3.0), stage([2, 3], 0.5)],
    })  # fmt: skip
    assert found["memory_bytes"] == 8.0
    assert found["strategy"] == "8 microbatches, interleaved chunks=2: 4 of 2 (2) none"

"""The search beside the presets: nothing is better than auto, what does not apply says why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright import presets, zoo
from meshwright.cli import main
from meshwright.cluster import load_cluster
from meshwright.compare import Compared, compare, comparison_document, comparison_text
from meshwright.presets.candidates import candidates_for


@pytest.fixture(scope="module")
def compared() -> tuple[Compared, ...]:
    target = zoo.mlp(width=64, layers=4, batch=32)
    args = (target.example_state, target.example_batch)
    some = [
        presets.data_parallel(), presets.zero(stage=1), presets.megatron(tp=2), presets.megatron(tp=2, pp=2),
        presets.gpipe(2), presets.expert_parallel(), presets.megatron(tp=3),
    ]  # fmt: skip
    return compare(target.step, args, cluster="local", candidates=some, microbatches=4, time_limit_seconds=30)


def test_auto_comes_first_and_nothing_is_faster(compared: tuple[Compared, ...]) -> None:
    assert compared[0].name == "auto"
    assert [one.step_seconds for one in compared] == sorted(one.step_seconds for one in compared)


def test_every_preset_is_there_with_its_plan_or_its_reason(compared: tuple[Compared, ...]) -> None:
    by_name = {one.name: one for one in compared}
    experts = "expert_parallel(ep=8, dp=1)"
    assert {name for name, one in by_name.items() if one.plan is None} == {experts, "megatron(tp=3)"}
    assert "stack of experts" in by_name[experts].reason
    assert "8 devices" in by_name["megatron(tp=3)"].reason
    plan = by_name["megatron(tp=2, pp=2, dp=2)"].plan
    assert plan is not None
    assert [stage.sizes for stage in plan.stages] == [{"data": 2, "model": 2}] * 2
    assert plan.notes == ("held to the preset megatron(tp=2, pp=2, dp=2)",)


def test_the_document_has_an_object_for_each_plan(compared: tuple[Compared, ...]) -> None:
    document = json.loads(json.dumps(comparison_document("mlp", compared)))
    assert len(document["plans"]) == len(compared)
    for one in document["plans"]:
        assert one["feasible"] == (one["reason"] is None) == (one["predicted"] is not None)
        if one["feasible"]:
            assert one["predicted"]["step_seconds"] > 0
            assert one["predicted"]["memory_bytes"] > 0


def test_the_table_has_a_row_for_each_feasible_plan(compared: tuple[Compared, ...]) -> None:
    table, reasons = comparison_text(compared).split("Not feasible:")
    rows = 2 + sum(one.plan is not None for one in compared)
    notes = compared[0].plan.notes if compared[0].plan is not None else ()
    assert len(table.strip().splitlines()) == rows + len(notes)
    assert "expert_parallel(ep=8, dp=1)" in reasons


def test_candidates_fit_the_cluster() -> None:
    names = [str(preset) for preset in candidates_for(load_cluster("p3.16xlarge:2"))]
    assert len(names) == len(set(names))
    assert {"data_parallel()", "zero(stage=3)", "megatron(tp=8, pp=2, dp=1)", "fsdp_tp(tp=8, dp=2)"} <= set(names)
    assert not any("tp=16" in name for name in names)  # tensor axes stay inside a host


def test_when_the_time_is_over_what_is_left_is_not_tried() -> None:
    target = zoo.mlp(width=64, layers=2, batch=16)
    args = (target.example_state, target.example_batch)
    auto, alone = compare(
        target.step, args, cluster="local", candidates=[presets.data_parallel()], time_limit_seconds=0.0
    )
    assert auto.plan is not None
    assert alone.reason == "not tried: the time limit was over"


def test_where_nothing_fits_every_plan_says_why() -> None:
    target = zoo.mlp(width=64, layers=2, batch=16)
    compared = compare(
        target.step, (target.example_state, target.example_batch), cluster="local",
        candidates=(presets.data_parallel(),), memory_per_device=100.0,
    )  # fmt: skip
    plans = comparison_document("mlp", compared)["plans"]
    assert [one["name"] for one in plans] == ["auto", "data_parallel()"]
    assert all(not one["feasible"] and "usable on a device" in one["reason"] for one in plans)
    assert "Not feasible" in comparison_text(compared)


def test_the_command_prints_one_json_object(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", "mlp-tiny", "--cluster", "rtx4090-4", "--time-limit", "1", "--json"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    families = {one["name"].split("(")[0] for one in document["plans"]}
    assert families == {"auto", *presets.FAMILIES}

"""The page that explains a plan: what it calls a strategy, and what it gives as reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.plan import (
    Collective,
    InputPlan,
    Memory,
    OperatorPlan,
    ParameterPlan,
    Plan,
    Prediction,
    Stage,
    Transfer,
)
from meshwright.report.explain import explain_plan
from meshwright.report.strategy import AxisRole, axis_roles
from meshwright.report.why import why, why_table
from meshwright.search.alternative import Alternative
from meshwright.search.considered import Considered
from meshwright.sharding import Spec
from meshwright.simulate import simulate_plan

MIB = 2.0**20
BATCH, COLUMN, NONE = (("x",), (), ()), ((), (), ("x",)), ((), (), ())
SUMMED = Spec(((), ()), broadcast=frozenset({"x"}))
BY_BATCH, BY_COLUMN, BY_ROW, WHOLE = Spec((("x",), ())), Spec(((), ("x",))), Spec((("x",), ())), Spec(((), ()))


def parameter(name: str, use: Spec, storage: Spec | None = None, shape: tuple[int, ...] = (8, 16)) -> ParameterPlan:
    return ParameterPlan(name=name, shape=shape, use=use, storage=storage or Spec(use.dims))


def gathered(plan: ParameterPlan) -> ParameterPlan:
    return replace(plan, gathered=("x",))


def stage_of(
    parameters: tuple[ParameterPlan, ...],
    *,
    products: tuple[Any, ...],
    batch: Spec = WHOLE,
    gathers: int = 0,
    **changes: Any,
) -> Stage:
    """A stage on x=4 with one input and the matrix products split as given."""
    stage = Stage(
        layers=(0, 1),
        devices=(0, 1, 2, 3),
        mesh=(("x", 4),),
        operators=tuple(OperatorPlan(path=(i,), name="dot_general", axes=axes) for i, axes in enumerate(products)),
        settled=(),
        parameters=parameters,
        inputs=(InputPlan(name="batch", shape=(16, 8), spec=batch),),
        rematerialised=(),
        memory=Memory(parameters=MIB, gradients=MIB, optimizer=2 * MIB, activations=MIB, workspace=0.0),
        memory_limit_bytes=10 * MIB,
        communication=tuple(Collective(kind="all_gather", count=n, bytes=n * MIB) for n in (gathers,) if n),
        compute_seconds=0.010,
        communication_seconds=0.005,
    )
    return replace(stage, **changes)


def plan_of(*stages: Stage, **changes: Any) -> Plan:
    plan = Plan(
        program="abc", cluster="two hosts", cluster_fingerprint="f", microbatches=1, schedule="none", stages=stages,
        predicted=Prediction(step_seconds=0.020, tflops_per_device=1.5, flops_per_device=2e9, optimality_gap=0.0),
    )  # fmt: skip
    return replace(plan, **changes)


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def role_of(stage: Stage) -> AxisRole:
    (role,) = axis_roles(stage)
    return role


# Strategies


def test_data_parallel_by_the_inputs() -> None:
    stage = stage_of((parameter("w", SUMMED),), products=(BATCH,), batch=BY_BATCH)
    assert role_of(stage).names == ("data parallel",)
    text = explain_plan(plan_of(stage))
    assert "x: data parallel" in text
    assert "gradients of 1 parameter summed over x: the batch is split over x" in text


def test_data_parallel_by_the_matrix_products_when_inputs_are_whole() -> None:
    assert role_of(stage_of((parameter("w", SUMMED),), products=(BATCH, NONE))).names == ("data parallel",)


def test_a_sum_over_an_axis_of_mixed_use_has_no_name() -> None:
    stage = stage_of((parameter("w", SUMMED),), products=(BATCH, COLUMN))
    assert role_of(stage).names == ()
    assert "along a dim they lack" in explain_plan(plan_of(stage))


def test_inputs_split_on_another_dim_are_not_called_data_parallel() -> None:
    stage = stage_of((parameter("w", SUMMED),), products=(BATCH,), batch=BY_COLUMN)
    assert role_of(stage).names == ()
    assert "inputs are split over x on dim 1" in explain_plan(plan_of(stage))


def test_zero_1_says_what_it_saves() -> None:
    """Every parameter is stored split by 4: 2 MiB would have been 8."""
    stage = stage_of((parameter("w", SUMMED, BY_ROW),), products=(BATCH,), batch=BY_BATCH, gathers=1)
    assert role_of(stage).names == ("data parallel", "ZeRO-1/2")
    text = explain_plan(plan_of(stage))
    assert "optimizer state of 1 parameter split over x (ZeRO-1/2): saves 6.0 MiB a device" in text


def test_zero_1_of_some_parameters_saves_about() -> None:
    """128 elements stored by 4 and 128 whole: 2 MiB holds 160 elements' state, and would hold 256."""
    parameters = (parameter("w", SUMMED, BY_ROW), parameter("v", SUMMED))
    text = explain_plan(plan_of(stage_of(parameters, products=(BATCH,), batch=BY_BATCH, gathers=1)))
    assert "saves about 1.2 MiB a device" in text


def test_zero_3_gathers_what_it_stores_split() -> None:
    stage = stage_of((gathered(parameter("w", BY_ROW)),), products=(BATCH,), batch=BY_BATCH, gathers=2)
    assert role_of(stage).names == ("data parallel", "ZeRO-3")
    assert "1 parameter split over x: stored split, gathered at use (ZeRO-3)" in explain_plan(plan_of(stage))


def test_some_gathered_and_some_used_split() -> None:
    parameters = (gathered(parameter("w", BY_ROW)), parameter("v", BY_COLUMN))
    assert role_of(stage_of(parameters, products=(COLUMN, BATCH), gathers=2)).names == (
        "data parallel", "ZeRO-3", "tensor parallel (column)",
    )  # fmt: skip


def test_a_vector_split_beside_whole_matrices_names_nothing() -> None:
    scale = parameter("scale", Spec((("x",),)), shape=(16,))
    stage = stage_of((parameter("w", SUMMED), scale), products=(BATCH,), batch=BY_BATCH)
    assert role_of(stage).names == ("data parallel",)


@pytest.mark.parametrize(("use", "way"), [(BY_COLUMN, "column"), (BY_ROW, "row")])
def test_tensor_parallel_where_nothing_is_gathered(use: Spec, way: str) -> None:
    stage = stage_of((parameter("w", use),), products=(COLUMN,))
    assert role_of(stage).names == (f"tensor parallel ({way})",)
    text = explain_plan(plan_of(stage))
    assert f"over x ({way})" in text
    assert "no reduction needed for the gradients of 1 parameter" in text
    text = explain_plan(plan_of(stage_of((parameter("w", WHOLE),), products=(COLUMN,))))
    assert "gradients of 1 parameter that are not split over every axis: complete where the backward pass" in text


def test_experts() -> None:
    experts = parameter("moe/experts/w", Spec((("x",), (), ())), shape=(4, 8, 16))
    assert role_of(stage_of((experts,), products=(BATCH,))).names == ("expert parallel",)
    unnamed = replace(experts, name="moe/w")
    assert role_of(stage_of((unnamed,), products=(BATCH,))).names == ("tensor parallel",)


# The page


def test_the_header() -> None:
    text = explain_plan(plan_of(stage_of((), products=())))
    assert text.startswith("Plan of program abc for cluster two hosts, 4 devices\nmesh: x=4\n")
    assert "predicted step time: 20.0 ms\n" in text
    assert "predicted rate: 1.5 TFLOP/s of the model a device, 2.0 GFLOP executed a device" in text
    assert "optimality gap: none among plans whose stages share no devices, under the cost model" in text


def test_a_plan_that_does_nothing_has_no_time_to_explain() -> None:
    plan = plan_of(stage_of((), products=()))
    assert why(plan) is None
    assert "Where a step of each device goes" not in explain_plan(plan)


def test_a_gap_is_a_bound_and_an_infinite_one_says_nothing() -> None:
    plan = plan_of(stage_of((), products=()))
    assert plan.predicted is not None
    assert "at most 3.0 %" in explain_plan(plan.with_prediction(replace(plan.predicted, optimality_gap=0.03)))
    assert "gap" not in explain_plan(plan.with_prediction(replace(plan.predicted, optimality_gap=float("inf"))))
    assert "has not been priced" in explain_plan(plan.with_prediction(None))


def test_the_memory_table() -> None:
    lines = [line.split() for line in explain_plan(plan_of(stage_of((), products=()))).splitlines()]
    assert ["optimizer", "2.0", "MiB", "20.0", "%"] in lines
    assert ["total", "5.0", "MiB", "50.0", "%"] in lines
    assert ["limit", "10.0", "MiB", "100.0", "%"] in lines
    endless = explain_plan(plan_of(stage_of((), products=(), memory_limit_bytes=float("inf"))))
    assert ["total", "5.0", "MiB", "-"] in [line.split() for line in endless.splitlines()]


def test_collectives_by_kind() -> None:
    lines = [line.split() for line in explain_plan(plan_of(stage_of((), products=(), gathers=3))).splitlines()]
    assert ["all_gather", "3", "3.0", "MiB"] in lines


def test_equal_parameters_of_many_layers_share_a_row() -> None:
    parameters = (
        *(parameter(f"layers/{i}/w1", SUMMED, BY_ROW) for i in range(24)),
        *(parameter(f"layers/{i}/w2", BY_ROW) for i in range(24)),
    )
    lines = explain_plan(plan_of(stage_of(parameters, products=(BATCH,)))).splitlines()
    rows = [line.split() for line in lines if "layers/" in line]
    assert rows == [
        ["layers/*/w1", "24", "8x16", "whole", "over", "x", "on", "dim", "0", "x"],
        ["layers/*/w2", "24", "8x16", "split", "dim", "0", "over", "x", "(row)", "as", "the", "parameter", "-"],
    ]


def test_memory_that_binds() -> None:
    ranges = (((), ((0, 3), (3, 6))),)
    tight = stage_of((), products=(), rematerialised=ranges, memory_limit_bytes=5.0 * MIB)
    text = explain_plan(plan_of(tight))
    assert "predicted memory: 5.0 MiB (100.0 % of the limit) on the fullest devices" in text
    assert "rematerialised: activations of 2 ranges of equations computed again" in text


def test_microbatches_and_considered_and_notes() -> None:
    stage = stage_of((parameter("w", SUMMED),), products=(BATCH,), batch=BY_BATCH)
    considered = (Considered("4 remat=none", seconds=0.02),)
    text = explain_plan(plan_of(stage, microbatches=4, notes=("by hand",)), considered=considered)
    assert "microbatches: 4" in text
    assert "gradients of the 4 microbatches are added up first" in text
    assert text.endswith("Considered by the search\n  4 remat=none: 0.02 s\n\nNotes\n  by hand")


def test_stages_are_rows_of_a_table_and_have_their_own_parts() -> None:
    stage = replace(
        stage_of((parameter("w", SUMMED),), products=(BATCH,), batch=BY_BATCH), forward_seconds=0.01, in_flight=2
    )
    second = replace(stage, layers=(1, 3), devices=(4, 5, 6, 7), parameters=(parameter("v", BY_COLUMN),))
    sent = Transfer(
        source=0, target=1, name="tanh", value=3, bytes=2048.0, differentiated=True, forward_seconds=2e-3,
        backward_seconds=1e-3,
    )  # fmt: skip
    text = explain_plan(plan_of(stage, second, schedule="gpipe", transfers=(sent, replace(sent, value=4))))
    assert "stages: 2, schedule gpipe" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert any(row.startswith("2 1 to 2 4 to 7 x=4 2 5.0 MiB (50.0 %) none 10.0 ms") for row in rows)
    assert "1 the next tanh and 1 more 4.0 KiB 4.0 ms 2.0 ms" in rows
    first, other = text.split("STAGE 2 of 2")
    assert "x: data parallel" in first.split("STAGE 1 of 2")[1]
    assert "tensor parallel (column)" in other


def pipeline_of(*stages: Stage, microbatches: int = 4, **changes: Any) -> Plan:
    """Stages one after the other under 1F1B, each sending the next one a value."""
    stages = tuple(replace(one, devices=(n,), mesh=(("x", 1),)) for n, one in enumerate(stages))
    sent = Transfer(
        source=0, target=1, name="h", value=3, bytes=8.0, differentiated=True, forward_seconds=1.0,
        backward_seconds=1.0,
    )  # fmt: skip
    transfers = tuple(replace(sent, source=n, target=n + 1) for n in range(len(stages) - 1))
    return plan_of(
        *stages, schedule="one_f_one_b", microbatches=microbatches, **{"transfers": transfers, **changes}
    )  # fmt: skip


def working(forward: float, backward: float, microbatches: int = 4, **changes: Any) -> Stage:
    """A stage that computes three quarters of its time, and spends the rest on collectives."""
    work = microbatches * (forward + backward)
    return stage_of(
        (), products=(), forward_seconds=forward, backward_seconds=backward, in_flight=2, compute_seconds=0.75 * work,
        communication_seconds=0.25 * work, **changes,
    )  # fmt: skip


def test_where_a_step_goes_adds_up_to_the_step() -> None:
    """By hand, without transfers: the second stage works 4 times 9, after a forward of 2 and before a backward of 4."""
    found = why(pipeline_of(working(2.0, 4.0), working(3.0, 6.0)))
    step = simulate_plan(pipeline_of(working(2.0, 4.0), working(3.0, 6.0))).step_seconds
    for rank in found.ranks:
        assert rank.busy + rank.transfers + rank.bubble == pytest.approx(step)
        assert rank.transfers == pytest.approx(step - 42.0)
    first, second = found.ranks
    assert (first.compute, first.collectives, first.other) == pytest.approx((18.0, 6.0, 0.0))
    assert (second.compute, second.collectives, second.bubble) == pytest.approx((27.0, 9.0, 6.0))
    assert found.balance == pytest.approx((24 + 36) / (2 * 36))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (working(3.0, 6.0), "work is uneven: the others wait for stage 2, balance 83.3 %"),
        (working(2.0, 4.0), "work is even: balance 100.0 %"),
        (working(2.0, 4.0, memory_limit_bytes=5.2 * MIB), "memory binds on stage 2: up to 96.2 % of what a device has"),
        (working(2.0, 4.0), "memory does not bind: every device has 5.0 MiB or more left"),
        (
            working(2.0, 4.0, rematerialised=(((), ((0, 2),)),)),
            "memory makes stage 2 rematerialise: up to 23.5 % of the step is spent on activations that are",
        ),
        (working(3.0, 6.0), "the step of the busiest devices (stage 2): compute 61.4 %"),
    ],
)
def test_what_binds(second: Stage, words: str) -> None:
    found = why(pipeline_of(working(2.0, 4.0), second))
    assert any(line.startswith(words) for line in found.binds), found.binds


def test_one_stage_waits_for_nobody() -> None:
    """Nothing but its own work and its update: 4 times 9, and 1."""
    stage = working(3.0, 6.0, update_seconds=1.0, memory_limit_bytes=5.2 * MIB)
    text, found = explain_plan(plan_of(stage, microbatches=4)), why(plan_of(stage, microbatches=4))
    assert found is not None
    assert all(words in unwrapped(text) for words in ("Where a step of each device goes", "What binds", *found.binds))
    (rank,) = found.ranks
    assert (rank.compute, rank.collectives, rank.other) == pytest.approx((27.0, 9.0, 1.0))
    assert (rank.transfers, rank.bubble, found.balance) == (0.0, 0.0, 1.0)
    assert found.binds == (
        "the step of the busiest devices (stage 1): compute 73.0 %, exposed collectives 24.3 %, "
        "update, launches and sums of gradients 2.7 %",
        "memory binds on stage 1: up to 96.2 % of what a device has",
    )


def test_collectives_that_compute_hides_are_no_part_of_the_step() -> None:
    """Of 9 seconds of collectives the step has room for 5 beside 31 of compute and the update."""
    stage = working(3.0, 6.0, update_seconds=1.0)
    found = why(plan_of(replace(stage, compute_seconds=31.0), microbatches=4))
    assert found is not None
    (rank,) = found.ranks
    assert (rank.compute, rank.collectives, rank.other, rank.hidden) == pytest.approx((31.0, 5.0, 1.0, 4.0))
    assert "compute 83.8 %, exposed collectives 13.5 %" in found.binds[0]


def test_sums_of_gradients_between_stages_are_collectives() -> None:
    """A parameter that both stages hold: 2 seconds of synchronisation beyond what happens inside of them."""
    shared = (parameter("tied", WHOLE),)
    first, second = (
        replace(working(2.0, 4.0, synchronise_seconds=2.0), parameters=parameters)
        for parameters in (shared, (*shared, parameter("own", WHOLE)))
    )
    tied, apart = (why(pipeline_of(first, one)) for one in (second, replace(second, parameters=())))
    assert tied is not None
    assert apart is not None
    assert [rank.collectives for rank in tied.ranks] == pytest.approx([8.0, 8.0])
    for rank in apart.ranks:
        assert (rank.collectives, rank.other) == pytest.approx((6.0, 2.0))


def test_equal_ranks_share_a_row() -> None:
    plan = pipeline_of(*[working(2.0, 4.0)] * 3)
    found = why(plan)
    assert found is not None
    (row,) = why_table(found).splitlines()[2:]
    assert row.startswith("1 to 3  ")
    assert "Where a step of each device goes" in explain_plan(plan)


def test_alternatives_with_what_they_would_cost() -> None:
    others = (Alternative(what="2 microbatches, gpipe", step_seconds=0.021),)
    text = explain_plan(plan_of(stage_of((), products=())), alternatives=others)
    assert "Nearest alternatives" in text
    assert "21.0 ms  +5.0%  2 microbatches, gpipe" in text

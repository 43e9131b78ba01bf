"""What a person is told of the difference between two plans."""

from __future__ import annotations

from dataclasses import fields, replace
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
from meshwright.plan.diff import diff_plans
from meshwright.program.padded_dims import PaddedDim
from meshwright.sharding import Spec

WHOLE = Spec.replicated(2)


def plan_of(count: int = 3, **changes: Any) -> Plan:
    """A plan on x=8 whose parameters are split by column; `changes` are of its one stage."""
    stage = Stage(
        layers=(0, count),
        devices=tuple(range(8)),
        mesh=(("x", 8),),
        operators=tuple(OperatorPlan(path=(0, i), name="dot_general", axes=((), (), ("x",))) for i in range(2 * count)),
        settled=((4, Spec((("x",), ()))),),
        parameters=tuple(_parameter(f"layers/{i}/w", Spec(((), ("x",)))) for i in range(count)),
        inputs=(InputPlan(name="batch", shape=(16, 8), spec=WHOLE),),
        rematerialised=(),
        memory=Memory(parameters=100.0, gradients=100.0, optimizer=200.0, activations=50.0, workspace=0.0),
        memory_limit_bytes=1000.0,
        communication=(Collective(kind="all_reduce", count=4, bytes=400.0),),
        compute_seconds=0.1,
        communication_seconds=0.2,
    )
    return Plan(
        program="p", cluster="c", cluster_fingerprint="f", microbatches=1, schedule="none",
        stages=(replace(stage, **changes),),
        predicted=Prediction(step_seconds=0.3, tflops_per_device=1.0, flops_per_device=1e9, optimality_gap=0.0),
    )  # fmt: skip


def _parameter(name: str, use: Spec, storage: Spec | None = None) -> ParameterPlan:
    return ParameterPlan(name=name, shape=(8, 16), use=use, storage=storage or Spec(use.dims))


def test_equal_plans_do_not_differ() -> None:
    assert diff_plans(plan_of(), plan_of()) == ()
    assert plan_of().diff(plan_of()) == ()


def test_the_mesh() -> None:
    assert diff_plans(plan_of(), plan_of(mesh=(("x", 2), ("y", 4)))) == ("stage 1: mesh x=8 -> x=2 y=4",)
    assert diff_plans(plan_of(), plan_of(mesh=(), devices=(5,))) == (
        "stage 1: devices 0-7 -> 5",
        "stage 1: mesh x=8 -> one device",
    )


def test_one_parameter() -> None:
    before = plan_of()
    zero1 = _parameter("layers/0/w", Spec(((), ()), broadcast=frozenset({"x"})), Spec((("x",), ())))
    after = plan_of(parameters=(zero1, *before.stages[0].parameters[1:]))
    assert diff_plans(before, after) == (
        "parameter layers/0/w: split x on dim 1 -> whole, gradient summed over x, optimizer over x on dim 0",
    )


def test_parameters_that_change_alike_share_a_line() -> None:
    after = plan_of(parameters=tuple(_parameter(f"layers/{i}/w", WHOLE) for i in range(3)))
    assert diff_plans(plan_of(), after) == ("parameter layers/*/w (3 of them): split x on dim 1 -> whole",)


def test_parameters_that_come_go_and_change_shape() -> None:
    kept = plan_of().stages[0].parameters
    assert diff_plans(plan_of(), plan_of(parameters=kept[:2])) == ("parameter layers/2/w: split x on dim 1 -> absent",)
    larger = replace(kept[0], shape=(8, 32))
    assert diff_plans(plan_of(), plan_of(parameters=(larger, *kept[1:]))) == (
        "parameter layers/0/w: split x on dim 1 of shape (8, 16) -> split x on dim 1 of shape (8, 32)",
    )


def test_storage_that_is_not_a_further_split_is_said_in_full() -> None:
    kept = plan_of().stages[0].parameters
    moved = replace(kept[0], storage=Spec((("x",), ())))
    (line,) = diff_plans(plan_of(), plan_of(parameters=(moved, *kept[1:])))
    assert line.endswith("-> split x on dim 1, optimizer split x on dim 0")


def test_gradients_that_are_scattered_in_each_microbatch_are_said() -> None:
    kept = plan_of().stages[0].parameters
    stored = replace(kept[0], use=Spec(((), ()), broadcast=frozenset({"x"})), storage=Spec((("x",), ())))
    before, after = (plan_of(parameters=(replace(stored, scattered=one), *kept[1:])) for one in (False, True))
    (line,) = diff_plans(before, after)
    assert line.endswith("optimizer over x on dim 0, gradients scattered in each microbatch")


def test_a_parameter_that_moves_to_another_stage() -> None:
    stage = plan_of().stages[0]
    parameters = stage.parameters
    second = replace(stage, parameters=())
    before = replace(plan_of(), stages=(stage, second))
    after = replace(
        plan_of(), stages=(replace(stage, parameters=parameters[:2]), replace(second, parameters=parameters[2:]))
    )
    assert diff_plans(before, after) == (
        "parameter layers/2/w: split x on dim 1, in stage 1 -> split x on dim 1, in stage 2",
    )


def test_operators_are_counted_and_the_first_named() -> None:
    operators = plan_of().stages[0].operators
    changed = tuple(replace(o, axes=(("x",), (), ())) for o in operators[:5])
    (line,) = diff_plans(plan_of(), plan_of(operators=(*changed, operators[5])))
    assert line == (
        "stage 1: 5 of 6 operators split otherwise: dot_general at 0.0 (-, -, x -> x, -, -), "
        "dot_general at 0.1 (-, -, x -> x, -, -), dot_general at 0.2 (-, -, x -> x, -, -) and 2 more"
    )
    marked = (replace(operators[0], broadcast=frozenset({"x"})), *operators[1:])
    (line,) = diff_plans(plan_of(), plan_of(operators=marked))
    assert line.endswith("dot_general at 0.0 (-, -, x -> -, -, x | broadcast x)")


def test_operators_of_another_program() -> None:
    operators = plan_of().stages[0].operators
    renamed = (*operators[:-1], replace(operators[-1], name="tanh"))
    assert diff_plans(plan_of(), plan_of(operators=renamed)) == (
        "stage 1: 1 operators removed: dot_general at 0.5",
        "stage 1: 1 operators added: tanh at 0.5",
    )


def test_predictions_are_compared_as_ratios() -> None:
    before = plan_of()
    memory = replace(before.stages[0].memory, activations=25.0)
    after = plan_of(memory=memory, communication=(Collective(kind="all_reduce", count=2, bytes=100.0),))
    predicted = Prediction(step_seconds=0.6, tflops_per_device=1.0, flops_per_device=1e9, optimality_gap=0.0)
    assert diff_plans(before, after.with_prediction(predicted)) == (
        "stage 1: predicted memory, activations 50 -> 25 bytes (0.5x)",
        "stage 1: predicted memory, total 450 -> 425 bytes (0.9444x)",
        "stage 1: predicted all_reduce, count 4 -> 2",
        "stage 1: predicted all_reduce 400 -> 100 bytes (0.25x)",
        "predicted step 0.3 -> 0.6 s (2x)",
    )


def test_no_ratio_to_nothing() -> None:
    memory = replace(plan_of().stages[0].memory, workspace=8.0)
    assert diff_plans(plan_of(), plan_of(memory=memory))[0] == "stage 1: predicted memory, workspace 0 -> 8 bytes"
    assert diff_plans(plan_of(), plan_of().with_prediction(None)) == ("prediction given -> none",)


def test_rematerialisation() -> None:
    one = (((), ((0, 3),)),)
    assert diff_plans(plan_of(), plan_of(rematerialised=one)) == (
        "stage 1: rematerialised nothing -> 3 equations in 1 ranges",
    )


STAGE_CHANGES = {
    "layers": (0, 4),
    "devices": tuple(range(8, 16)),
    "mesh": (("y", 8),),
    "operators": tuple(reversed(plan_of().stages[0].operators)),
    "settled": (),
    "parameters": tuple(reversed(plan_of().stages[0].parameters)),
    "inputs": (),
    "rematerialised": (((), ((0, 3),)),),
    "kept_inside": ((1,),),
    "memory": Memory(parameters=101.0, gradients=99.0, optimizer=200.0, activations=50.0, workspace=0.0),
    "memory_limit_bytes": 1001.0,
    "flops": 5.0,
    "communication": (
        Collective(kind="all_reduce", count=4, bytes=400.0),
        Collective(kind="permute", count=0, bytes=0.0),
    ),
    "compute_seconds": 0.1 + 1e-16,
    "communication_seconds": 0.25,
    "equations": (0, 9),
    "forward_seconds": 0.1,
    "backward_seconds": 0.2,
    "weight_seconds": 0.1,
    "synchronise_seconds": 0.01,
    "update_seconds": 0.02,
    "in_flight": 2,
    "gradient_exchange": "central",
    "device_kind": "another",
}
SENT = Transfer(
    source=0, target=1, name="tanh", value=7, bytes=64.0, differentiated=True, forward_seconds=0.1, backward_seconds=0.1
)
PLAN_CHANGES = {
    "program": "q",
    "cluster": "d",
    "cluster_fingerprint": "g",
    "microbatches": 2,
    "schedule": "gpipe",
    "stages": plan_of().stages * 2,
    "predicted": None,
    "notes": ("a note",),
    "schedule_options": (("chunks", 2),),
    "scan_splits": ((3, (2, 2)),),
    "transfers": (SENT,),
    "padded": (PaddedDim("head", 1, 128),),
}


def test_every_field_is_tried() -> None:
    assert STAGE_CHANGES.keys() == {f.name for f in fields(Stage)}
    assert PLAN_CHANGES.keys() == {f.name for f in fields(Plan)}


@pytest.mark.parametrize("field", STAGE_CHANGES)
def test_no_change_of_a_stage_goes_unsaid(field: str) -> None:
    before, after = plan_of(), plan_of(**{field: STAGE_CHANGES[field]})
    assert before != after
    assert diff_plans(before, after)
    assert diff_plans(after, before)


@pytest.mark.parametrize("field", PLAN_CHANGES)
def test_no_change_of_a_plan_goes_unsaid(field: str) -> None:
    after = replace(plan_of(), **{field: PLAN_CHANGES[field]})
    assert diff_plans(plan_of(), after)
    assert diff_plans(after, plan_of())


@pytest.mark.parametrize("field", [f.name for f in fields(Prediction)])
def test_no_change_of_a_prediction_goes_unsaid(field: str) -> None:
    before = plan_of()
    assert before.predicted is not None
    assert len(diff_plans(before, before.with_prediction(replace(before.predicted, **{field: 7.0})))) == 1


def test_transfers_are_compared_edge_by_edge() -> None:
    before = replace(plan_of(), transfers=(SENT,))
    after = replace(plan_of(), transfers=(replace(SENT, bytes=32.0, forward_seconds=0.05), replace(SENT, target=2)))
    assert diff_plans(before, after) == (
        "transfers from stage 1 to stage 2 64 -> 32 bytes (0.5x)",
        "predicted transfers from stage 1 to stage 2, both ways 0.2 -> 0.15 s (0.75x)",
        "transfers from stage 1 to stage 3, count 0 -> 1",
        "transfers from stage 1 to stage 3 0 -> 64 bytes",
        "predicted transfers from stage 1 to stage 3, both ways 0 -> 0.2 s",
    )


def test_rows_of_a_parameter() -> None:
    kept = plan_of().stages[0].parameters
    part = replace(kept[0], rows=(0, 8))
    (line,) = diff_plans(plan_of(), plan_of(parameters=(part, *kept[1:])))
    assert line == "parameter layers/0/w: split x on dim 1 -> rows 0:8 split x on dim 1"


def test_notes_in_another_order() -> None:
    a, b = replace(plan_of(), notes=("one", "two")), replace(plan_of(), notes=("two", "one"))
    assert diff_plans(a, b) == ("notes: in another order or number",)


def test_a_plan_as_text_is_short() -> None:
    text = str(plan_of())
    assert "\n" not in text
    assert "mesh x=8" in text
    assert "Predicted: 0.3 s a step" in text
    assert "Predicted" not in str(plan_of().with_prediction(None))

"""Plans as files: exact round trips, steady text, and a refusal that names the place for everything else."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from meshwright.plan import (
    Collective,
    InputPlan,
    Memory,
    OperatorPlan,
    ParameterPlan,
    Plan,
    PlanError,
    Prediction,
    Stage,
    Transfer,
)
from meshwright.plan.io import load_plan, plan_from_dict, plan_to_dict, save_plan
from meshwright.sharding import Spec


def small_plan(operators: int = 12) -> Plan:
    """Two ways to split an operator, alternating, on a 2x2 mesh."""
    stage = Stage(
        layers=(0, 1),
        devices=(0, 1, 2, 3),
        mesh=(("x", 2), ("y", 2)),
        operators=tuple(
            OperatorPlan(path=(1, i), name="dot_general", axes=(("x",), (), ("y",)) if i % 2 else ((), ("x", "y"), ()))
            for i in range(operators)
        ),
        settled=((7, Spec((("x",), ()), partial=frozenset({"y"}))),),
        parameters=(
            ParameterPlan(
                name="w",
                shape=(8, 4),
                use=Spec(((), ("y",)), broadcast=frozenset({"x"})),
                storage=Spec((("x",), ("y",))),
            ),
        ),
        inputs=(InputPlan(name="batch", shape=(16, 8), spec=Spec((("x",), ()))),),
        rematerialised=(((), ((0, 3), (5, 9))), ((4,), ((0, 2),))),
        memory=Memory(parameters=64.0, gradients=64.0, optimizer=64.0, activations=1 / 3, workspace=0.0),
        memory_limit_bytes=1e9,
        communication=(Collective(kind="all_reduce", count=3, bytes=100.0),),
        compute_seconds=0.1,
        communication_seconds=0.2,
    )
    return Plan(
        program="p", cluster="c", cluster_fingerprint="f", microbatches=2, schedule="none", stages=(stage,),
        predicted=Prediction(step_seconds=0.3, tflops_per_device=1.0, flops_per_device=1e9, optimality_gap=0.0),
        notes=("by hand",),
    )  # fmt: skip


# Round trips

MESH = (("x", 2), ("data", 3))
SIZES = st.floats(min_value=0, allow_nan=False, allow_infinity=True)
TEXTS = st.text(max_size=8)
AXES = st.lists(st.sampled_from([name for name, _ in MESH]), unique=True).map(tuple)
PATHS = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def specs(draw: Callable[..., Any], rank: int) -> Spec:
    dims: list[list[str]] = [[] for _ in range(rank)]
    states: dict[str, list[str]] = {"partial": [], "broadcast": []}
    for axis, _ in draw(st.permutations(MESH)):
        place = draw(st.sampled_from(["whole", *states, *range(rank)]))
        if isinstance(place, int):
            dims[place].append(axis)
        elif place != "whole":
            states[place].append(axis)
    return Spec(tuple(map(tuple, dims)), frozenset(states["partial"]), frozenset(states["broadcast"]))


# Every extent is a multiple of the mesh, so that every split divides it.
SHAPES = st.lists(st.integers(0, 4).map(lambda n: 6 * n), max_size=3).map(tuple)
OPERATORS = st.builds(
    OperatorPlan, path=PATHS, name=st.sampled_from(["add", "dot"]), axes=st.lists(AXES, max_size=2).map(tuple),
    broadcast=AXES.map(frozenset),
)  # fmt: skip
PARAMETERS = SHAPES.flatmap(
    lambda shape: st.builds(
        ParameterPlan, name=TEXTS, shape=st.just(shape), use=specs(len(shape)), storage=specs(len(shape)),
        scattered=st.booleans(),
    )
).map(lambda one: replace(one, scattered=one.scattered and bool(one.stored_axes)))  # fmt: skip
INPUTS = SHAPES.flatmap(lambda shape: st.builds(InputPlan, name=TEXTS, shape=st.just(shape), spec=specs(len(shape))))
REMATERIALISED = st.tuples(PATHS, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple))
STAGES = st.builds(
    Stage,
    layers=st.tuples(st.integers(0, 3), st.integers(3, 9)),
    devices=st.permutations(range(6)).map(tuple),
    mesh=st.just(MESH),
    operators=st.lists(OPERATORS, max_size=6).map(tuple),
    settled=st.lists(st.tuples(st.integers(0, 99), specs(2)), max_size=2).map(tuple),
    parameters=st.lists(PARAMETERS, max_size=2).map(tuple),
    inputs=st.lists(INPUTS, max_size=2).map(tuple),
    rematerialised=st.lists(REMATERIALISED, max_size=2).map(tuple),
    memory=st.builds(Memory, **{f.name: SIZES for f in fields(Memory)}),
    memory_limit_bytes=SIZES,
    communication=st.lists(st.builds(Collective, kind=TEXTS, count=st.integers(0, 9), bytes=SIZES), max_size=2).map(
        tuple
    ),
    compute_seconds=SIZES,
    communication_seconds=SIZES,
    equations=st.tuples(st.integers(0, 3), st.integers(3, 9)),
    forward_seconds=SIZES,
    backward_seconds=SIZES,
    weight_seconds=SIZES,
    synchronise_seconds=SIZES,
    update_seconds=SIZES,
    in_flight=st.integers(1, 9),
)


def in_a_row(plan: Plan) -> Plan:
    """The plan with its stages one after the other in the program and on devices of their own."""
    if len(plan.stages) == 1:
        return replace(plan, transfers=(), stages=(replace(plan.stages[0], equations=None),))
    first, second = plan.stages
    assert first.equations is not None
    second = replace(
        second, layers=(first.layers[1], 9), equations=(first.equations[1], 9),
        devices=tuple(6 + device for device in second.devices),
    )  # fmt: skip
    return replace(plan, stages=(first, second), schedule="s" + plan.schedule)


TRANSFERS = st.builds(
    Transfer, source=st.just(0), target=st.just(1), name=TEXTS, value=st.integers(0, 9), bytes=SIZES,
    differentiated=st.booleans(), forward_seconds=SIZES, backward_seconds=SIZES,
)  # fmt: skip
PLANS = st.builds(
    Plan,
    program=TEXTS,
    cluster=TEXTS,
    cluster_fingerprint=TEXTS,
    microbatches=st.integers(1, 64),
    schedule=TEXTS,
    stages=st.lists(STAGES, min_size=1, max_size=2).map(tuple),
    predicted=st.none() | st.builds(Prediction, **{f.name: SIZES for f in fields(Prediction)}),
    notes=st.lists(TEXTS, max_size=2).map(tuple),
    schedule_options=st.lists(
        st.tuples(
            st.sampled_from(["warm_up", "split_backward"]), st.integers(0, 2) | st.lists(st.integers(1, 3)).map(tuple)
        ),
        max_size=2,
    ).map(tuple),
    scan_splits=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)), max_size=1
    ).map(tuple),
    transfers=st.lists(TRANSFERS, max_size=2, unique_by=lambda t: t.value).map(tuple),
).map(in_a_row)


@settings(max_examples=30, deadline=None)
@given(plan=PLANS)
def test_every_plan_comes_back_as_it_was(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    loaded = load_plan(path)
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert plan_from_dict(plan_to_dict(plan)) == plan


def test_the_text_depends_on_the_plan_alone(tmp_path: Path) -> None:
    plan = small_plan()
    for name in ("a", "b"):
        save_plan(plan, tmp_path / name)
    save_plan(load_plan(tmp_path / "a"), tmp_path / "c")
    texts = {(tmp_path / name).read_text() for name in "abc"}
    assert len(texts) == 1
    text = texts.pop()
    assert json.loads(text)["schema"] == 2
    assert max(map(len, text.splitlines())) <= 120
    assert text.endswith("}\n")


def test_broadcast_axes_are_sorted() -> None:
    """Sets have no order of their own: two that are equal may be walked differently."""
    axes = [f"axis{i}" for i in range(12)]
    plan = small_plan()
    stage = replace(
        plan.stages[0], mesh=tuple((a, 1) for a in axes), devices=(0,), settled=(), parameters=(), inputs=()
    )
    operators = (OperatorPlan(path=(0,), name="add", axes=(), broadcast=frozenset(axes)),)
    document = plan_to_dict(replace(plan, stages=(replace(stage, operators=operators),)))
    assert document["stages"][0]["operators"]["ways"][0]["broadcast"] == sorted(axes)


def test_thousands_of_operators_stay_small(tmp_path: Path) -> None:
    plan = small_plan(operators=20_000)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert (tmp_path / "plan.json").stat().st_size < 100_000


def test_infinity_is_kept_in_json_that_any_reader_takes(tmp_path: Path) -> None:
    plan = small_plan().with_prediction(
        Prediction(step_seconds=1.0, tflops_per_device=1.0, flops_per_device=1.0, optimality_gap=math.inf)
    )
    save_plan(plan, tmp_path / "plan.json")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads((tmp_path / "plan.json").read_text(), parse_constant=refuse)
    assert load_plan(tmp_path / "plan.json") == plan


# Writing


def test_a_save_replaces_the_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    save_plan(small_plan(), path)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PlanError, match="No space left"):
        save_plan(replace(small_plan(), microbatches=8), path)
    assert path.read_text() == before
    assert [*tmp_path.iterdir()] == [path]


def test_a_plan_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    plan = small_plan()
    broken = replace(plan, stages=(replace(plan.stages[0], compute_seconds=math.nan),))
    with pytest.raises(PlanError, match=r"stages\[0\]\.compute_seconds"):
        save_plan(broken, tmp_path / "plan.json")
    assert not [*tmp_path.iterdir()]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="FileNotFoundError") as caught:
        save_plan(small_plan(), tmp_path / "absent" / "plan.json")
    assert "absent" in caught.value.where


# Reading what is no plan


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"schema": NaN}', "NaN, which JSON lacks"),
        (b'{"schema": 1, "schema": 1}', "'schema' twice"),
        (b"[]", "a list"),
        (b"3", "the number 3"),
        (b"{}", "no schema"),
        (b'{"schema": 1}', "schema 1"),
        (b'{"schema": true}', "schema True"),
        (b'{"schema": "1"}', "schema '1'"),
    ],
)
def test_a_file_that_is_no_plan(content: bytes, got: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert got in caught.value.got
    assert str(path) in caught.value.where


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="FileNotFoundError"):
        load_plan(tmp_path / "absent.json")
    with pytest.raises(PlanError, match="IsADirectoryError"):
        load_plan(tmp_path)


def test_a_later_schema_asks_for_a_later_version() -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_dict({"schema": 3})
    assert caught.value.try_ == "a newer Meshwright"


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        at: Any = document
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to

    return change


def _drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        at: Any = document
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return change


STAGE = ("stages", 0)


@pytest.mark.parametrize(
    ("change", "where", "got", "try_"),
    [
        (_drop("program"), "", "no field 'program'", ""),
        (_drop(*STAGE, "memory", "optimizer"), "stages[0].memory", "no field 'optimizer'", ""),
        (_set("microbatch", to=3), "", "'microbatch'", "'microbatches'"),
        (_set("zzz", to=3), "", "'zzz'", "removing"),
        (_set(*STAGE, "parameters", 0, "used", to={}), "stages[0].parameters[0]", "'used'", "'use'"),
        (_set("program", to=3), "program", "the number 3", ""),
        (_set("program", to=None), "program", "null", ""),
        (_set("stages", to={}), "stages", "an object", ""),
        (_set("stages", to=[]), "stages", "no stage", ""),
        (_set(*STAGE, to=3), "stages[0]", "the number 3", ""),
        (_set("microbatches", to=True), "microbatches", "truth value True", ""),
        (_set("microbatches", to=2.0), "microbatches", "the number 2.0", ""),
        (_set("microbatches", to=0), "microbatches", "0", ""),
        (_set("microbatches", to="2"), "microbatches", "string '2'", ""),
        (_set(*STAGE, "layers", to=[0]), "stages[0].layers", "1 entries", ""),
        (_set(*STAGE, "layers", to=[2, 1]), "stages[0].layers", "[2, 1]", ""),
        (_set(*STAGE, "compute_seconds", to=-1.0), "stages[0].compute_seconds", "-1.0", ""),
        (_set(*STAGE, "compute_seconds", to=math.nan), "stages[0].compute_seconds", "nan", ""),
        (_set(*STAGE, "compute_seconds", to=math.inf), "stages[0].compute_seconds", "inf", ""),
        (_set(*STAGE, "compute_seconds", to=10**400), "stages[0].compute_seconds", "401 digits", ""),
        (_set(*STAGE, "memory", "activations", to=-8), "stages[0].memory.activations", "-8", ""),
        (_set(*STAGE, "parameters", 0, "shape", to=[8, -4]), "stages[0].parameters[0].shape[1]", "-4", ""),
        (_set(*STAGE, "parameters", 0, "shape", to=[8]), "stages[0].parameters[0].use", "2 dims", ""),
        (_set(*STAGE, "parameters", 0, "shape", to=[8, 5]), "stages[0].parameters[0].use", "(8, 5)", ""),
        (
            _set(*STAGE, "parameters", 0, "use", "dims", to=[["x"], ["x"]]),
            "stages[0].parameters[0].use", "an axis with two states", "",
        ),
        (_set(*STAGE, "devices", to=[0, 1, 2]), "stages[0].devices", "3 devices", ""),
        (_set(*STAGE, "devices", to=[0, 1, 2, 2]), "stages[0].devices", "twice", ""),
        (_set(*STAGE, "mesh", to=[["x", 2], ["x", 2]]), "stages[0].mesh", "x, x", ""),
        (_set(*STAGE, "mesh", to=[["x", 2], ["model", 2]]), "stages[0].parameters[0].use", "'y'", ""),
        (_set(*STAGE, "inputs", 0, "spec", "dims", to=[["x1"], []]), "stages[0].inputs[0].spec", "'x1'", "'x'"),
        (_set(*STAGE, "settled", 0, 1, "partial", to=["z"]), "stages[0].settled[0][1]", "'z'", ""),
        (_set(*STAGE, "operators", "ways", 0, "axes", to=[["z"]]), "dot_general at (1, 0)", "'z'", ""),
        (_set(*STAGE, "operators", "ways", 1, "broadcast", to=["z"]), "dot_general at (1, 1)", "'z'", ""),
        (_set(*STAGE, "operators", "runs", 0, "ways", 3, to=2), "stages[0].operators.runs[0]", "row 2", ""),
        (_set(*STAGE, "operators", "runs", 0, "path", to=[]), "stages[0].operators.runs[0]", "without a path", ""),
    ],
)  # fmt: skip
def test_a_document_that_is_no_plan(change: Callable[[Any], None], where: str, got: str, try_: str) -> None:
    document = plan_to_dict(small_plan())
    assert plan_from_dict(document) == small_plan()
    change(document)
    with pytest.raises(PlanError) as caught:
        plan_from_dict(document, source="plan.json")
    assert got in caught.value.got
    assert where in caught.value.where
    assert caught.value.where.startswith("plan.json")
    assert try_ in caught.value.try_


def test_the_links_of_a_scan_have_a_place() -> None:
    """Their path has -1 where that of an equation of the scan's body has its position."""
    plan = small_plan()
    links = tuple(OperatorPlan(path=(3, -1, i), name="scan_slice", axes=((), ())) for i in range(3))
    plan = replace(plan, stages=(replace(plan.stages[0], operators=links),))
    document = plan_to_dict(plan)
    assert plan_from_dict(document) == plan
    document["stages"][0]["operators"]["runs"][0]["path"][0] = -2
    with pytest.raises(PlanError, match="not negative"):
        plan_from_dict(document)


# Several stages


def two_stages(**changes: Any) -> Plan:
    """Two stages of two devices; `changes` are of the second."""
    stage = small_plan().stages[0]
    first = replace(stage, mesh=(("x", 2), ("y", 1)), devices=(0, 1), equations=(0, 4), in_flight=2)
    second = replace(first, devices=(2, 3), layers=(1, 2), equations=(4, 9), in_flight=1)
    transfer = Transfer(
        source=0, target=1, name="tanh", value=7, bytes=64.0, differentiated=True, forward_seconds=0.1,
        backward_seconds=0.1,
    )  # fmt: skip
    return replace(
        small_plan(), stages=(first, replace(second, **changes)), schedule="one_f_one_b", transfers=(transfer,)
    )


def test_stages_come_back() -> None:
    plan = two_stages()
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert plan.edges == ((0, 1),)
    assert plan.num_devices == 4


def test_a_part_of_a_parameter() -> None:
    part = replace(two_stages().stages[0].parameters[0], rows=(8, 16))
    plan = two_stages(parameters=(part,))
    assert plan_from_dict(plan_to_dict(plan)) == plan
    with pytest.raises(PlanError, match="as many as dim 0"):
        plan_from_dict(plan_to_dict(two_stages(parameters=(replace(part, rows=(8, 17)),))))


def test_gradients_are_scattered_only_where_storage_is_split_further() -> None:
    (stored,) = small_plan().stages[0].parameters
    plan = two_stages(parameters=(replace(stored, scattered=True),))
    assert plan_from_dict(plan_to_dict(plan)) == plan
    whole = replace(stored, storage=Spec(stored.use.dims), scattered=True)
    with pytest.raises(PlanError, match=r"storage split over more axes.*parameters\[0\]\.scattered"):
        plan_from_dict(plan_to_dict(two_stages(parameters=(whole,))))


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"layers": (2, 3)}, "where the stage before ends"),
        ({"equations": (5, 9)}, "where the stage before ends"),
        ({"equations": None}, "a range for each of several stages"),
        ({"equations": (4, 3)}, "the first equation before"),
        ({"devices": (1, 2)}, "each device in one stage"),
        ({"in_flight": 0}, "at least 1"),
    ],
)
def test_stages_that_do_not_follow_each_other(changes: dict[str, Any], needed: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_dict(plan_to_dict(two_stages(**changes)))
    assert needed in caught.value.needed
    assert "stages[1]" in caught.value.where


def test_stages_of_one_rank_share_its_devices_when_interleaved() -> None:
    plan = two_stages(devices=(0, 1))
    interleaved = replace(plan, schedule="interleaved_one_f_one_b", schedule_options=(("chunks", 2),))
    assert plan_from_dict(plan_to_dict(interleaved)) == interleaved
    assert interleaved.num_devices == 2


def test_plans_of_stages_that_contradict_themselves() -> None:
    plan = two_stages()
    (transfer,) = plan.transfers
    for wrong, got in (
        (replace(plan, schedule="none"), "none for 2 stages"),
        (replace(plan, transfers=(replace(transfer, target=0),)), "stage 0 to stage 0"),
        (replace(plan, transfers=(replace(transfer, target=2),)), "stage 0 to stage 2"),
        (replace(plan, transfers=(transfer, transfer)), "value 7 twice"),
        (replace(plan, scan_splits=((3, (2, 0)),)), "trips [2, 0] of equation 3"),
    ):
        with pytest.raises(PlanError) as caught:
            plan_from_dict(plan_to_dict(wrong))
        assert got in caught.value.got


def test_a_truth_value_is_not_a_number() -> None:
    document = plan_to_dict(two_stages())
    document["transfers"][0]["differentiated"] = 1
    with pytest.raises(PlanError, match="true or false"):
        plan_from_dict(document)

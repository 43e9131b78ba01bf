"""Staged plans, found with no device present: what is in them, that they are the best of their kind, and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from contradicting import contradicting

from meshwright import zoo
from meshwright._jax.grad import value_and_grad
from meshwright.cluster import Link, load_cluster
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.lowering.local_step import LocalStep
from meshwright.plan.io import load_plan, plan_from_dict, plan_to_dict
from meshwright.planning.plan_for import plan_for
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.schedule import Edge, check_schedule, make_schedule
from meshwright.search import best_known
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.pipelines.driver import (
    SIMULATED,
    NothingFaster,
    SearchResult,
    StageRequest,
    StageSearch,
    search_stages,
)
from meshwright.search.restrictions.constraints import Constraints
from meshwright.search.stages.reserve import MemoryReserve
from meshwright.simulate import EdgeTiming, StageTiming, Timing, simulate
from meshwright.zoo import registry


def hourglass(state: Any, x: Any) -> Any:
    """Layers whose results are read by the next one and by the one as far from the end, like a U-Net's."""

    def loss(weights: Any) -> Any:
        skips, h = [], x
        for w in weights[:3]:
            h = jnp.tanh(h @ w)
            skips.append(h)
        for w in weights[3:]:
            h = jnp.tanh(h @ w + skips.pop())
        return jnp.mean(h)

    value, grads = value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - g, state, grads), value


@cache
def program_of(name: str, microbatches: int) -> Any:
    if name == "hourglass":
        state = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 6
        batch = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        return trace_program(hourglass, (state, batch), microbatches=microbatches)
    target = registry.build(name, global_batch=8)
    return trace_program(target.step, (target.example_state, target.example_batch), microbatches=microbatches)


@cache
def traced(name: str, microbatches: int, layers: int) -> Any:
    program = program_of(name, microbatches)
    return staged_program(program, layers=layers), tuple(parameter_infos(program))


def request(
    name: str,
    *,
    microbatches: tuple[int, ...] = (4,),
    layers: int = 6,
    given: tuple[int, ...] | None = None,
    **changes: Any,
) -> StageRequest:
    """For a program of at most `layers` layers, in stages of `given` layers."""
    programs = [traced(name, count, layers) for count in microbatches]
    wishes: dict[str, Any] = {"cluster": load_cluster("cpu"), **changes}
    return StageRequest(programs=[p for p, _ in programs], parameters=programs[0][1], layers=given, **wishes)


@cache
def found(name: str, stages: int | None = None) -> SearchResult:
    return search_stages(request(name, stages=stages))


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("mlp-tiny", 3),
        ("gpt-tiny", 4),
        ("llama-tiny", 2),
        ("moe-tiny", 2),
        ("hourglass", 3),
        pytest.param("unet-tiny", 3, marks=pytest.mark.slow),
    ],
)
def test_a_plan_says_everything(name: str, stages: int) -> None:
    result = found(name, stages)
    plan, program = result.plan, result.program
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert len(plan.stages) == stages
    assert plan.num_devices == 8
    assert [device for stage in plan.stages for device in stage.devices] == list(range(8))
    assert plan.stages[0].equations is not None
    assert plan.stages[0].equations[0] == 0
    assert plan.stages[-1].equations is not None
    assert plan.stages[-1].equations[1] == program.equations
    # Every parameter is held somewhere, whole or in rows that make up the whole.
    graph = program.graph
    shapes = {graph.values[graph.inputs[p]].name: graph.values[graph.inputs[p]].shape for p in graph.parameters}
    parts: dict[str, set[int]] = {}
    for stage in plan.stages:
        for parameter in stage.parameters:
            rows = parameter.rows if parameter.rows is not None else (0, (*parameter.shape, 1)[0])
            parts.setdefault(parameter.name, set()).update(range(*rows))
    assert {name: len(rows) for name, rows in parts.items()} == {name: (*shape, 1)[0] for name, shape in shapes.items()}
    # What stages send is what others read, of the values of the program's graph.
    for number, stage in enumerate(plan.stages):
        assert stage.equations is not None
        cut = program.cutter.cut(*stage.equations)
        assert {t.value for t in plan.transfers if t.target == number} == set(cut.received)
        assert {t.value for t in plan.transfers if t.source == number} == set(cut.sent)
        assert [o.path for o in stage.operators] == [o.path for o in cut.graph.operators]
        assert len(stage.inputs) == len(cut.program_inputs) + len(cut.received)
        assert stage.memory.total <= stage.memory_limit_bytes
        for path, runs in stage.rematerialised:
            assert path or all(stage.equations[0] <= a < b <= stage.equations[1] for a, b in runs)


@pytest.mark.parametrize(("name", "stages"), [("gpt-tiny", 4), ("hourglass", 3)])
def test_a_plan_can_be_simulated_again_from_what_it_says(name: str, stages: int) -> None:
    plan = found(name, stages).plan
    assert plan.predicted is not None
    schedule = make_schedule(
        plan.schedule, stages, plan.microbatches, edges=[Edge(*e) for e in plan.edges], **dict(plan.schedule_options)
    )
    check_schedule(schedule)
    assert schedule.in_flight == tuple(stage.in_flight for stage in plan.stages)
    timing = Timing(
        stages=tuple(
            StageTiming(
                forward_seconds=stage.forward_seconds,
                backward_seconds=stage.backward_seconds,
                backward_input_seconds=stage.backward_seconds - stage.weight_seconds,
                backward_weight_seconds=stage.weight_seconds,
                synchronise_seconds=stage.synchronise_seconds,
                update_seconds=stage.update_seconds,
            )
            for stage in plan.stages
        ),
        edges=tuple(
            EdgeTiming(
                edge=Edge(*edge),
                forward_seconds=sum(t.forward_seconds for t in plan.transfers if (t.source, t.target) == edge),
                backward_seconds=sum(t.backward_seconds for t in plan.transfers if (t.source, t.target) == edge),
            )
            for edge in plan.edges
        ),
    )
    timeline = simulate(schedule, timing)
    assert timeline.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    assert timeline.bubble_fraction == pytest.approx(plan.predicted.bubble_fraction, abs=1e-9)


def test_a_tied_embedding_is_held_twice_and_summed() -> None:
    plan = found("gpt-tiny", 4).plan
    holders = [n for n, s in enumerate(plan.stages) if any("'tokens'" in p.name for p in s.parameters)]
    assert holders == [0, 3]


def test_skips_are_edges_from_producer_to_reader() -> None:
    plan = found("hourglass", 3).plan
    assert plan.edges == ((0, 1), (0, 2), (1, 2))


def test_scans_are_cut_between_stages_and_nowhere_else() -> None:
    plan = found("llama-tiny", 2).plan
    ((_, trips),) = plan.scan_splits
    assert trips == (1, 1)
    assert {p.rows for p in plan.stages[0].parameters if p.rows is not None} == {(0, 1)}
    single = found("llama-tiny", 1).plan
    assert single.scan_splits == ()
    assert not [p for p in single.stages[0].parameters if p.rows is not None]


def test_one_stage_is_a_plan_as_before() -> None:
    plan = found("gpt-tiny", 1).plan
    (stage,) = plan.stages
    assert (plan.schedule, plan.schedule_options, plan.transfers, stage.equations) == ("none", (), (), None)
    assert stage.layers == (0, 1)
    assert plan.predicted is not None
    assert plan.predicted.bubble_fraction == 0.0
    # The runtime of one stage takes it as it is.
    predicted = LocalStep(program_of("gpt-tiny", 4), plan).predicted_memory()
    assert predicted.peak_bytes < stage.memory_limit_bytes


def test_the_number_of_stages_is_chosen_to_be_the_best() -> None:
    free = search_stages(request("gpt-tiny")).plan.predicted
    assert free is not None
    for stages in (1, 2, 4):
        fixed = found("gpt-tiny", stages).plan.predicted
        assert fixed is not None
        assert free.step_seconds <= fixed.step_seconds * (1 + 1e-9)


def test_microbatches_are_chosen() -> None:
    one = {count: search_stages(request("mlp-tiny", microbatches=(count,))) for count in (1, 2, 4)}
    both = search_stages(request("mlp-tiny", microbatches=(1, 2, 4)))
    steps = {count: seconds(result) for count, result in one.items()}
    assert both.plan.predicted is not None
    assert both.plan.predicted.step_seconds == pytest.approx(min(steps.values()))
    assert len(both.considered) >= 3


def test_numbers_that_could_gain_little_are_in_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they could gain: what is not searched for little is as good as the printed gap says."""
    searched = search_stages(request("hourglass", microbatches=(2, 4, 8), stages=2))
    monkeypatch.setattr(best_known, "_NOT_WORTH_SEARCHING", 0.9)
    first = search_stages(request("hourglass", microbatches=(2, 4, 8), stages=2))
    assert searched.plan.predicted is not None
    assert first.plan.predicted is not None
    assert sum(one.least_seconds > 0 for one in first.considered) == 2
    assert seconds(first) >= seconds(searched) >= (1 - first.plan.predicted.optimality_gap) * seconds(first)
    assert first.plan.predicted.optimality_gap > searched.plan.predicted.optimality_gap


def test_stages_on_given_unequal_submeshes() -> None:
    plan = search_stages(request("gpt-tiny", submeshes=(2, 2, 4))).plan
    assert [len(stage.devices) for stage in plan.stages] == [2, 2, 4]


@pytest.mark.parametrize("microbatches", [2, 4])
def test_one_order_may_think_less_of_stages_that_another_has_found(microbatches: int) -> None:
    """Seen: the objective of GPipe took the place of that of 1F1B, and no plan was left to simulate."""
    v100 = load_cluster("p3.16xlarge:1")
    plan = search_stages(
        request("llama-tiny", microbatches=(microbatches,), layers=16, submeshes=(4, 4), cluster=v100)
    ).plan
    assert [len(stage.devices) for stage in plan.stages] == [4, 4]


def test_layers_and_meshes_can_be_given_for_each_stage() -> None:
    meshes = ((("data",), (2,)), (("data", "model"), (1, 2)), (("data", "model"), (2, 2)))
    plan = search_stages(request("gpt-tiny", layers=6, given=(1, 3, 2), submeshes=(2, 2, 4), stage_meshes=meshes)).plan
    assert [stage.layers for stage in plan.stages] == [(0, 1), (1, 4), (4, 6)]
    assert [stage.mesh for stage in plan.stages] == [
        (("data", 2),), (("data", 1), ("model", 2)), (("data", 2), ("model", 2))
    ]  # fmt: skip
    # Any devices will do for stages of given layers.
    plan = search_stages(request("gpt-tiny", layers=6, given=(1, 5))).plan
    assert [stage.layers for stage in plan.stages] == [(0, 1), (1, 6)]


def test_a_zero_stage_that_a_program_contradicts_is_asked_for_less_strictly() -> None:
    staged = contradicting()
    plan = search_stages(
        StageRequest(
            programs=[staged], parameters=parameter_infos(staged.source), cluster=load_cluster("cpu"), stages=2,
            constraints=Constraints(zero=1),
        )
    ).plan  # fmt: skip
    assert len(plan.stages) == 2


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe", "eager_one_f_one_b", "adaptive", "zero_bubble"])
def test_a_given_schedule_is_kept(schedule: str) -> None:
    plan = search_stages(request("mlp-tiny", stages=4, schedules=(schedule,))).plan
    assert plan.schedule == schedule


def wide_request(schedules: tuple[str, ...] = SIMULATED, stages: int | None = None) -> StageRequest:
    """Eight microbatches of a chain of products on eight devices that all reach each other at the same rate: the bubble
    is what there is to gain."""
    v100s = load_cluster("p3.16xlarge")
    link = Link(latency_seconds=3.4e-6, bandwidth_bytes_per_second=122e9, launch_seconds=8.4e-6)
    (host,) = v100s.hosts
    cluster = replace(v100s, hosts=(replace(host, link=link, wires=()),))
    target = zoo.mlp(width=1024, layers=16, batch=4096)
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=8)
    return StageRequest(
        programs=[staged_program(program)], parameters=parameter_infos(program), schedules=schedules, stages=stages,
        cluster=cluster,
    )  # fmt: skip


@cache
def wide(schedules: tuple[str, ...] = SIMULATED, stages: int | None = None) -> SearchResult:
    return search_stages(wide_request(schedules, stages))


def seconds(result: SearchResult) -> float:
    assert result.plan.predicted is not None
    return result.plan.predicted.step_seconds


def test_a_split_backward_is_chosen_where_it_is_worth_it() -> None:
    whole = wide(("one_f_one_b", "adaptive", "eager_one_f_one_b", "gpipe"), 4)
    split = wide(stages=4)
    assert split.plan.schedule == "zero_bubble"
    assert seconds(split) < 0.98 * seconds(whole)
    # Two thirds of a product's work are its gradients, and half of those the weight's.
    for stage in split.plan.stages:
        assert 0.4 * stage.backward_seconds < stage.weight_seconds < 0.6 * stage.backward_seconds
        assert stage.in_flight == 4
    assert seconds(wide()) <= seconds(split)
    # What it gains has to be more than the cost model knows.
    assert found("gpt-tiny", 2).plan.schedule != "zero_bubble"


def test_gaps_count_a_split_backward_for_more_than_it_takes() -> None:
    """Asked for alone or not, it is compared by what it counts for: a gap has nothing of the two percent. (What bounds
    this pipeline of four stages and eight microbatches is 1.1 % less than its simulated step.)"""
    alone, free = wide(("zero_bubble",), 4), wide(stages=4)
    assert alone.plan.schedule == free.plan.schedule == "zero_bubble"
    for result in (alone, free):
        assert result.plan.predicted is not None
        assert result.plan.predicted.optimality_gap == pytest.approx(0.0113, abs=1e-4)
    # What counts for no less than a plan that is known is not faster.
    counted = 1.02 * seconds(alone)
    asked = wide_request(("zero_bubble",), 4)
    assert search_stages(replace(asked, faster_than_seconds=counted * (1 + 1e-6))).plan == alone.plan
    with pytest.raises(NothingFaster):
        search_stages(replace(asked, faster_than_seconds=counted * (1 - 1e-6)))


@pytest.mark.parametrize(("stages", "ranks"), [(4, 2), (8, 4)])
def test_stages_may_share_devices(stages: int, ranks: int) -> None:
    result = wide(("interleaved_one_f_one_b",), stages)
    plan = result.plan
    assert plan.schedule == "interleaved_one_f_one_b"
    assert dict(plan.schedule_options) == {"chunks": stages // ranks}
    assert [stage.devices for stage in plan.stages[:ranks]] == [
        stage.devices for stage in plan.stages[ranks : 2 * ranks]
    ]
    assert plan.num_devices == 8
    assert len({device for stage in plan.stages for device in stage.devices}) == 8
    plain = wide(("one_f_one_b",), ranks)
    assert plain.plan.predicted is not None
    assert plan.predicted is not None
    assert plan.predicted.bubble_fraction < plain.plan.predicted.bubble_fraction
    for rank in range(ranks):
        held = sum(stage.memory.total for stage in plan.stages[rank::ranks])
        assert held <= plan.stages[rank].memory_limit_bytes


def test_an_interleaving_is_found_where_bounds_rule_out_all_other_stages() -> None:
    interleaved = wide(("interleaved_one_f_one_b",))
    ranks = len({stage.devices for stage in interleaved.plan.stages})
    least = seconds(interleaved) * (1 + 1e-6)
    asked = wide_request(("one_f_one_b", "interleaved_one_f_one_b"))
    asked = replace(asked, faster_than_seconds=least)
    result = search_stages(asked)
    assert result.plan.schedule == "interleaved_one_f_one_b"
    assert len({stage.devices for stage in result.plan.stages}) == ranks
    assert seconds(result) < least
    with pytest.raises(NothingFaster):
        search_stages(replace(asked, faster_than_seconds=0.9 * least))


@pytest.mark.slow
def test_memory_decides() -> None:
    """With little memory the plan keeps less in flight, rematerialises, or is refused with what it would take."""
    roomy = found("gpt-tiny", 4).plan
    most = max(stage.memory.total for stage in roomy.stages)
    tight = load_cluster("cpu").with_memory_limit(0.6 * most)
    plan = search_stages(request("gpt-tiny", stages=4, cluster=tight)).plan
    assert max(stage.memory.total for stage in plan.stages) <= 0.6 * most
    for stage in plan.stages:
        for path, runs in stage.rematerialised:
            assert stage.equations is not None
            assert path or all(stage.equations[0] <= a < b <= stage.equations[1] for a, b in runs)
    assert plan.predicted is not None
    assert roomy.predicted is not None
    assert plan.predicted.step_seconds >= roomy.predicted.step_seconds
    with pytest.raises(MemoryExceeded) as caught:
        search_stages(request("gpt-tiny", cluster=load_cluster("cpu").with_memory_limit(1e4)))
    assert "microbatches" in caught.value.needed


@pytest.mark.parametrize("share", [0.9, pytest.param(0.7, marks=pytest.mark.slow)])
def test_a_repeated_search_is_as_good_as_a_new_one(share: float) -> None:
    """With less memory, the plans of the run before are looked at first, and bound the others."""
    asked = request("gpt-tiny", microbatches=(2, 4), layers=3)
    search = StageSearch(asked)
    plan = search.run().plan
    usable = asked.cluster.device.usable_memory_bytes
    kept = usable - share * max(stage.memory.total for stage in plan.stages)

    def reserve(microbatches: int) -> MemoryReserve:
        del microbatches
        return MemoryReserve(kept, kept)

    again, new = search.run(reserve), StageSearch(asked).run(reserve)
    assert again.plan.predicted.step_seconds <= (1 + 1e-9) * new.plan.predicted.step_seconds
    assert max(stage.memory.total for stage in again.plan.stages) <= usable - kept
    assert len({*map(str, again.considered)}) == len(again.considered)


def test_no_time_is_enough_for_some_plan() -> None:
    result = StageSearch(request("gpt-tiny", microbatches=(1, 2, 4))).run(time_limit_seconds=0.0)
    assert result.plan.stages
    assert any("out of time" in one.words for one in result.considered)
    target = registry.build("gpt-tiny")
    args = target.example_state, target.example_batch
    for stages in (1, None):
        planning = plan_for(target.step, args, cluster="cpu", stages=stages, time_limit_seconds=1e-6)
        assert any("not searched, out of time" in one.words for one in planning.considered)
        # Of the other meshes nothing is known but how much arithmetic there is.
        assert 0.5 < planning.plan.predicted.optimality_gap < 1


def test_the_same_request_gives_the_same_plan() -> None:
    assert search_stages(request("moe-tiny", stages=2)).plan == found("moe-tiny", 2).plan


def test_plans_are_saved(tmp_path: Any) -> None:
    plan = found("hourglass", 3).plan
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


# Refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": 7}, "6 layers and 8 devices"),
        ({"stages": 0}, "0"),
        ({"stages": True}, "True"),
        ({"submeshes": (3, 5)}, "3 devices of 8"),
        ({"submeshes": (4, 8)}, "12 devices in all"),
        ({"submeshes": (4, 4), "stages": 3}, "stages= for 3 stages and submeshes= for 2 stages"),
        ({"given": (2, 2)}, "4 layers in all"),
        ({"submeshes": (4, 4), "schedules": ("interleaved_one_f_one_b",)}, "submeshes="),
        ({"given": (7, -1)}, "6 layers in all"),
        ({"stage_meshes": ((("x",), (8,)),)}, "meshes of 8 devices"),
        ({"submeshes": (4, 4), "stage_meshes": ((("x",), (4,)), (("x",), (2,)))}, "meshes of 4, 2 devices"),
        ({"remat": "all"}, "'all'"),
        ({"schedules": ("zb",)}, "does not try"),
        ({"schedules": ()}, "does not try"),
    ],
)
def test_refusals_name_their_five_parts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        search_stages(request("mlp-tiny", **changes))
    error = caught.value
    assert words in error.got
    assert all((error.refused, error.needed, error.where, error.try_))


def test_no_program_is_refused() -> None:
    with pytest.raises(PlanError, match="no program"):
        search_stages(StageRequest(programs=(), parameters=(), cluster=load_cluster("cpu")))


@pytest.mark.parametrize(("count", "got"), [(0, "0"), (3, "a batch of 8")])
def test_microbatches_that_cannot_be(count: int, got: str) -> None:
    target = registry.build("mlp-tiny", global_batch=8)
    with pytest.raises(PlanError) as caught:
        trace_program(target.step, (target.example_state, target.example_batch), microbatches=count)
    assert got in caught.value.got

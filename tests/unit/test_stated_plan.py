"""Stated plans: work as the search accounts for it, memory as a published formula has it, steps as schedules take."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf, prod
from typing import Any

import pytest
from stated import MemoryLayout, SolvedPlan, StatedPlan, price_stated, solve_stated, stage_work

from meshwright.cluster import load_cluster
from meshwright.cost.efficiency import profile_of
from meshwright.errors import PlanError
from meshwright.program.batch import batch_inputs
from meshwright.program.staged import staged_program
from meshwright.program.traces import Traces
from meshwright.search.intra.account import account
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.restrictions.constraints import Constraints
from meshwright.search.restrictions.roles import Role, Roles
from meshwright.search.stages.problem import StageProblem
from meshwright.zoo import gpt, llama

CLUSTER = load_cluster("dgx-a100-80")
PROFILE = profile_of(CLUSTER.device)
MEGATRON = MemoryLayout(weights=2, gradients=4, optimizer=12, fuses=False, masks=True)


@cache
def traced(config: Any) -> tuple[Traces, tuple[Any, ...]]:
    family = llama if isinstance(config, llama.LlamaConfig) else gpt
    target = family.build(config)
    return Traces(target.step), (target.example_state, target.example_batch)


def small(**changes: Any) -> gpt.GPTConfig:
    config = gpt.GPTConfig(
        name="small", hidden=512, layers=8, heads=8, vocabulary=1024, sequence=256, global_batch=8, dtype="float16",
        scan=True,
    )  # fmt: skip
    return replace(config, **changes)


def solved(plan: StatedPlan, config: Any) -> SolvedPlan:
    return solve_stated(plan, *traced(config), CLUSTER)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_work_of_a_stage_is_what_the_search_accounts_for(zero: int) -> None:
    traces, args = traced(small())
    program = traces.program(args)
    staged = staged_program(program, layers=1, scan_splits={})
    cut = staged.cutter.cut(*staged.layers[0])
    mesh = CLUSTER.logical_mesh((2, 4), ("data", "model"))
    axes: dict[str, Role] = {"data": "batch", "model": "tensor"}
    roles = Roles(axes=axes, batch=batch_inputs(program, traces, args), gathered=zero == 3)
    problem = StageProblem(
        cut, cut.graph, mesh, CLUSTER.device, parameters=parameter_infos(program), microbatches=1,
        constraints=Constraints(zero=zero, roles=roles), split_dims=staged.split_dims,
    )  # fmt: skip
    chosen = problem.solve(inf, gap=0.0, time_limit_seconds=20.0)
    work, total = stage_work(problem, chosen), account(problem, chosen)
    flops = sum(k.flops * (r.forward + r.again + r.backward) for k, r in work.kernels)
    assert flops == pytest.approx(total.flops)
    moved: dict[str, float] = {}
    for movement, runs in work.movements:
        count = runs.forward + runs.again + runs.backward
        moved[movement.kind] = moved.get(movement.kind, 0.0) + count * movement.size_bytes
    for movement in (*work.synchronise, *work.fetch):
        moved[movement.kind] = moved.get(movement.kind, 0.0) + movement.size_bytes
    assert moved == pytest.approx({kind: size for kind, (_, size) in total.traffic.items()})


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "per_value"),
    [
        ("none", False, lambda t, scores: 10 + 24 / t + 5 * scores / t),
        ("none", True, lambda t, scores: 34 / t + 5 * scores / t),
        ("attention", True, lambda t, scores: 34 / t),
        ("layer", False, lambda t, scores: 2),
    ],
)
def test_activations_are_those_of_korthikanti(recompute: Any, sequence_parallel: bool, per_value: Any) -> None:
    """Table 2 of Korthikanti et al. 2022, bytes of a layer: s b h (...)."""
    config = small(hidden=1024, heads=16, layers=16)
    plan = StatedPlan(tensor=4, recompute=recompute, sequence_parallel=sequence_parallel)
    kept = next(iter(solved(plan, config).kinds.values())).kept
    values = config.sequence * config.global_batch * config.hidden
    expected = config.layers * values * per_value(4, config.heads * config.sequence / config.hidden)
    # Besides layers: what the embedding and the last normalisation leave, and single numbers a token.
    assert kept.eager + kept.masks == pytest.approx(expected, rel=0.1)


def test_state_is_split_as_zero_says() -> None:
    config = small()
    held = {}
    for zero in (0, 1, 2, 3):
        found = solved(StatedPlan(data=8, zero=zero), config)
        held[zero] = price_stated(found, PROFILE, MemoryLayout(weights=2, gradients=2, optimizer=12)).state_bytes
    parameters = held[0] / 16
    assert held[1] == pytest.approx(parameters * (4 + 12 / 8), rel=1e-3)
    assert held[2] == pytest.approx(parameters * (2 + 14 / 8), rel=1e-3)
    assert held[3] == pytest.approx(parameters * 16 / 8, rel=1e-3)


def test_a_pipeline_takes_its_microbatches_and_its_bubble() -> None:
    plan = StatedPlan(pipeline=4, microbatches=16, recompute="layer")
    found = price_stated(solved(plan, small()), PROFILE)
    stages = found.timeline.timing.stages
    busiest = max(stage.forward_seconds + stage.backward_seconds for stage in stages)
    assert 16 * busiest < found.step_seconds < 19 * busiest + 0.01


def test_products_of_one_layer_are_as_narrow_as_those_of_many() -> None:
    """A stage with one layer runs each product once, as the head does, which stays wide; embeddings have none."""
    many, each = small(layers=8), StatedPlan(pipeline=8, microbatches=8)
    device = replace(CLUSTER.device, peak_flops={**CLUSTER.device.peak_flops, "float8_e4m3fn": 1e15})
    one = solved(each, many)
    one = replace(one, cluster=replace(one.cluster, hosts=(replace(one.cluster.hosts[0], device=device),)))
    wide, narrow = (price_stated(one, PROFILE, narrow_products=narrow) for narrow in (False, True))
    for before, after in zip(wide.timeline.timing.stages, narrow.timeline.timing.stages, strict=True):
        assert after.forward_seconds < before.forward_seconds


def test_parameters_are_kept_in_the_type_that_products_read() -> None:
    """No pass over each of them for each microbatch, which a program that keeps them in four bytes would make."""
    kernels = next(iter(solved(StatedPlan(), small(layers=2, global_batch=10)).kinds.values())).work.kernels
    matrices = {512 * n for n in (3 * 512, 512, 2048, 1024)}  # no activation of ten samples has as many elements
    written = {kernel.moved_bytes for kernel, _ in kernels if kernel.kind in ("stored", "fused")}
    assert written
    assert not written & {2.0 * elements for elements in matrices}


def test_many_microbatches_are_as_if_all_were_simulated() -> None:
    config, plan = small(), StatedPlan(pipeline=4, chunks=2, microbatches=64)
    few = solved(plan, config)
    assert len(few.schedules) == 2
    from stated.solved import schedule_of

    every = replace(few, schedules=(schedule_of(plan, len(few.order), 64),))
    assert price_stated(few, PROFILE).step_seconds == pytest.approx(price_stated(every, PROFILE).step_seconds, rel=1e-3)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_rank_computes_no_longer_than_the_step_takes(chunks: int) -> None:
    """Its chunks are of several kinds: only the last has the head, which is large here."""
    config = small(vocabulary=65536)
    found = price_stated(solved(StatedPlan(pipeline=2, chunks=chunks, microbatches=16), config), PROFILE)
    assert 0.5 * found.step_seconds < found.compute_seconds + found.exposed_seconds <= found.step_seconds


def test_what_is_left_over_goes_to_inner_stages() -> None:
    found = solved(StatedPlan(pipeline=3, microbatches=3), small())
    assert found.order == ("first", "inner", "last")  # 2 + 4 layers would be unequal: 3 = 8 // 3 rounded, 2 left over
    assert sum(kind.count for kind in found.kinds.values()) == 3


def test_fused_attention_is_one_kernel_and_keeps_no_scores() -> None:
    plain, fused = (solved(StatedPlan(), small(attention=kind)) for kind in ("plain", "fused"))
    kernels = [kernel.kind for kernel, _ in fused.kinds["only"].work.kernels]
    assert kernels.count("attention") == 1
    assert fused.kinds["only"].kept.eager < plain.kinds["only"].kept.eager


def test_context_devices_split_the_sequence_and_gather_keys() -> None:
    config = llama.LlamaConfig(
        name="small", hidden=512, layers=4, heads=8, kv_heads=4, intermediate=1024, vocabulary=1024, sequence=1024,
        global_batch=2, attention="fused",
    )  # fmt: skip
    whole, split = (solved(StatedPlan(context=n, data=1), config).kinds["only"] for n in (1, 4))

    def flops(kind: Any, *, of_attention: bool) -> float:
        kernels = ((one, runs) for one, runs in kind.work.kernels if (one.kind == "attention") == of_attention)
        return sum(kernel.flops * runs.forward for kernel, runs in kernels)

    assert flops(split, of_attention=False) == pytest.approx(flops(whole, of_attention=False) / 4)
    # One block under the mask, which computes all of its scores, and half of the scores of the three others.
    assert flops(split, of_attention=True) == pytest.approx(flops(whole, of_attention=True) / 4 * (1 + 3 / 2) / 4)
    gathered = [movement for movement, _ in split.work.movements if movement.kind == "all_gather"]
    assert gathered
    assert all(prod(movement.axes.count("context") for _ in (0,)) for movement in gathered)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="a layer for each stage"):
        solved(StatedPlan(pipeline=16, microbatches=16), small())

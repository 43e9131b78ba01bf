"""What stages keep for their backward pass: counted by the search, and traced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshwright import presets, zoo
from meshwright._jax.grad import value_and_grad
from meshwright._jax.jaxpr import inline, open_jaxpr
from meshwright.cluster import load_cluster
from meshwright.lowering.loop_residuals import policy_of
from meshwright.lowering.written_out import written_out
from meshwright.plan import Plan
from meshwright.planning import refine
from meshwright.planning.plan_for import plan_for
from meshwright.program.residuals import kept_in_one_program, kept_values
from meshwright.program.staged import staged_program
from meshwright.program.traces import traces_of
from meshwright.schedule import make_schedule
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.pipelines.driver import StageRequest, search_stages
from meshwright.search.pipelines.timing import StagedTiming
from meshwright.simulate import StageTiming, Timing
from meshwright.zoo import Target, gpt, llama

SMALL = replace(gpt.CONFIGS["gpt-tiny"], sequence=128, global_batch=16)


@cache
def scanned() -> list[float]:
    """What two layers of GPT in a scan keep."""
    return activations(gpt.build(replace(SMALL, hidden=64, heads=4, layers=2, scan=True)))


def activations(target: Target) -> list[float]:
    """Bytes of each of two stages, traced."""
    plan = plan_for(
        traces_of(target.step), (target.example_state, target.example_batch), cluster=load_cluster("dgx-a100-80"),
        preset=presets.megatron(tp=2, pp=2, dp=2), microbatches=4, remat="none",
    ).plan  # fmt: skip
    return [stage.memory.activations for stage in plan.stages]


CASES = {
    "gpt": lambda: gpt.build(replace(SMALL, hidden=512, heads=8, layers=6)),
    "gpt, one scan": lambda: gpt.build(replace(SMALL, hidden=512, heads=8, layers=6, scan=True)),
    "llama, one scan": lambda: llama.build(
        replace(llama.CONFIGS["llama-tiny"], hidden=512, intermediate=1408, layers=6, sequence=512)
    ),
    "moe": lambda: zoo.build("moe-380m", global_batch=32),
    "wide resnet": lambda: zoo.build("wresnet-250m"),
}


# What a mixture's stages hold, kept values among it: `test_workspace`. Of scans one model is in `make test`.
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.slow] * (n in {"moe", "gpt, one scan", "wide resnet"})) for n in CASES]
)
@pytest.mark.parametrize("mesh", [pytest.param((4,), marks=pytest.mark.slow), (2, 2)])
def test_the_search_counts_what_stages_keep(case: str, mesh: tuple[int, ...]) -> None:
    target = CASES[case]()
    program = traces_of(target.step).program((target.example_state, target.example_batch), microbatches=2)
    staged = staged_program(program, layers=2)
    cluster = load_cluster("dgx-a100-80")
    request = StageRequest(
        programs=[staged], parameters=parameter_infos(program), cluster=cluster, stages=2, remat="none",
        mesh=[("xy"[: len(mesh)], mesh)], submeshes=(4, 4), schedules=("one_f_one_b",),
    )  # fmt: skip
    plan = search_stages(request).plan
    traced = written_out(plan, staged, "gpu")
    for counted, stage in zip(plan.stages, traced.stages, strict=True):
        assert 0.8 * stage.memory.activations < counted.memory.activations < 1.25 * stage.memory.activations


ONE_PROGRAM = {
    "gpt": lambda: gpt.build(replace(SMALL, sequence=256, hidden=512, heads=8, layers=4)),
    "gpt, bfloat16": lambda: gpt.build(replace(SMALL, sequence=256, hidden=512, heads=8, layers=4, dtype="bfloat16")),
    "gpt, bfloat16, many samples": lambda: gpt.build(
        replace(SMALL, global_batch=128, sequence=512, hidden=256, heads=8, layers=4, dtype="bfloat16")
    ),
    "wide resnet": lambda: zoo.build("wresnet-250m", global_batch=64),
}


@pytest.mark.parametrize(
    ("case", "cluster"),
    [
        pytest.param("gpt", "dgx-a100-80", marks=pytest.mark.slow),
        ("gpt, bfloat16", "dgx-a100-80"),
        ("gpt, bfloat16", "tpu-v5e:8"),
        ("gpt, bfloat16, many samples", "p3.16xlarge"),  # multiplies bfloat16 as float32
        pytest.param("wide resnet", "dgx-a100-80", marks=pytest.mark.slow),
    ],
)
def test_the_search_counts_what_one_program_holds(case: str, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the forward pass has written stays there for a backward pass in the same program, cheap or not."""
    counted = []

    def recorded(plan: Plan, *args: Any, **options: Any) -> Plan:
        counted.append(plan.stages[0].memory.total)
        return written_out(plan, *args, **options)

    monkeypatch.setattr(refine, "written_out", recorded)
    target = ONE_PROGRAM[case]()
    plan = plan_for(
        target.step, (target.example_state, target.example_batch), cluster=load_cluster(cluster), stages=1,
        microbatches=2, remat="none",
    ).plan  # fmt: skip
    assert 0.9 * plan.stages[0].memory.total < counted[-1] < 1.1 * plan.stages[0].memory.total


def test_one_program_keeps_what_its_forward_pass_writes() -> None:
    """Of `tanh(x @ w) @ v` two programs keep what the first product makes, one keeps what `tanh` does; it keeps a
    cast that both products could make again where they read it, and not the sum that nothing but arithmetic reads."""

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ params[0]) @ params[1]
        return jnp.sum(jnp.square((y + x) * 2.0))

    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, grads = value_and_grad(loss)(params, x)
        return [p - g for p, g in zip(params, grads, strict=True)], value

    array = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = traces_of(step).program(([array, array], array)).graph

    def names(values: frozenset[int]) -> set[str]:
        return {graph.operators[graph.producer[value][0]].name for value in values if graph.values[value].shape}

    kept, one = kept_values(graph), kept_in_one_program(graph)
    assert names(kept) == {"dot_general"}
    assert names(one) == {"dot_general", "tanh"}
    assert len(kept) == 2
    assert len(one) == 2


def test_a_scan_keeps_no_more_than_its_layers_unrolled() -> None:
    """JAX's own derivative of the scan keeps 2.9 times as much: softmax and GELU above all."""
    unrolled = activations(gpt.build(replace(SMALL, hidden=64, heads=4, layers=2)))
    for kept, expected in zip(scanned(), unrolled, strict=True):
        assert 0.5 * expected < kept < 1.1 * expected


@pytest.mark.parametrize("family", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_what_a_user_rematerialises_in_a_scan_is_not_kept(family: str) -> None:
    """The loop's own rule would keep products; inside of `jax.checkpoint` the user has said otherwise."""

    def target(*, remat: bool) -> Target:
        if family == "gpt":
            return gpt.build(replace(SMALL, hidden=64, heads=4, layers=2, scan=True), remat=remat)
        return llama.build(replace(llama.CONFIGS["llama-tiny"], layers=2, sequence=128, global_batch=16), remat=remat)

    whole = scanned() if family == "gpt" else activations(target(remat=False))
    for kept, less in zip(whole, activations(target(remat=True)), strict=True):
        assert less < 0.5 * kept


def scaled(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jax.nn.silu(x @ w), None


@jax.custom_vjp
def own(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


own.defvjp(lambda x: (own(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))

BODIES = {
    "a layer": (scaled, {"dot_general"}),
    "a derivative of its own": (lambda x, w: (own(x @ w), None), {"add", "dot_general"}),
    "a loop": (lambda x, w: (lax.fori_loop(0, 3, lambda _, y: y @ w, x), None), None),
    "a branch": (lambda x, w: (lax.cond(x[0, 0] > 0, lambda y: y @ w, lambda y: y, x), None), None),
    "dropout": (
        lambda x, w: (jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x @ w, 0), None),
        {"add", "dot_general"},
    ),
    "a convolution": (
        lambda x, w: (lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0], None),
        {"add", "dot_general"},
    ),
    "a callback": (lambda x, w: (jax.pure_callback(lambda y: y, x, x @ w), None), {"add", "dot_general"}),
    "a checkpoint": (lambda x, w: jax.checkpoint(scaled)(x, w), None),
}


@pytest.mark.parametrize("body", BODIES)
def test_what_loops_store_of_their_bodies(body: str) -> None:
    """Never a gathered weight, and what is cheap only beside what a policy would run again; of bodies with loops inside
    JAX decides."""
    run, stored = BODIES[body]
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    policy = policy_of(open_jaxpr(inline(jax.make_jaxpr(run)(x, x))), gathers_weights=True)
    asked = ("add", "dot_general", "all_gather")
    assert (policy and {name for name in asked if policy(SimpleNamespace(name=name))}) == stored


@pytest.mark.parametrize(("limit", "fits"), [(19.9, False), (20.0, True)])
def test_a_split_backward_keeps_something_else_until_its_weight_gradient(limit: float, *, fits: bool) -> None:
    """ZB-H1 on two stages: the second delays both of its microbatches, the first one of two: 10 + 2 * 5, 10 + 1 + 5."""
    staged = StagedTiming(
        timing=Timing(
            stages=(StageTiming(forward_seconds=1.0, constant_bytes=10.0, in_flight_bytes=1.0),) * 2, edges=()
        ), sent=(), bytes_delayed=(5.0, 5.0), limit_bytes=(16.0, limit),
    )  # fmt: skip
    assert staged.fits(make_schedule("zero_bubble", 2, 4)) == fits
    assert staged.fits(make_schedule("one_f_one_b", 2, 4))

"""Collectives beside compute: the options of the programs of plans, and the schedules that come of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import meshwright as mw
from meshwright._jax import compiler_options as chosen
from meshwright._jax.ahead import compile_ahead, has_cuda_compiler, has_tpu_compiler
from meshwright._jax.compiler_options import compiler_options
from meshwright._jax.hlo_schedule import ScheduledCollective, read_schedule
from meshwright.cluster import load_cluster
from meshwright.compilers import target_devices
from meshwright.planning.plan_for import plan_for
from meshwright.runtime.executable import executable
from meshwright.runtime.pipeline import stage_runtime
from meshwright.runtime.pipeline.stage_runtime import StageRuntime

HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True}


def devices(platform: str, **more: Any) -> list[jax.Device]:
    return [cast(jax.Device, SimpleNamespace(platform=platform, process_index=0, **more))] * 2


@pytest.mark.parametrize(
    ("capability", "options"), [("7.0", {}), ("8.0", HIDING), ("8.9", HIDING), ("9.0", {}), ("gfx942", HIDING)]
)
def test_gpus_that_do_not_hide_latency_by_default_are_told_to(
    monkeypatch: pytest.MonkeyPatch, capability: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(chosen, "_knows", lambda *_: True)
    assert compiler_options(devices("gpu", compute_capability=capability)) == options


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "_knows", lambda *_: True)
    tpus = devices("tpu")
    assert "xla_tpu_overlap_compute_collective_tc" in compiler_options(tpus)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_overlap_compute_collective_tc=false")
    assert "xla_tpu_overlap_compute_collective_tc" not in compiler_options(tpus)
    assert compiler_options(tpus)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true")
    assert "xla_tpu_enable_async_collective_fusion" in compiler_options(tpus)  # another flag begins like it
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=false")
    assert compiler_options(devices("gpu", compute_capability="8.0")) == {}


def test_programs_without_collectives_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "_knows", lambda *_: True)
    assert compiler_options(devices("tpu")[:1]) == {}
    assert compiler_options(jax.devices()) == {}  # CPUs


def test_a_compiler_that_does_not_know_an_option_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"xla_cpu_enable_fast_math": False}
    asked = {"xla_no_such_option": True, "xla_cpu_enable_fast_min_max": "neither true nor false", **known}
    monkeypatch.setattr(chosen, "_asked", lambda _: asked)
    assert compiler_options([*jax.devices()[:1]] * 2) == known


def test_nothing_is_compiled_for_stages_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have no compiler here: options are looked up when a program of the stage is made."""
    asked: list[Any] = []
    monkeypatch.setattr(stage_runtime, "compiler_options", asked.append)
    theirs = np.array([SimpleNamespace(platform="tpu", process_index=1)] * 2)
    mesh = cast(Mesh, SimpleNamespace(axis_names=("x",), devices=theirs))
    assert not StageRuntime(cast(Any, None), cast(Any, None), mesh).is_mine
    assert not asked


def scheduled(cluster_name: str) -> list[ScheduledCollective]:
    """The collectives of ZeRO-3 for a scan over layers of four weights of 32 MiB in bfloat16, as the cluster's compiler
    orders them."""
    weights = [jax.ShapeDtypeStruct((8, 4096, 4096), jnp.float32)] * 4

    def loss(w: list[jax.Array], x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, each: list[jax.Array]) -> tuple[jax.Array, None]:
            for one in each:
                x = jnp.tanh(x @ one.astype(jnp.bfloat16))
            return x, None

        return jnp.mean(jax.lax.scan(layer, x, w)[0].astype(jnp.float32))

    def step(w: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, gradients = mw.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda old, gradient: old - 0.1 * gradient, w, gradients), value

    batch = jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16)
    cluster = load_cluster(cluster_name)
    found = plan_for(step, (weights, batch), cluster=cluster, preset="zero(stage=3)", microbatches=1)
    text = compile_ahead(executable(found.program, found.plan, target_devices(cluster, found.plan)).lower()).as_text()
    return [one for one in read_schedule(text).collectives if one.bytes > 2**20]


def share_beside_compute(collectives: list[ScheduledCollective], kinds: tuple[str, ...]) -> float:
    each = [one for one in collectives if one.kind in kinds]
    return sum(one.count for one in each if one.is_asynchronous and one.flops) / sum(one.count for one in each)


@pytest.mark.compilers
@pytest.mark.skipif(not has_tpu_compiler(), reason="needs libtpu: make test-compilers")
def test_tpus_gather_beside_compute() -> None:
    assert share_beside_compute(scheduled("tpu-v5p:8"), ("all_gather",)) >= 0.75  # all but the first of a layer


@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.skipif(not has_cuda_compiler(), reason='needs jax_cuda12_plugin: "meshwright[cuda]"')
@pytest.mark.parametrize("cluster", ["dgx-a100-40:1", "dgx-h100:1"])
def test_gpus_scatter_a_layers_gradients_beside_the_next(cluster: str) -> None:
    assert share_beside_compute(scheduled(cluster), ("reduce_scatter",)) > 0.8

"""NVIDIA GPUs that are not here: what XLA is told of them, and what it compiles for them."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import pytest

from meshwright._jax.ahead import compile_ahead, has_cuda_compiler
from meshwright._jax.hlo import read_compiled
from meshwright.cluster import Cluster, Device, load_cluster, preset_names
from meshwright.compilers import check_compiler, target_devices, targets
from meshwright.compilers.facts import facts_of
from meshwright.compilers.gpu_target import gpu_kinds, gpu_target
from meshwright.errors import PlanError
from meshwright.planning.plan_for import plan_for
from meshwright.program.effects import without_effects
from meshwright.runtime.executable import executable
from meshwright.runtime.step import PlannedStep
from meshwright.targets import load_target

needs_cuda_plugin = pytest.mark.skipif(not has_cuda_compiler(), reason='needs jax_cuda12_plugin: "meshwright[cuda]"')


def described(device: Device) -> dict[str, str]:
    text = gpu_target(device)
    assert text.count("{") == text.count("}")
    return dict(re.findall(r'(\w+): ("[^"]*"|\S+)', text))


def with_device(cluster: Cluster, **changes: object) -> Cluster:
    hosts = [replace(host, device=replace(host.device, **changes)) for host in cluster.hosts]
    return replace(cluster, hosts=tuple(hosts))


@pytest.mark.parametrize("kind", gpu_kinds())
def test_a_target_says_what_a_device_is(kind: str) -> None:
    device = replace(load_cluster("dgx-h100:1").device, kind=kind, memory_bytes=8e9, usable_memory_fraction=0.8)
    found = described(device)
    assert found["device_description_str"] == f'"{kind}"'
    # XLA lets programs have 80 % of it, which is what the cluster does.
    assert int(found["device_memory_size"]) == 8e9
    for name in ("core_count", "memory_bandwidth", "l2_cache_size", "threads_per_core_limit"):
        assert int(found[name]) > 0
    assert int(found["shared_memory_per_block_optin"]) <= int(found["shared_memory_per_core"])


class Lowered:
    """A program of which a product has no tiles unless the library's is taken, and the options of its compilations."""

    def __init__(self, words: str) -> None:
        self._words, self.options = words, list[dict[str, object]]()

    def compile(self, compiler_options: dict[str, object]) -> str:
        self.options.append(compiler_options)
        if compiler_options.get("xla_gpu_enable_triton_gemm", True):
            raise jax.errors.JaxRuntimeError(self._words)
        return "compiled"


def test_products_without_tiles_are_the_librarys() -> None:
    lowered = Lowered("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.47")
    assert compile_ahead(lowered, {"xla_dump_to": "here"}) == "compiled"
    assert lowered.options == [{"xla_dump_to": "here"}, {"xla_dump_to": "here", "xla_gpu_enable_triton_gemm": False}]
    other = Lowered("RESOURCE_EXHAUSTED: out of memory")
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_ahead(other)
    assert len(other.options) == 1


def test_the_target_of_an_h100() -> None:
    device = load_cluster("dgx-h100:1").device
    found = described(device)
    assert found["core_count"] == "132"
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in gpu_target(device)
    # No program gets more than the device has, whatever a cluster says.
    assert int(described(replace(device, memory_bytes=1e12))["device_memory_size"]) == round(84942979072 / 0.8)


def test_presets_agree_with_targets() -> None:
    """A large operator reaches at most the whole bandwidth, and all that a preset calls usable is there."""
    kinds = set()
    for name in preset_names():
        device = load_cluster(f"{name}:1" if name != "cpu" else name).device
        if device.kind in gpu_kinds():
            kinds.add(device.kind)
            found = described(device)
            assert 0.8 * int(found["device_memory_size"]) == pytest.approx(device.usable_memory_bytes)
            assert 0.85 < device.memory_bandwidth_bytes_per_second / int(found["memory_bandwidth"]) <= 1
    assert len(kinds) >= 9


@pytest.mark.parametrize("name", ["p3.16xlarge:1", "rtx4090-4:1"])
def test_float32_units_and_clock_give_the_peak(name: str) -> None:
    """Where float32 products are not TensorFloat-32's."""
    device = load_cluster(name).device
    found = described(device)
    flops = 2 * int(found["core_count"]) * int(found["fpus_per_core"]) * float(found["clock_rate_ghz"]) * 1e9
    assert flops == pytest.approx(device.peak_flops["float32"], rel=0.01)


@pytest.mark.parametrize("kind", ["Tesla P40", "AMD Instinct MI300X"])
def test_gpus_without_a_description_are_refused(kind: str) -> None:
    with pytest.raises(PlanError, match=rf"{kind}.*one of the 14 NVIDIA GPUs"):
        check_compiler(with_device(load_cluster("dgx-h100:1"), kind=kind))


def test_hosts_of_two_kinds_are_refused() -> None:
    with pytest.raises(PlanError, match="each kind of host as a cluster of its own"):
        check_compiler(load_cluster("dgx-h100:1+dgx-a100-80:1"))


def test_where_the_plugin_is_missing_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "has_cuda_compiler", lambda: False)
    with pytest.raises(PlanError, match=r'pip install "meshwright\[cuda\]" \(no GPU is needed\)'):
        check_compiler(load_cluster("dgx-h100:1"))


@needs_cuda_plugin
@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "stages"), [("p3.16xlarge:2", 1), ("p4d.24xlarge:1", 2), ("dgx-b200:1", 1)])
def test_a_plan_is_compiled_by_the_compiler_of_its_gpus(cluster: str, stages: int) -> None:
    described = load_cluster(cluster)
    target = load_target("gpt-tiny")
    found = plan_for(target.step, target.example_args, cluster=described, stages=stages)
    devices = target_devices(described, found.plan)
    assert [one.device_kind for one in devices if one is not None] == [described.device.kind] * found.plan.num_devices
    step = executable(without_effects(found.program), found.plan, devices)
    for facts in facts_of(step, found.plan, cluster=described):
        assert facts.flops[0] == facts.flops[1]
        assert facts.rematerialised == 0
        for kind in facts.predicted.keys() | facts.compiled.keys():
            assert facts.predicted[kind].bytes == pytest.approx(facts.compiled[kind].bytes, rel=1e-3)


@needs_cuda_plugin
@pytest.mark.compilers
@pytest.mark.slow
def test_what_xla_rematerialises_is_counted() -> None:
    """In less memory than a program needs, XLA makes do with less by itself: the peak alone does not show it."""
    cluster = load_cluster("dgx-h100:1")
    target = load_target("gpt-tiny", global_batch=4096)
    found = plan_for(target.step, target.example_args, cluster=cluster, stages=1)

    def compiled(cluster: Cluster) -> tuple[int, int]:
        step = executable(without_effects(found.program), found.plan, target_devices(cluster, found.plan))
        assert isinstance(step, PlannedStep)
        facts = read_compiled(step.lower().compile())
        return facts.peak_bytes, facts.rematerialised

    needed, again = compiled(cluster)
    assert again == 0
    less, again = compiled(with_device(cluster, memory_bytes=0.9 * needed, usable_memory_fraction=1.0))
    assert less <= 0.9 * needed
    assert again > 0

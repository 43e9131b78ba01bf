"""Machines that are not here: which ones can be compiled for, and the devices of a plan there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

from meshwright._jax.ahead import has_tpu_compiler
from meshwright.cluster import Cluster, load_cluster
from meshwright.compilers import check_compiler, target_devices, targets
from meshwright.errors import PlanError
from meshwright.planning.plan_for import plan_for
from meshwright.targets import load_target, zoo_target
from meshwright.zoo import gpt

NEEDS_LIBTPU = pytest.mark.skipif(not has_tpu_compiler(), reason="needs libtpu: make test-compilers")


def refusal(cluster: Cluster) -> str:
    with pytest.raises(PlanError) as error:
        check_compiler(cluster)
    return str(error.value)


def test_a_cluster_without_a_compiler_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'cluster="local"' in refusal(load_cluster("cpu"))
    assert "hosts of several kinds" in refusal(load_cluster("tpu-v5e:8+tpu-v5e:16"))
    monkeypatch.setattr(targets, "has_tpu_compiler", lambda: False)
    assert 'pip install "meshwright[tpu]"' in refusal(load_cluster("tpu-v5e:8"))


@pytest.mark.parametrize(
    ("chips", "shape", "wraps"),
    [
        (range(256), (16, 16), (True, True)),
        (range(32), (2, 16), (False, True)),  # two rows, of which each is a ring
        (range(16, 24), (1, 8), (False, False)),
        ([0, 1, 16, 17], (2, 2), (False, False)),
        ([0, 1, 2, 16], (1, 4), (False, False)),  # no part of a torus: a line of as many
    ],
)
def test_the_part_of_a_torus_that_some_chips_are(
    chips: range | list[int], shape: tuple[int, ...], wraps: tuple[bool, ...]
) -> None:
    assert targets._box(load_cluster("tpu-v5e:256").hosts[0], list(chips)) == (shape, wraps)


@pytest.mark.compilers
@NEEDS_LIBTPU
@pytest.mark.parametrize("name", ["tpu-v4:8", "tpu-v5e:8", "tpu-v5e:16x2", "tpu-v5p:16", "tpu-v6e:4"])
def test_stages_have_devices_of_their_own(name: str) -> None:
    cluster = load_cluster(name)
    target = load_target("mlp-tiny")
    plan = plan_for(target.step, target.example_args, cluster=cluster, stages=2, microbatches=2).plan
    devices = target_devices(cluster, plan)
    assert len(devices) == cluster.num_devices
    used = [devices[d] for stage in plan.stages for d in stage.devices]
    assert all(one is not None and one.platform == "tpu" for one in used)
    assert len(set(map(id, used))) == len(used)


@pytest.mark.compilers
@NEEDS_LIBTPU
@pytest.mark.parametrize("stages", [1, 2])
def test_a_plan_is_compiled_by_the_compiler_of_its_machines(stages: int) -> None:
    from meshwright.verify import verify

    found = verify(load_target("gpt-tiny"), cluster="tpu-v5e:8", stages=stages)
    assert len(found.stages) == stages
    assert not found.starts
    checks = {check.name: check for check in found.checks}
    for name, check in checks.items():
        if name.endswith(("FLOPs", " bytes", "within the limit")) or name.startswith("sent"):
            assert check.passed, check
    for stage in found.stages:
        assert stage.schedule is not None
        assert stage.schedule.kernels["products"].flops == stage.flops[1]
        # A tiny model's kernels take a microsecond each whatever they do, so nothing is said here of what is predicted.
        assert stage.compute_seconds[1] > 0
    assert jax.devices()[0].platform == "cpu"


@pytest.mark.compilers
@NEEDS_LIBTPU
@pytest.mark.parametrize("stages", [1, 2])
def test_predicted_seconds_are_those_of_the_compilers_cycles(stages: int) -> None:
    """Two layers of GPT-3's smallest widths, which fill a TPU's kernels."""
    from meshwright.verify import verify

    two_layers = replace(gpt.CONFIGS["gpt3-125m"], layers=2, vocabulary=8192, global_batch=32)
    found = verify(zoo_target(gpt.build(two_layers)), cluster="tpu-v5e:8", stages=stages)
    assert len(found.stages) == stages
    seconds = [check for check in found.checks if check.unit == "seconds"]
    assert len(seconds) == stages
    assert all(check.passed for check in seconds), seconds


@pytest.mark.compilers
@NEEDS_LIBTPU
@pytest.mark.parametrize(
    ("model", "cluster", "options"),
    [
        ("gpt-tiny", "tpu-v5e:8", {"preset": "zero(1)"}),  # small gathers and scatters joined into one all-reduce
        ("gpt-tiny", "tpu-v4:8", {"preset": "zero(3)"}),  # scatters of any size, and gathers in 16 bits
        ("moe-tiny", "tpu-v5e:8", {"stages": 1}),  # exchanges in 16 bits
    ],
)
def test_collectives_count_as_the_plan_says(model: str, cluster: str, options: dict[str, Any]) -> None:
    from meshwright.verify import verify

    found = verify(load_target(model, global_batch=32), cluster=cluster, **options)
    checks = [check for check in found.checks if check.name.endswith(" bytes")]
    assert checks
    assert all(check.passed for check in checks), checks


@pytest.mark.compilers
@NEEDS_LIBTPU
def test_what_is_predicted_too_large_is_found_to_fit() -> None:
    target = load_target("gpt-tiny", global_batch=64)
    options = {"cluster": "tpu-v5e:8", "memory_per_device": 3 * 2**20, "stages": 1}
    plain = plan_for(target.step, target.example_args, **options).plan
    checked = plan_for(target.step, target.example_args, **options, check="compile").plan
    assert plain.predicted is not None
    assert checked.predicted is not None
    assert checked.predicted.step_seconds < plain.predicted.step_seconds
    assert any("on a device, fits 3 MiB" in note for note in checked.notes)

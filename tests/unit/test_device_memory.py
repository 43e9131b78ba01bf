"""What of a GPU's memory JAX gives a program, and what a plan says of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import jax
import pytest

from meshwright.cluster import load_cluster
from meshwright.errors import PlanError
from meshwright.notes.device_memory import memory_notes, warn_of_memory, with_given_memory, with_memory_here
from meshwright.plan import Plan
from meshwright.planning.plan_for import plan_for
from meshwright.targets import load_target

H100 = load_cluster("dgx-h100:2")


@cache
def plan_without_limits() -> Plan:
    target = load_target("mlp-tiny")
    return plan_for(target.step, target.example_args, cluster=H100).plan


@pytest.mark.parametrize(("name", "stages"), [("XLA_CLIENT_MEM_FRACTION", None), ("XLA_PYTHON_CLIENT_MEM_FRACTION", 1)])
def test_plans_are_made_for_what_the_environment_gives(
    name: str, stages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters that are called by name; one that is given says itself what programs may use."""
    target = load_target("mlp-tiny")
    monkeypatch.setenv(name, "0.5")
    limits = [
        plan_for(target.step, target.example_args, cluster=one, stages=stages, microbatches=1)
        .plan.stages[0]
        .memory_limit_bytes
        for one in ("dgx-h100:2", H100, "tpu-v5e:8")
    ]
    assert limits[0] == 0.5 * H100.device.memory_bytes
    assert limits[1:] == [one.device.usable_memory_bytes for one in (H100, load_cluster("tpu-v5e:8"))]
    limited = plan_for(
        target.step, target.example_args, cluster="dgx-h100:2", stages=stages, microbatches=1, memory_per_device=6e6
    ).plan
    assert limited.stages[0].memory_limit_bytes == 6e6


@pytest.mark.parametrize("text", ["much", "0", "1.5", "nan"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="a share from 0 to 1"):
        with_given_memory(H100, {"XLA_CLIENT_MEM_FRACTION": text})


def test_an_empty_variable_says_nothing() -> None:
    assert with_given_memory(H100, {"XLA_CLIENT_MEM_FRACTION": ""}) == H100


def test_a_plan_that_needs_more_than_jax_gives_says_what_to_set() -> None:
    target = load_target("mlp-tiny")
    plan = plan_for(target.step, target.example_args, cluster=H100, stages=2, microbatches=2).plan
    memory = H100.device.memory_bytes
    assert memory_notes(plan, [0.2 * memory, 0.74 * memory], H100) == ()
    (note,) = memory_notes(plan, [0.2 * memory, 0.801 * memory], H100)
    assert "XLA_CLIENT_MEM_FRACTION=0.81" in note
    chips = load_cluster("tpu-v5e:16")
    assert memory_notes(plan, [0.9 * chips.device.memory_bytes] * 2, chips) == ()


def test_of_a_mixed_cluster_each_stage_has_the_memory_of_its_devices() -> None:
    mixed = load_cluster("dgx-h100:1+p3.16xlarge:1")
    target = load_target("mlp-tiny")
    plan = plan_for(target.step, target.example_args, cluster=mixed, stages=2, microbatches=2).plan
    memory = [mixed.device_at(stage.devices[0]).memory_bytes for stage in plan.stages]
    assert memory_notes(plan, [0.5 * size for size in memory], mixed) == ()
    needed = [0.9 * size if size == max(memory) else 0.0 for size in memory]
    assert f"of the {max(memory) / 2**30:.4g} GiB" in memory_notes(plan, needed, mixed)[0]


@dataclass
class GPU:
    """What is asked of a device of JAX."""

    limit: int | None
    process_index: int = 0
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.limit is None else {"bytes_limit": self.limit}


def test_devices_that_are_here_say_what_they_give() -> None:
    """The least of those of this process; never more than their description says."""
    usable = H100.device.usable_memory_bytes
    here: Any = [GPU(60 * 2**30), GPU(50 * 2**30), GPU(10, process_index=1)]
    assert with_memory_here(H100, here).device.usable_memory_bytes == 50 * 2**30
    assert with_memory_here(H100, cast("Any", [GPU(2**50)])).device.usable_memory_bytes == usable
    assert with_memory_here(H100, jax.devices()) == H100  # CPUs do not say


def test_a_plan_that_needs_more_than_is_given_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_without_limits()
    warn_of_memory(plan, cast("Any", [GPU(None), GPU(2**40)]))
    assert not caplog.records
    warn_of_memory(plan, cast("Any", [GPU(2**40), GPU(1000)]))
    assert "1000 B of each (XLA_CLIENT_MEM_FRACTION sets the share)" in caplog.text


def test_memory_that_a_process_has_is_a_share_of_all() -> None:
    """Notes speak of shares of the device's memory: three quarters are what JAX gives, and need no setting."""
    plan = plan_without_limits()
    memory = H100.device.memory_bytes
    here = with_memory_here(H100, cast("Any", [GPU(int(0.75 * memory))]))
    assert here.device.memory_bytes == memory
    assert memory_notes(plan, [0.7 * memory], here) == ()

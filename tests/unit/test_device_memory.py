"""What of a GPU's memory JAX gives a program, and what a plan says of it."""

from __future__ import annotations

import pytest

from meshwright.cluster import load_cluster
from meshwright.errors import PlanError
from meshwright.planning.device_memory import memory_notes, with_given_memory
from meshwright.planning.plan_for import plan_for
from meshwright.targets import load_target

H100 = load_cluster("dgx-h100:2")


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_plans_are_made_for_what_the_environment_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target("mlp-tiny")
    monkeypatch.setenv(name, "0.5")
    plan = plan_for(target.step, target.example_args, cluster=H100).plan
    assert plan.stages[0].memory_limit_bytes == 0.5 * H100.device.memory_bytes
    assert with_given_memory(load_cluster("tpu-v5e:8")) == load_cluster("tpu-v5e:8")


@pytest.mark.parametrize("text", ["much", "0", "1.5", "nan"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="a share from 0 to 1"):
        with_given_memory(H100, {"XLA_CLIENT_MEM_FRACTION": text})


def test_a_plan_that_needs_more_than_jax_gives_says_what_to_set() -> None:
    memory = H100.device.memory_bytes
    assert memory_notes(0.74 * memory, H100) == ()
    (note,) = memory_notes(0.801 * memory, H100)
    assert "XLA_CLIENT_MEM_FRACTION=0.81" in note
    assert memory_notes(0.9 * load_cluster("tpu-v5e:8").device.memory_bytes, load_cluster("tpu-v5e:8")) == ()

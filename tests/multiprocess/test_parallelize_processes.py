"""`parallelize` in four processes: one plan for all, state created where it is kept, results that all can read."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import write_script

from meshwright.launch import run

_HEAD = """
import meshwright as mw
mw.initialize(timeout_seconds=120)
import jax, numpy as np
from meshwright import zoo

target = zoo.mlp(width=32, layers=4, batch=32)
batch = jax.tree.map(np.asarray, jax.jit(target.make_batch)(jax.random.key(1)))
"""


def outputs(folder: Path, text: str) -> list[str]:
    """What each process prints."""
    result = run(
        write_script(folder, _HEAD + text), processes=4, devices_per_process=2, log_dir=folder, timeout_seconds=240,
        environment={"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    result.check()
    return [process.output() for process in result.processes]


@pytest.mark.parametrize(
    "options", ["stages=2, microbatches=4", pytest.param("stages=1, microbatches=2", marks=pytest.mark.slow)]
)
def test_a_step_in_four_processes(tmp_path: Path, options: str) -> None:
    """Losses as on one device, in every process, from the plan of process 0."""
    found = outputs(
        tmp_path,
        f"""
step = mw.parallelize(target.step, {options})
state = step.init(target.init, jax.random.key(0), batch=batch)
expected, alone = jax.jit(target.init)(jax.random.key(0)), jax.jit(target.step)
for _ in range(3):
    state, metrics = step(state, batch)
    expected, wanted = alone(expected, batch)
    np.testing.assert_allclose(float(metrics["loss"]), float(wanted["loss"]), rtol=1e-4)
print("plan", step.plan(state, batch))
""",
    )
    plans = {line for output in found for line in output.splitlines() if line.startswith("plan")}
    assert len(plans) == 1, plans


def test_what_cannot_run_is_refused_in_every_process(tmp_path: Path) -> None:
    """A step without a plan, of which process 0 says why, and the others what it said; and plans that differ."""
    found = outputs(
        tmp_path,
        """
from meshwright.cluster import load_cluster
args = (target.example_state, target.example_batch)
state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), target.example_state)
try:
    mw.parallelize(target.step, memory_per_device=1000.0, microbatches=1)(state, batch)
except mw.PlanError as error:
    print("unplanned:", error)
plan = mw.plan_for(target.step, args, cluster=load_cluster("local"), stages=2, microbatches=2 + 2 * (place == 3)).plan
try:
    mw.parallelize(target.step, plan=plan)(state, batch)
except mw.PlanError as error:
    print("differing:", error)
""",
    )
    assert all("unplanned:" in output and "usable on a device" in output for output in found), found
    assert "from process 0" in found[1]
    assert all("differing: refused to run the plan" in output for output in found), found
    assert "in processes 3" in found[0]

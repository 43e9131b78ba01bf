"""Checkpoints between plans and numbers of processes."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp
import pytest
from launched import write_script

import meshwright as mw
from meshwright.launch import run

_MULTIDEVICE = Path(__file__).parents[1] / "multidevice"
sys.path.insert(0, str(_MULTIDEVICE))

_HEAD = f"""
import sys
sys.path.insert(0, {str(_MULTIDEVICE)!r})
import meshwright as mw
mw.initialize(timeout_seconds=120)
import jax
import orbax.checkpoint as ocp
from test_checkpoints import BATCH, PLANS, make_state, step, trained

def saved(path, name):
    state = trained(name)
    state = mw.reshard(state, mw.spread_shardings(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)

def restored(path, parallel):
    target = parallel.abstract_state(make_state, jax.random.key(0), batch=BATCH)
    spread = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), target,
        mw.spread_shardings(target))
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(path, spread)
    return mw.reshard(state, jax.tree.map(lambda x: x.sharding, target), donate=True)

def check(path, name, wanted):
    parallel = mw.parallelize(step, **PLANS[name])
    _, metrics = parallel(restored(path, parallel), BATCH)
    assert abs(float(metrics["loss"]) - wanted) < 1e-6, (name, metrics)
    print("restored", name)
"""


def assert_runs(folder: Path, text: str, processes: int) -> None:
    result = run(
        write_script(folder, _HEAD + text), processes=processes, devices_per_process=2, log_dir=folder,
        timeout_seconds=300, environment={"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    result.check()


def test_a_checkpoint_of_stages_in_two_processes(tmp_path: Path) -> None:
    """Saved by two stages in two processes, restored by ZeRO-3 there and by one stage in this process."""
    from test_checkpoints import BATCH, losses, make_state, step

    path, wanted = tmp_path / "state", losses(3)[2]
    assert_runs(tmp_path, f'saved({str(path)!r}, "two stages")\ncheck({str(path)!r}, "zero 3", {wanted})', processes=2)
    parallel = mw.parallelize(step, stages=1)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(
            path, parallel.abstract_state(make_state, jax.random.key(0), batch=BATCH)
        )  # fmt: skip
    assert abs(float(parallel(state, BATCH)[1]["loss"]) - wanted) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("before", ["one stage", "two stages", "four stages", "zero 3"])
def test_checkpoints_between_plans_in_four_processes(tmp_path: Path, before: str) -> None:
    from test_checkpoints import losses

    path = str(tmp_path / "state")
    text = f"""
saved({path!r}, {before!r})
for name in ("zero 3", "two stages", "four stages", "one stage"):
    check({path!r}, name, {losses(3)[2]})
"""
    assert_runs(tmp_path, text, processes=4)

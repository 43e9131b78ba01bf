"""`parallelize` in several processes: one plan for all, state created where it is kept, results that all can read."""

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


def outputs(folder: Path, text: str, processes: int = 4) -> list[str]:
    """What each process prints."""
    result = run(
        write_script(folder, _HEAD + text), processes=processes, devices_per_process=8 // processes, log_dir=folder,
        timeout_seconds=240, environment={"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    result.check()
    return [process.output() for process in result.processes]


# 30 rows over all devices.
_PADDED = """
from dataclasses import replace
from meshwright.planning.checks import request_of
from meshwright.planning.device_kinds import plan_for_kinds
from meshwright.planning.request import PlanOptions
from meshwright.program.padded_dims import PaddedDim
from meshwright.program.traces import traces_of

uneven = zoo.mlp(width=32, layers=4, batch=30)
rows = jax.tree.map(lambda leaf: leaf[:30], batch)
names = [f"args[1]{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(rows)]
asked = request_of(
    traces_of(uneven.step), (uneven.example_state, uneven.example_batch), PlanOptions(stages=1), started=0.0,
    tell=lambda text: None,
)
plan = plan_for_kinds(replace(asked, padded=tuple(PaddedDim(name, 0, 8) for name in names))).plan
assert plan.padded
padded = mw.parallelize(uneven.step, plan=plan)
state = padded.init(uneven.init, jax.random.key(0), batch=rows)
expected, alone = jax.jit(uneven.init)(jax.random.key(0)), jax.jit(uneven.step)
for _ in range(3):
    state, metrics = padded(state, rows)
    expected, wanted = alone(expected, rows)
    np.testing.assert_allclose(float(metrics["loss"]), float(wanted["loss"]), rtol=1e-4)
print("padded", len(plan.padded), float(metrics["loss"]))
"""

# A step without a plan, of which process 0 says why, and the others what it said; and plans that differ.
_REFUSED = """
from meshwright.cluster import load_cluster
args = (target.example_state, target.example_batch)
state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), target.example_state)
try:
    mw.parallelize(target.step, memory_per_device=1000.0, microbatches=1)(state, batch)
except mw.PlanError as error:
    print("unplanned:", error)
if place == jax.process_count() - 1:
    plan = mw.plan_for(target.step, args, cluster=load_cluster("local"), stages=2, microbatches=2).plan
try:
    mw.parallelize(target.step, plan=plan)(state, batch)
except mw.PlanError as error:
    print("differing:", error)
"""


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ("stages=2, microbatches=4", 2),
        pytest.param("stages=2, microbatches=4", 4, marks=pytest.mark.slow),
        pytest.param("stages=1, microbatches=2", 4, marks=pytest.mark.slow),
    ],
)
def test_a_step_in_several_processes(tmp_path: Path, options: str, processes: int) -> None:
    """Losses as on one device, in every process, from the plan of process 0, of a padded batch too; what cannot run is
    refused in each."""
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
plan = step.plan(state, batch)
print("plan", plan)

# A state of which each leaf lies in some of the processes alone (no step count, on all devices) is the plan's own.
def sgd(p, x):
    value, grads = mw.value_and_grad(lambda p: jax.numpy.mean((jax.numpy.tanh(x @ p["a"]) @ p["b"]) ** 2))(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value
weights, x = {{"a": np.eye(16, dtype=np.float32), "b": np.eye(16, dtype=np.float32)}}, np.ones((16, 16), np.float32)
plain, alone = mw.parallelize(sgd, {options}), jax.jit(sgd)
expected = weights
for _ in range(3):
    (weights, value), (expected, wanted) = plain(weights, x), alone(expected, x)
    np.testing.assert_allclose(float(value), float(wanted), rtol=1e-4)
"""
        + _PADDED
        + _REFUSED,
        processes,
    )
    plans = {line for output in found for line in output.splitlines() if line.startswith("plan")}
    assert len(plans) == 1, plans
    losses = [line for output in found for line in output.splitlines() if line.startswith("padded")]
    assert len(losses) == processes, losses
    assert len(set(losses)) == 1, losses
    assert all("unplanned:" in output and "usable on a device" in output for output in found), found
    assert "from process 0" in found[1]
    assert all("differing: refused to run the plan" in output for output in found), found
    assert f"in processes {processes - 1}" in found[0]


@pytest.mark.slow
def test_what_the_user_placed_in_four_processes(tmp_path: Path) -> None:
    """A state in which arrays stand twice, devices of the arguments, a mesh around the call, the host's memory."""
    found = outputs(
        tmp_path,
        """
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

def start():
    numbers = np.random.default_rng(0)
    return {"a": numbers.normal(size=(16, 16)).astype("f"), "b": numbers.normal(size=(16, 16)).astype("f")}

def averaged(state, x):
    loss = lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)
    value, grads = mw.value_and_grad(loss)(state["w"])
    w = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], grads)
    return {"w": w, "e": jax.tree.map(lambda e, w: 0.9 * e + 0.1 * w, state["e"], w)}, value

def offloaded(state, x):
    put = lambda tree, where: jax.tree.map(lambda leaf: jax.device_put(leaf, where), tree)
    state, value = averaged({**state, "e": put(state["e"], jax.memory.Space.Device)}, x)
    return {**state, "e": put(state["e"], jax.memory.Space.Host)}, value

def check(step, state, steps=2):
    expected = {"w": start(), "e": start()}
    for _ in range(steps):
        expected, wanted = jax.jit(averaged)(expected, x)
        state, value = step(state, x)
        np.testing.assert_allclose(float(value), float(wanted), rtol=1e-4)
    return state

x = np.random.default_rng(1).normal(size=(16, 16)).astype("f")
for options in ({}, {"stages": 2, "microbatches": 4}):
    same = jax.tree.map(jnp.asarray, start())
    check(mw.parallelize(averaged, **options), {"w": same, "e": same})
some = [next(d for d in jax.devices() if d.process_index == i) for i in range(4)]
there = NamedSharding(Mesh(np.array(some), ("d",)), P())
lying = jax.tree.map(lambda v: jax.make_array_from_callback(v.shape, there, lambda i: v[i]), start())
state = check(mw.parallelize(averaged), {"w": lying, "e": lying})
assert state["w"]["a"].sharding.device_set == set(some)
with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
    check(mw.parallelize(averaged), {"w": start(), "e": start()})
state = check(mw.parallelize(offloaded), {"w": start(), "e": start()})
assert state["e"]["a"].sharding.memory_kind == "pinned_host"
try:
    mw.parallelize(averaged, devices=jax.devices()[:: 1 if place else -1])({"w": start(), "e": start()}, x)
except mw.PlanError as error:
    print("differing:", error)
""",
    )
    assert all("differing: refused to run the plan" in output for output in found), found

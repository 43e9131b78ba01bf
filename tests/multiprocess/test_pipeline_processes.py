"""A pipeline over four processes of two devices each gives the numbers of one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import write_script

from meshwright.launch import Result, run

_MULTIDEVICE = Path(__file__).parents[1] / "multidevice"

# What every script begins with, and how it compares: each process the parts that it has.
_HEAD = f"""
import sys
sys.path.insert(0, {str(_MULTIDEVICE)!r})
import meshwright as mw
mw.initialize(timeout_seconds=120)
import jax, jax.numpy as jnp, numpy as np, optax
from meshwright import zoo
from pipelines import Pipeline, pipelined

def compare(found, expected):
    count = 0
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array) and a.shape == b.shape, path
        whole = np.asarray(b)
        for shard in a.addressable_shards:
            count += 1
            largest = np.max(np.abs(whole), initial=0)
            np.testing.assert_allclose(
                np.asarray(shard.data), whole[shard.index], rtol=0, atol=1e-4 * largest + 1e-6, err_msg=str(path)
            )
    return count

def check(step, state, batch, pipeline, steps=3, reference=None, **options):
    return follow(pipelined(step, (state, batch), pipeline, **options), reference or step, state, batch, steps)

def follow(parallel, step, state, batch, steps=3):
    alone = jax.jit(step)
    expected, found = jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, state)
    for _ in range(steps):
        expected, metrics = alone(expected, batch)
        found, again = parallel(found, batch)
    print("compared", compare((found, again), (expected, metrics)), "loss", float(again["loss"]))
    return [np.asarray(shard.data) for leaf in jax.tree.leaves(found) for shard in leaf.addressable_shards]
"""


def launched(folder: Path, text: str, timeout_seconds: float = 300, processes: int = 4) -> Result:
    return run(
        write_script(folder, _HEAD + text),
        processes=processes,
        devices_per_process=8 // processes,
        log_dir=folder,
        timeout_seconds=timeout_seconds,
        environment={"JAX_PLATFORMS": "cpu"},
    )


def assert_runs(folder: Path, text: str, timeout_seconds: float = 300) -> None:
    result = launched(folder, text, timeout_seconds)
    result.check()
    for process in result.processes:
        assert "compared" in process.output(), process.output()


@pytest.mark.slow
def test_a_perceptron_in_four_processes(tmp_path: Path) -> None:
    """Two stages of two processes each, and three of which two share nothing but neighbours."""
    assert_runs(
        tmp_path,
        """
target = zoo.mlp(width=32, layers=4, batch=32)
state = jax.tree.map(np.asarray, jax.jit(target.init)(jax.random.key(0)))
batch = jax.tree.map(np.asarray, jax.jit(target.make_batch)(jax.random.key(1)))
check(target.step, state, batch, Pipeline(submeshes=(4, 4)))
check(target.step, state, batch, Pipeline(submeshes=(2, 2, 4), schedule="zero_bubble", microbatches=2))
""",
    )


_NEIGHBOURS = {
    # Split over four devices to whole on each of four others, and back.
    "4-4": """Pipeline(submeshes=(4, 4), meshes=[(("x",), (4,))], microbatches=2, layouts={
            "args[0][0]['w']": (("x",), ()), "args[0][1]['w']": ((), ("x",)), "args[0][2]['w']": ((), ("x",)),
            "args[0][3]['w']": (("x",), ())})""",
    # The same between two and four, of which two are another process's if there are two.
    "2-4-2": """Pipeline(submeshes=(2, 4, 2), meshes=[(("x",), (4,)), (("x",), (2,))], microbatches=2, layouts={
            "args[0][0]['w']": (("x",), ()), "args[0][1]['w']": ((), ("x",)), "args[0][2]['w']": (("x",), ()),
            "args[0][3]['w']": ((), ("x",))})""",
    # Split over two to split over two others, then to whole on four.
    "2-2-4": """Pipeline(submeshes=(2, 2, 4), meshes=[(("x",), (4,)), (("x",), (2,))], microbatches=2, layouts={
            "args[0][0]['w']": (("x",), ()), "args[0][1]['w']": ((), ("x",)), "args[0][2]['w']": (("x",), ()),
            "args[0][3]['w']": ((), ("x",))})""",
}
_PLAIN_STEP = """
from test_pipeline import data, perceptron, predict

def step(params, batch):
    loss, grads = mw.value_and_grad(lambda p: jnp.mean((predict(p, batch[0]) - batch[1]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

# Drawn by NumPy, which compiles nothing.
draw = np.random.default_rng(1)
state, batch = jax.tree.map(
    lambda x: draw.normal(0, 32**-0.5, x.shape).astype(x.dtype), jax.eval_shape(lambda: (perceptron(), data()))
)
"""
# By either transport the numbers of one device, and each other's to the bit.
_EITHER_TRANSPORT = """
steps = {name: pipelined(step, (state, batch), PIPELINE, transport=name) for name in ("planned", "naive")}
planned, naive = (follow(one, step, state, batch, steps=2) for one in steps.values())
assert planned and all(a.tobytes() == b.tobytes() for a, b in zip(planned, naive, strict=True))
print("either transport")
"""
# Half of the processes have the larger share of the batch, and all have the sum of the gradients.
_REPLICAS = """
from meshwright.planning.plan_for import plan_for
from meshwright.runtime.pipeline.step import PipelinedStep
from test_replicas_run import mixed
target = zoo.mlp(width=32, layers=2, batch=32)
draw = np.random.default_rng(0)
state, batch = jax.tree.map(
    lambda x: np.abs(0.1 * draw.standard_normal(x.shape)).astype(x.dtype), (target.example_state, target.example_batch)
)
found = plan_for(
    target.step, (state, batch), cluster=mixed(4, 4), microbatches=8, stages=None, schedule="replicas", zero=1
)
assert found.plan.shares[0] > found.plan.shares[1], found.plan.shares
follow(PipelinedStep(found.program, found.plan, jax.devices()), target.step, state, batch)
print("replicas")
"""
# Moved by `reshard`, the state of one plan is that of another; a step itself moves no arguments between processes.
_ANOTHER_PLAN = """
one, other = pipelined(step, (state, batch), Pipeline(submeshes=(2, 2, 4), microbatches=2)), steps["planned"]
expected, alone = state, jax.jit(step)
state, _ = one(state, batch)
for _ in range(2):
    expected, metrics = alone(expected, batch)
there = jax.tree.unflatten(jax.tree.structure(state), other.in_shardings[:8])
state = mw.reshard(state, there, donate=True)
state, again = other(state, batch)
print("moved", compare((state, again), (expected, metrics)))
one(state, batch)
"""


@pytest.mark.parametrize(("processes", "stages"), [(2, "2-4-2"), pytest.param(4, "4-4", marks=pytest.mark.slow)])
def test_transports_replicas_and_the_state_of_another_plan(tmp_path: Path, processes: int, stages: str) -> None:
    """Of stages that share a process, and of one that several processes share."""
    neighbours = _EITHER_TRANSPORT.replace("PIPELINE", _NEIGHBOURS[stages])
    result = launched(tmp_path, _REPLICAS + _PLAIN_STEP + neighbours + _ANOTHER_PLAN, processes=processes)
    for process in result.processes:
        for said in ("replicas", "either transport", "moved"):
            assert said in process.output(), result.problem
    assert result.ended_by == "failure"
    for said in ("refused an argument of the step", "shared by several processes", "meshwright.reshard(state"):
        assert said in str(result.problem)


@pytest.mark.slow
def test_neighbours_of_other_layouts_by_either_transport(tmp_path: Path) -> None:
    assert_runs(tmp_path, _PLAIN_STEP + _EITHER_TRANSPORT.replace("PIPELINE", _NEIGHBOURS["2-2-4"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny", "unet-tiny"])
def test_reference_models_in_four_processes(tmp_path: Path, name: str) -> None:
    assert_runs(
        tmp_path,
        f"""
target = zoo.build({name!r})
state = jax.tree.map(np.asarray, jax.jit(target.init)(jax.random.key(0)))
batch = jax.tree.map(np.asarray, jax.jit(target.make_batch)(jax.random.key(1)))
check(target.step, state, batch, Pipeline(submeshes=(2, 2, 4), microbatches=2))
""",
    )


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("schedule", "processes"),
    [
        ("one_f_one_b", 2),
        pytest.param("one_f_one_b", 4, marks=pytest.mark.slow),
        pytest.param("gpipe", 4, marks=pytest.mark.slow),
    ],
)
def test_no_process_holds_more_than_predicted(tmp_path: Path, schedule: str, processes: int) -> None:
    """The programs that move values between processes need memory of their own, much beside layers as small as these:
    each stage another layout, so that values are put together and taken apart. What they need is known as a limit."""
    result = launched(
        tmp_path,
        f"""
from live_bytes import assert_as_predicted
target = zoo.mlp(width=64, layers=3, batch=1024)
step = pipelined(target.step, (target.example_state, target.example_batch), Pipeline(
    submeshes=(2, 2, 4), microbatches=4, schedule={schedule!r}, meshes=[(("x",), (4,)), (("x",), (2,))]))
assert_as_predicted(step, target, least=0.5)
""",
        processes=processes,
    )
    result.check()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble"])
def test_nothing_is_left_behind_in_any_process(tmp_path: Path, schedule: str) -> None:
    """200 steps; the process itself may not grow either, by threads or by what waits for transfers."""
    result = launched(
        tmp_path,
        f"""
import gc, pathlib, time
target = zoo.mlp(width=32, layers=4, batch=32)
step = pipelined(target.step, (target.example_state, target.example_batch), Pipeline(
    submeshes=(2, 2, 4), schedule={schedule!r}, microbatches=2))
state = step.create(target.init, jax.random.key(0))
batch = jax.tree.map(np.array, jax.jit(target.make_batch)(jax.random.key(1)))
seen, resident = set(), []
gc.collect()
for number in range(200):
    state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    del metrics
    if number in (1, 50, 199):
        time.sleep(2)  # a byte of each transfer is looked at every second, and let go
        seen.add(sum(array.nbytes for array in jax.live_arrays()))
        resident.append(4096 * int(pathlib.Path("/proc/self/statm").read_text().split()[1]))
assert len(seen) == 1, seen
assert resident[-1] - resident[1] < 2**23, resident
print("resident", resident)
""",
    )
    result.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset",
    ["data_parallel", "zero(stage=3)", "megatron(tp=2, pp=2)", "deepspeed_3d(tp=2, pp=2, dp=2)", "parameter_server"],
)
def test_presets_in_four_processes(tmp_path: Path, preset: str) -> None:
    assert_runs(
        tmp_path,
        f"""
target = zoo.mlp(width=32, layers=4, batch=32)
state = jax.tree.map(np.asarray, jax.jit(target.init)(jax.random.key(0)))
batch = jax.tree.map(np.asarray, jax.jit(target.make_batch)(jax.random.key(1)))
alone, parallel = jax.jit(target.step), mw.parallelize(target.step, preset={preset!r}, microbatches=2)
expected, found = state, state
for _ in range(3):
    expected, metrics = alone(expected, batch)
    found, again = parallel(found, batch)
print("compared", compare((found, again), (expected, metrics)), "loss", float(again["loss"]))
""",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "scan=(3, 3), layers=(2, 2)",
        "scan=(2, 4), layers=(2, 2)",  # rows in excess move
        "scan=(2, 2, 2), layers=(2, 1, 2), submeshes=(4, 2, 2), layouts=UNLIKE",  # copies, and all rows move
    ],
    ids=["joint", "unequal rows", "unlike"],
)
def test_leaves_of_several_stages_are_replaced(tmp_path: Path, options: str) -> None:
    """Also by a process that has no part of them: all run the same script."""
    assert_runs(
        tmp_path,
        f"""
from test_state_arrays import BATCH, UNLIKE, make_state, planned, step

def halved(state):
    return {{**state, "params": jax.tree.map(lambda p: 0.5 * p, state["params"])}}

def plain(state):
    return {{**state, "key": jax.random.key_data(state["key"])}}

parallel, alone = planned({options}), jax.jit(step)
expected, found = make_state(), parallel.create(make_state)
for number in range(4):
    expected, metrics = alone(expected, BATCH)
    found, again = parallel(found, BATCH)
    print("compared", compare((plain(found), again), (plain(expected), metrics)))
    if number == 1:
        expected, found = halved(expected), halved(found)
""",
    )


@pytest.mark.slow
def test_a_process_without_a_stage_is_refused(tmp_path: Path) -> None:
    result = launched(
        tmp_path,
        """
target = zoo.mlp(width=32, layers=4, batch=32)
pipelined(target.step, (target.example_state, target.example_batch), Pipeline(submeshes=(2, 4)))
""",
    )
    assert result.ended_by == "failure"
    assert "no stage on a device of process 3" in str(result.problem)

"""A pipeline over four processes of two devices each gives the numbers of one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import write_script

from meshwright.launch import run

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
from meshwright.runtime.pipeline.staged_array import StagedArray

def compare(found, expected):
    count = 0
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        parts = a.parts.items() if isinstance(a, StagedArray) else [(0, a)]
        rows = a.rows if isinstance(a, StagedArray) else None
        assert a.shape == b.shape, path
        for stage, part in parts:
            whole = np.asarray(b if rows is None else rows.take(np.asarray(b), stage))
            for shard in part.addressable_shards:
                count += 1
                largest = np.max(np.abs(whole), initial=0)
                np.testing.assert_allclose(
                    np.asarray(shard.data), whole[shard.index], rtol=0, atol=1e-4 * largest + 1e-6, err_msg=str(path)
                )
    return count

def check(step, state, batch, pipeline, steps=3):
    alone = jax.jit(step)
    parallel = pipelined(step, (state, batch), pipeline)
    expected, found = jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, state)
    for _ in range(steps):
        expected, metrics = alone(expected, batch)
        found, again = parallel(found, batch)
    print("compared", compare((found, again), (expected, metrics)), "loss", float(again["loss"]))
"""


def assert_runs(folder: Path, text: str, timeout_seconds: float = 300) -> None:
    result = run(
        write_script(folder, _HEAD + text),
        processes=4,
        devices_per_process=2,
        log_dir=folder,
        timeout_seconds=timeout_seconds,
        environment={"JAX_PLATFORMS": "cpu"},
    )
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

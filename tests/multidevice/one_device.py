"""The truth that parallel runs are held against: the same step under plain `jax.jit`, on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw

# A plan for two axes with a layout that the planner would not take by itself for programs as small as these.
TENSOR = {"mesh": {"data": 2, "model": 4}}


def drawn(target: Any) -> tuple[Any, Any]:
    """A state and a batch of a reference model, as in the middle of a training; by NumPy, which compiles nothing."""
    random = np.random.default_rng(0)

    def one(path: Any, leaf: Any) -> np.ndarray:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return random.integers(0, 8, leaf.shape).astype(leaf.dtype)
        made = 0.2 * random.standard_normal(leaf.shape)
        moment = jax.tree_util.keystr(path).startswith(("[0]['opt']", "[0]['statistics']"))
        return (np.abs(made) if moment else made).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, (target.example_state, target.example_batch))


def assert_as_on_one_device(
    step: Callable[..., Any], state: Any, *batch: Any, steps: int = 3, atol: float = 1e-6, **options: Any
) -> Any:
    """Run `step` on one device and by a plan, its first result fed back, and compare everything it returns.

    Args:
      step: `(state, *batch) -> (state, metrics)`.
      steps: how often.
      atol: for values that are zero but for rounding.
      options: of `parallelize`.

    Returns the parallelised step.
    """
    reference = jax.jit(step)
    parallel = mw.parallelize(step, cluster="local", **options)
    expected, found = state, copy(state)
    metrics = expected_metrics = None
    for _ in range(steps):
        expected, expected_metrics = reference(expected, *batch)
        found, metrics = parallel(found, *batch)
    assert_equal_trees((found, metrics), (expected, expected_metrics), atol=atol)
    return parallel


def copy(tree: Any) -> Any:
    """The same arrays in buffers of their own, which a step may be given to keep."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, tree)


def assert_equal_trees(found: Any, expected: Any, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Equal structure, shapes and dtypes; values within `rtol` of each leaf's largest."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(y).all(), f"{path}: anything is as near to what is infinite"
        largest = np.max(np.abs(y), initial=0.0)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * largest + atol, err_msg=str(path))

"""In several processes effects run once, in process 0, on whole values."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import write_script

from meshwright.launch import run

_SCRIPT = """
    import meshwright as mw
    mw.initialize(timeout_seconds=120)
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import io_callback

    seen = []
    def note(tag):
        return lambda *values: seen.append((tag, *(float(np.asarray(v, np.float64).sum()) for v in values)))

    w = {"a": np.linspace(0, 0.01, 2048).reshape(32, 64).astype(np.float32), "b": np.full((64, 32), 0.01, np.float32)}
    batch = {"x": np.linspace(0, 1, 512).reshape(16, 32).astype(np.float32), "y": np.zeros((16, 32), np.float32)}

    def step(w, b):
        jax.debug.callback(note("before"), b["x"])
        def loss_of(w):
            h = jnp.tanh(b["x"] @ w["a"])
            jax.debug.callback(note("hidden"), h, ordered=True)
            loss = jnp.mean((h @ w["b"] - b["y"]) ** 2)
            jax.debug.callback(note("loss"), loss, ordered=True)
            return loss
        loss, grads = mw.value_and_grad(loss_of)(w)
        io_callback(note("gradients"), None, grads["a"], jnp.tile(grads["b"], (10, 10)), ordered=True)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    def take():
        jax.effects_barrier()
        found = sorted(seen)
        seen.clear()
        return found

    jax.jit(step)(w, batch)
    expected = take()
    parallel = mw.parallelize(step, stages=STAGES)
    for _ in range(2):
        _, loss = parallel(w, batch)
        jax.block_until_ready(loss)
        found = take()
        if jax.process_index():
            assert not found, found
            continue
        assert [tag for tag, *_ in found] == [tag for tag, *_ in expected], (found, expected)
        for (_, *a), (_, *b) in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4)
    print("compared")
"""


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_process_0_runs_them(tmp_path: Path, stages: int) -> None:
    """Also those of a stage on other processes."""
    result = run(
        write_script(tmp_path, _SCRIPT.replace("STAGES", str(stages))), processes=4, devices_per_process=2,
        log_dir=tmp_path, timeout_seconds=200, environment={"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    result.check()
    for process in result.processes:
        assert "compared" in process.output(), process.output()

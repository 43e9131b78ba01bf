"""What two rules of the cost model for virtual CPU devices rest on, measured.

    python benchmarks/cpu_costs.py

On eight virtual devices: a gather, a scatter and a sum of 1 KiB, one at a time and eight at once (those of parameters
wait for nobody; `calibrate.cases`); and four layers of 256 x 256 weights on 64 rows, scanned and unrolled, forward and
with gradients (a loop copies what it slices; `cost.efficiency`). Prints one JSON object, in seconds: medians of nine.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshwright.calibrate.case import Collective
from meshwright.calibrate.programs import Repeated

TIMES, RUNS = 20, 9
LAYERS, WIDTH, ROWS = 4, 256, 64


def collective(kind: str, together: int) -> float:
    """Of one of so many at once."""
    program = Repeated(Collective(kind=kind, size_bytes=1024, shape=(8,), axis=0, together=together), jax.devices())
    program.seconds(1)  # compiles
    return _median(lambda: program.seconds(TIMES) - program.without(TIMES)) / TIMES / together


def layers(*, scanned: bool, gradients: bool) -> float:
    """Of all layers on every device at once."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        if scanned:
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0])
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    made = jax.grad(loss) if gradients else loss

    def run(times: jax.Array, weights: Any, x: jax.Array) -> jax.Array:
        start = jax.tree.map(jnp.zeros_like, weights) if gradients else jnp.zeros(())

        def again(_: Any, total: Any) -> Any:
            moved = x + 1e-9 * jax.tree.leaves(total)[0].ravel()[0]  # each waits for the one before
            return jax.tree.map(lambda a, b: a + 1e-9 * b, total, made(weights, moved))

        return jnp.stack([jnp.sum(one) for one in jax.tree.leaves(jax.lax.fori_loop(0, times, again, start))])

    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("x")
    program = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(PartitionSpec(), split, split), out_specs=split, check_vma=False)
    )
    one = jnp.full((8 * WIDTH, WIDTH), 0.01)
    weights = jnp.full((8 * LAYERS, WIDTH, WIDTH), 0.01) if scanned else [one] * LAYERS
    x = jnp.full((8 * ROWS, WIDTH), 0.1)

    def seconds(times: int) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(program(np.int32(times), weights, x))
        return time.perf_counter() - begun

    seconds(1)  # compiles
    return _median(lambda: seconds(TIMES) - seconds(0)) / TIMES


def _median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(RUNS))


def main() -> None:
    """Measure all and print it."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    print(json.dumps({
        "machine": {"cpus": os.cpu_count(), "jax": jax.__version__},
        "collective_seconds": {kind: {f"{n} at once": collective(kind, n) for n in (1, 8)} for kind in kinds},
        "weights_bytes": 4 * LAYERS * WIDTH * WIDTH,
        "layers_seconds": {
            f"{'forward and backward' if gradients else 'forward'}, {'scanned' if scanned else 'unrolled'}":
            layers(scanned=scanned, gradients=gradients) for gradients in (False, True) for scanned in (True, False)
        },
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()

"""What rules of the cost model and of the runtime for virtual CPU devices rest on, measured.

    python benchmarks/cpu_costs.py

On eight virtual devices: collectives of 1 KiB of all kinds over two, four and eight (all meet alike, permutes over all
eight; `cost.collective_ways`); a gather, a scatter and a sum over eight, one at a time and eight at once (those of
parameters wait for nobody; `calibrate.cases`); a sum over eight after products of 0.1 to 3 ms; four layers of 256 x 256
weights on 64 rows, scanned and unrolled, forward and with gradients (a loop copies what it slices; `cost.efficiency`);
convolutions as a program has them beside the same in a form that XLA has fast code for (`_jax.convolutions`); adding
gradients up beside updating by Adam, on as many arrays as leave the caches, in bytes read and written each second; and
what chains and transposes take, in seconds for each element of such arrays, and how many additions of a chain that is
(`cost.chains`); and calling a program that does next to nothing with few arrays and many. Prints one JSON object, in
seconds where it says nothing else: medians of nine.
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

from meshwright._jax.convolutions import with_fast_convolutions
from meshwright.calibrate.case import Collective
from meshwright.calibrate.programs import Repeated
from meshwright.cost.collective import KINDS

TIMES, RUNS = 20, 9
LAYERS, WIDTH, ROWS = 4, 256, 64
UNROLLED = 8


def collective(kind: str, together: int = 1, *, group: int = 8) -> float:
    """Of one of so many at once."""
    case = Collective(kind=kind, size_bytes=1024, shape=(8 // group, group), axis=1, together=together)
    program = Repeated(case, jax.devices())
    program.seconds(1)  # compiles
    return _median(lambda: program.seconds(TIMES) - program.without(TIMES)) / TIMES / together


def meeting_after(rows: int) -> dict[str, float]:
    """A product of so many rows, and a sum of 1 KiB over eight devices after it: that takes longer the longer they have
    been on their own."""
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("x")
    arrays = jnp.full((8 * rows, WIDTH), 0.01), jnp.tile(jnp.eye(WIDTH), (8, 1)), jnp.zeros(8 * 256)

    def program(*, summed: bool) -> Callable[[int], float]:
        def again(_: Any, carried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            x, square, total = carried
            made = x @ square
            total = 0.1 * (total + made[0, 0])
            total = jax.lax.psum(total, "x") if summed else total
            return made + 1e-9 * total[0], square, total

        def run(times: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
            return jax.lax.fori_loop(0, times, again, arrays)

        compiled = jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=(PartitionSpec(), *[split] * 3), out_specs=split, check_vma=False)
        )

        def seconds(times: int) -> float:
            begun = time.perf_counter()
            jax.block_until_ready(compiled(np.int32(times), *arrays))
            return time.perf_counter() - begun

        seconds(1)  # compiles
        return seconds

    alone, both = program(summed=False), program(summed=True)
    return {
        "product": _median(lambda: alone(TIMES) - alone(0)) / TIMES,
        "meeting": _median(lambda: both(TIMES) - alone(TIMES)) / TIMES,
    }


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


# Images, kernel, stride, and whether the gradient of the images is taken or what is made of them.
CONVOLUTIONS = {
    "3 x 3 over 2 x 2": ((16, 2, 2, 64), (3, 3, 64, 64), 1, False),
    "gradient of 4 x 4 by 3 x 3 in steps of 2": ((16, 4, 4, 64), (3, 3, 64, 128), 2, True),
    "gradient of 32 x 32 by 16 x 16 in steps of 16": ((8, 32, 32, 32), (16, 16, 32, 32), 16, True),
    "7 x 7 in steps of 2, three channels": ((16, 16, 16, 3), (7, 7, 3, 32), 2, False),
}


def convolution(name: str, *, fast: bool) -> float:
    """Of one on every device at once."""
    images, kernel, stride, gradient = CONVOLUTIONS[name]

    def made(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, k, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (images, kernel)]
    cotangent = jax.eval_shape(made, *given)

    def pulled(cotangent: jax.Array, k: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda x: made(x, k), given[0])(cotangent)[0]

    function = pulled if gradient else made
    function = with_fast_convolutions(function) if fast else function

    shapes = (cotangent.shape if gradient else images, kernel)
    arrays = [jnp.full((8 * rows, *rest), 0.01) for rows, *rest in shapes]
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("x")

    def program(times: int) -> Callable[[], float]:
        # No loop: in those the compiler does other things to convolutions.
        def run(x: jax.Array, k: jax.Array) -> jax.Array:
            for _ in range(times):
                k = k + 1e-9 * function(x, k).ravel()[0]  # each waits for the one before
            return k

        compiled = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
        jax.block_until_ready(compiled(*arrays))

        def seconds() -> float:
            begun = time.perf_counter()
            jax.block_until_ready(compiled(*arrays))
            return time.perf_counter() - begun

        return seconds

    few, many = program(1), program(1 + UNROLLED)
    return _median(lambda: many() - few()) / UNROLLED


# Parameters, and rows of 64 elements of each.
PARAMETERS, PARAMETER_ROWS = 16, 1024


def updates(*, adam: bool) -> float:
    """Bytes/s of every device at once: of sums of gradients, or of updates with their state."""

    def added(total: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
        return total + gradient, gradient

    def updated(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v, g * 0.999  # else what is made of it alone leaves the loop

    function, read, written = (updated, 4, 4) if adam else (added, 2, 1)

    def again(_: Any, arrays: Any) -> Any:
        return [function(*one) for one in arrays]

    def run(times: jax.Array, arrays: Any) -> Any:
        return jax.lax.fori_loop(0, times, again, arrays)

    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("x")
    program = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(PartitionSpec(), split), out_specs=split, check_vma=False)
    )
    arrays = [tuple(jnp.full((8 * PARAMETER_ROWS, 64), 0.01) for _ in range(read)) for _ in range(PARAMETERS)]

    def seconds(times: int) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(program(np.int32(times), arrays))
        return time.perf_counter() - begun

    seconds(1)  # compiles
    taken = _median(lambda: seconds(TIMES) - seconds(0)) / TIMES
    return 4 * 64 * PARAMETER_ROWS * PARAMETERS * (read + written) / taken


def _chained(pairs: int) -> Callable[[jax.Array], jax.Array]:
    def made(x: jax.Array) -> jax.Array:
        for number in range(pairs):
            sign = (-1) ** number
            x = (1 + 1e-3 * sign) * x + 1e-3 * sign
        return x

    return made


# Of what rows and columns of float32, and what is made of them.
ELEMENTS: dict[str, tuple[tuple[int, ...], Callable[[jax.Array], jax.Array]]] = {
    "1 multiplication and addition": ((4096, 64), _chained(1)),
    "17 multiplications and additions": ((4096, 64), _chained(17)),
    "division": ((4096, 64), lambda x: 1.0 / (x + 2.0)),
    "square root": ((4096, 64), lambda x: jnp.sqrt(x + 2.0)),
    "rsqrt": ((4096, 64), lambda x: jax.lax.rsqrt(x + 2.0)),
    "exp": ((4096, 64), lambda x: jnp.exp(0.1 * x) - 1.0),
    "log": ((4096, 64), lambda x: jnp.log(x + 1.5)),
    "tanh": ((4096, 64), jnp.tanh),
    "erf": ((4096, 64), jax.lax.erf),
    "logistic": ((4096, 64), jax.nn.sigmoid),
    "sum along rows of 32": ((8192, 32), lambda x: 0.5 * x + 1e-3 * x.sum(axis=1, keepdims=True)),
    "sum along rows of 64": ((4096, 64), lambda x: 0.5 * x + 1e-3 * x.sum(axis=1, keepdims=True)),
    "sum along rows of 256": ((1024, 256), lambda x: 0.5 * x + 1e-3 * x.sum(axis=1, keepdims=True)),
    "maximum along rows of 64": ((4096, 64), lambda x: 0.5 * x + 1e-3 * x.max(axis=1, keepdims=True)),
    "transpose of 256 x 64": ((256, 64), lambda x: (1.0001 * x.T).reshape(x.shape)),
    "transpose of 512 x 512": ((512, 512), lambda x: 1.0001 * x.T),
    "heads before positions": ((8, 32, 8, 8), lambda x: (1.0001 * x.transpose(0, 2, 1, 3)).reshape(x.shape)),
}
ARRAYS_BYTES = 2**23


def elements(name: str) -> float:
    """Of one element, on every device at once."""
    shape, function = ELEMENTS[name]
    size = int(np.prod(shape))
    arrays = [jnp.full((8 * shape[0], *shape[1:]), 0.01) for _ in range(min(ARRAYS_BYTES // 4 // size, 64))]
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("x")

    def run(times: jax.Array, arrays: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, arrays: [function(x) for x in arrays], arrays)

    program = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(PartitionSpec(), split), out_specs=split, check_vma=False)
    )

    def seconds(times: int) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(program(np.int32(times), arrays))
        return time.perf_counter() - begun

    seconds(1)  # compiles
    return _median(lambda: seconds(TIMES) - seconds(0)) / TIMES / len(arrays) / size


def chains() -> dict[str, dict[str, float]]:
    """Of all."""
    taken = {name: elements(name) for name in ELEMENTS}
    one, more = (taken[name] for name in list(ELEMENTS)[:2])
    addition = (more - one) / 32
    passing = one - 2 * addition
    return {name: {"seconds": t, "additions": (t - passing) / addition} for name, t in taken.items()}


def call(arrays: int) -> float:
    """Of a program that adds one to so many donated arrays of 256 bytes on every device, with the wait for its end."""
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, PartitionSpec())
    program = jax.jit(lambda given: [x + 1 for x in given], donate_argnums=0)
    carried = [jax.device_put(np.zeros((8, 8), np.float32), everywhere) for _ in range(arrays)]

    def seconds() -> float:
        nonlocal carried
        begun = time.perf_counter()
        carried = jax.block_until_ready(program(carried))
        return time.perf_counter() - begun

    for _ in range(TIMES):
        seconds()  # compiles, and finds where things go
    return _median(seconds)


def _median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(RUNS))


def main() -> None:
    """Measure all and print it."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    print(json.dumps({
        "machine": {"cpus": os.cpu_count(), "jax": jax.__version__},
        "meeting_seconds": {kind: {f"over {n}": collective(kind, group=n) for n in (2, 4, 8)} for kind in KINDS},
        "collective_seconds": {kind: {f"{n} at once": collective(kind, n) for n in (1, 8)} for kind in kinds},
        "after_a_product_seconds": {f"of {rows} rows": meeting_after(rows) for rows in (16, 64, 256, 512)},
        "convolution_seconds": {
            name: {"as it is": convolution(name, fast=False), "fast": convolution(name, fast=True)}
            for name in CONVOLUTIONS
        },
        "passed_bytes_per_second": {"sums of gradients": updates(adam=False), "updates by Adam": updates(adam=True)},
        "elements": chains(),
        "call_seconds": {f"{count} arrays": call(count) for count in (10, 85, 400)},
        "weights_bytes": 4 * LAYERS * WIDTH * WIDTH,
        "layers_seconds": {
            f"{'forward and backward' if gradients else 'forward'}, {'scanned' if scanned else 'unrolled'}":
            layers(scanned=scanned, gradients=gradients) for gradients in (False, True) for scanned in (True, False)
        },
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()

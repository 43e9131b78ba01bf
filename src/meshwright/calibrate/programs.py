"""Programs that do one case over and over on all devices at once, and how long one time takes.

The repetitions are a loop on the devices whose number is an argument: one compilation serves any number of them, and
zero of them is what calling the program costs by itself, which is taken off. What the loop adds to each repetition is
what a kernel of any program pays for being started.

A collective is timed between kernels, as it is in a program, and the kernels are taken off: devices that share
processors do not arrive at it together, which costs more than meeting in a loop that does nothing else. Of those that
wait for nobody in a program several are there at once.

Values neither grow nor vanish in a loop: arithmetic on numbers too small for their type is slower than any plan's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._jax.convolutions import with_fast_convolutions
from .case import Case, Chain, Collective, Convolution, Product, Starts

# A chain works on rows of this many elements.
_ROW = 64

# An accelerator waits for its host to say whether a loop goes on, longer than a small kernel takes, unless its length
# is known when it is compiled. There so many repetitions are a loop of known length; what is left of others waits.
IN_A_ROW = 32

# Numbers that arrays are filled with; longer ones repeat them.
_NUMBERS = 1 << 13

# Edge of the matrices of a kernel that does next to nothing; products are not fused into one another.
_TINY = 8

# The product [m, k] x [k, k] between two collectives: as long as kernels of small models are, and no longer, since its
# time is taken off.
_BETWEEN_SHAPES = ((16, 256), (256, 256))

# What one repetition makes of arrays, their shapes on one device, their dtype.
_Work = tuple[Callable[..., tuple[jax.Array, ...]], Sequence[tuple[int, ...]], Any]


class Repeated:
    """A case as a program on some devices.

    Args:
      case: what it does.
      devices: all of them, in the order of the cluster.
    """

    def __init__(self, case: Case, devices: Sequence[jax.Device]) -> None:
        shape = case.shape if isinstance(case, Collective) else (len(devices),)
        names = tuple(f"axis{position}" for position in range(len(shape)))
        self._program = _Loop(_work_of(case, names), devices, shape, names)
        self._between = _between(tuple(devices)) if isinstance(case, Collective) else None

    def seconds(self, times: int) -> float:
        """Measured, of so many repetitions and of calling the program. The first call compiles."""
        return self._program.seconds(times)

    def without(self, times: int) -> float:
        """Measured, of the same without the case: calling the program, and what is between collectives."""
        return self._program.seconds(0) if self._between is None else self._between.seconds(times)


class _Loop:
    """Some work, repeated on devices."""

    def __init__(
        self, work: _Work, devices: Sequence[jax.Device], shape: tuple[int, ...], names: tuple[str, ...]
    ) -> None:
        in_a_row = 1 if devices[0].platform == "cpu" else IN_A_ROW
        mesh = Mesh(np.array(devices, dtype=object).reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape))
        body, local, dtype = work

        def run(times: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
            return _repeat(lambda carried: body(*carried), times, arrays, in_a_row=in_a_row)

        spec = PartitionSpec(names)
        whole = jax.shard_map(
            run, mesh=mesh, in_specs=(PartitionSpec(), *(spec for _ in local)), out_specs=spec, check_vma=False
        )
        self._operands = [
            _filled((len(devices) * rows, *rest), dtype, NamedSharding(mesh, spec)) for rows, *rest in local
        ]
        self._program = jax.jit(whole)

    def seconds(self, times: int) -> float:
        count = np.int32(times)
        begun = time.perf_counter()
        jax.block_until_ready(self._program(count, *self._operands))
        return time.perf_counter() - begun


def _repeat(body: Callable[[Any], Any], times: jax.Array, carried: Any, *, in_a_row: int) -> Any:
    """`body` of `carried`, so many times, of which `in_a_row` at a time ask nobody whether to go on."""
    if in_a_row > 1:

        def row(_: jax.Array, carried: Any) -> Any:
            return jax.lax.fori_loop(0, in_a_row, lambda _, carried: body(carried), carried)

        carried = jax.lax.fori_loop(0, times // in_a_row, row, carried)
        times = times % in_a_row
    return jax.lax.fori_loop(0, times, lambda _, carried: body(carried), carried)


def chain_function(name: str) -> Callable[[jax.Array], jax.Array]:
    """What a chain computes, of an array [rows, elements of a row]."""
    return {
        "add": lambda x: x * 1.0001 + 0.0001,
        "gelu": lambda x: jax.nn.gelu(x) + 0.3,
        "softmax": lambda x: jax.nn.softmax(x, axis=-1),
        "transpose": lambda x: x.T.reshape(x.shape),
        "normalise": lambda x: (
            (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * 1.1 + 0.1
        ),
    }[name]


def chain_shape(size_bytes: int) -> tuple[int, int]:
    """Of the float32 operand of a chain."""
    return max(size_bytes // 4 // _ROW, 1), _ROW


def _filled(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    # One block on the host serves all devices, and nothing is compiled for it.
    block = reduce(np.multiply.outer, map(_direction, sharding.shard_shape(shape))).astype(dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: block)


def _direction(length: int) -> np.ndarray:
    """A unit vector of random signs and sizes, of each length always the same. In a matrix u v^T of two numbers differ,
    as in data: products of numbers that are all alike take an accelerator less power and less time (recalled). And
    (u v^T) (v w^T) (v w^T)^T is u v^T: repeated products neither grow nor vanish. No entry of a large one is too small
    for float16."""
    random = np.random.default_rng(length)
    sizes, signs = random.uniform(0.75, 1.25, (2, min(length, _NUMBERS))).astype(np.float32)
    made = np.resize(np.where(signs < 1, -sizes, sizes), length)
    return made / np.linalg.norm(made)


def _work_of(case: Case, names: tuple[str, ...]) -> _Work:
    if isinstance(case, Chain):
        function = chain_function(case.name)
        shapes = [chain_shape(case.size_bytes)] * case.together
        return (lambda *arrays: tuple(map(function, arrays))), shapes, jnp.float32
    if isinstance(case, Product):
        shapes = [*[(case.m, case.k)] * case.together, *[(case.k, case.n)] * case.together]
        return _there_and_back, shapes, jnp.dtype(case.dtype)
    if isinstance(case, Convolution):
        return with_fast_convolutions(_updated), case.shapes, jnp.float32
    if isinstance(case, Starts):
        shapes = [(_TINY, _TINY)] * (case.kernels + 1)
        # A square of a square grows or vanishes: each is multiplied by one that stays.
        return (lambda fixed, *arrays: (fixed, *(x @ fixed for x in arrays))), shapes, jnp.float32
    function, elements = _collective(case, names[case.axis])
    together = case.together

    def between(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        # Kernel and collectives wait for each other by one number.
        *operands, rows, square = arrays
        first = jnp.stack([jnp.clip(x[:1], 0.0, 1e-3 / together) for x in operands]).sum(axis=0)[None]
        rows = jax.lax.dynamic_update_slice(rows, first, (0, 0)) @ square
        made = (function(jax.lax.dynamic_update_slice(x, rows[0, :1], (0,))) for x in operands)
        return *made, rows, square

    return between, [*[(elements,)] * together, *_BETWEEN_SHAPES], jnp.float32


def _there_and_back(*operands: jax.Array) -> tuple[jax.Array, ...]:
    half = len(operands) // 2
    lefts, rights = operands[:half], operands[half:]
    return (*((x @ w) @ w.T for x, w in zip(lefts, rights, strict=True)), *rights)


def convolution(image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Of images [batch, edge, edge, channels] with a kernel [3, 3, channels, features]."""
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _updated(image: jax.Array, kernel: jax.Array) -> tuple[jax.Array, ...]:
    made, pull = jax.vjp(convolution, image, kernel)
    return tuple(jnp.clip(x - 1e-3 * d, -1.0, 1.0) for x, d in zip((image, kernel), pull(made), strict=True))


@cache
def _between(devices: tuple[jax.Device, ...]) -> _Loop:
    """What is between collectives, alone."""
    work: _Work = ((lambda rows, square: (rows @ square, square)), _BETWEEN_SHAPES, jnp.float32)
    loop = _Loop(work, devices, (len(devices),), ("axis0",))
    loop.seconds(1)  # compiles
    return loop


def _collective(case: Collective, axis: str) -> tuple[Callable[[jax.Array], jax.Array], int]:
    """One repetition, and elements of its operand. Sums grow without bound, which costs nothing."""
    group = case.shape[case.axis]
    part = max(case.size_bytes // 4 // group, 1)
    if case.kind == "all_reduce":
        return (lambda x: jax.lax.psum(x, axis)), group * part
    if case.kind == "all_gather":
        # Keeping a part is a copy beside the collective, much the smaller of the two.
        return (lambda x: jax.lax.all_gather(x, axis, tiled=True)[:part]), part
    if case.kind == "reduce_scatter":
        return (lambda x: jnp.tile(jax.lax.psum_scatter(x, axis, tiled=True), group)), group * part
    if case.kind == "all_to_all":
        return (lambda x: jax.lax.all_to_all(x, axis, 0, 0, tiled=True)), group * part
    ring = [(position, (position + 1) % group) for position in range(group)]
    return (lambda x: jax.lax.ppermute(x, axis, ring)), group * part

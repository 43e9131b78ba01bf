"""Random bits of some elements of an array, equal to what the whole array would hold there.

JAX's partitionable threefry draws element i from the 64-bit counter i alone, so a device can draw just its block of the
rows of one microbatch, and the run gives the numbers of one device on any mesh and in any number of microbatches. Other
generators have no such counter; each block then draws from a key of its own (`fold_in` of the position of its first
element): other numbers on other meshes, reproducible on the same one.

A program at the size of a microbatch says of a draw, or of a count of the examples, how large it is for the whole
batch: `of_whole_batch` gives the equation a parameter `whole`. Such an equation has the name of the primitive that it
stands for, so that all that is known of that one holds for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

from .jaxpr import Equation, ShapedArray

_UINTS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


def is_key(aval: Any) -> bool:
    """Whether an aval is of typed PRNG keys."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def key_words(aval: Any) -> tuple[int, ...]:
    """Shape of the words behind an array of typed keys."""
    return (*aval.shape, *aval.dtype._impl.key_shape)  # no public form up to 0.12


def keys_of(words: jax.Array, aval: Any) -> jax.Array:
    """Typed keys of the dtype of `aval` from their words."""
    return jax.random.wrap_key_data(words, impl=aval.dtype._impl.name)


def is_drawn_by_position(aval: Any) -> bool:
    """Whether any part of what keys draw can be drawn by itself."""
    name = getattr(getattr(aval.dtype, "_impl", None), "name", None)
    return name == "threefry2x32" and bool(jax.config.jax_threefry_partitionable)  # pyrefly: ignore


def is_drawn_by_arithmetic(name: str) -> bool:
    """Whether GPUs draw bits by a primitive of this name by arithmetic, which compilers take into other kernels, and
    not by a kernel of JAX's."""
    kernel = jax.config.jax_threefry_gpu_kernel_lowering  # pyrefly: ignore
    return name in ("random_bits", "threefry2x32") and not kernel


def random_bits_at(key: jax.Array, bit_width: int, shape: Sequence[int], positions: Sequence[jax.Array]) -> jax.Array:
    """Some bits of an array drawn from one typed key.

    Args:
      key: the key, or an array of keys: each draws an array, stacked in front.
      bit_width: of an element.
      shape: of the array that one key draws.
      positions: for each of its dims the indices that are wanted, `uint32[n]`, ascending.

    Returns:
      the elements at all combinations of these indices.
    """
    if key.ndim:
        return jax.vmap(lambda one: random_bits_at(one, bit_width, shape, positions))(key)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    block = tuple(len(indices) for indices in positions)
    if str(jax.random.key_impl(key)) != "threefry2x32" or not jax.config.jax_threefry_partitionable:  # pyrefly: ignore
        first = sum(
            (indices[0] * jnp.uint32(s % 2**32) for indices, s in zip(positions, strides, strict=True)), jnp.uint32(0)
        )
        return jax.random.bits(jax.random.fold_in(key, first), block, _UINTS[bit_width])
    high = low = jnp.zeros(block, jnp.uint32)
    for d, (indices, stride) in enumerate(zip(positions, strides, strict=True)):
        term_high, term_low = _multiply(lax.broadcast_in_dim(indices, block, (d,)), stride)
        low = low + term_low
        high = high + term_high + (low < term_low).astype(jnp.uint32)
    words = jax.random.key_data(key)
    first, second = threefry2x32_p.bind(words[0], words[1], high, low)
    if bit_width == 64:
        return lax.shift_left(first.astype(jnp.uint64), jnp.uint64(32)) | second.astype(jnp.uint64)
    return (first ^ second).astype(_UINTS[bit_width])


def _multiply(index: jax.Array, stride: int) -> tuple[jax.Array | int, jax.Array]:
    """High and low words of the 64-bit product of 32-bit indices and a stride."""
    low = index * jnp.uint32(stride % 2**32)
    if stride == 1:
        return jnp.zeros_like(index), low
    mask = jnp.uint32(0xFFFF)
    a, b = index & mask, index >> 16
    c, d = jnp.uint32(stride & 0xFFFF), jnp.uint32((stride >> 16) & 0xFFFF)
    middle = (a * c >> 16) + (b * c & mask) + (a * d & mask)
    high = b * d + (b * c >> 16) + (a * d >> 16) + (middle >> 16)
    return high + index * jnp.uint32((stride >> 32) & 0xFFFFFFFF), low


def of_whole_batch(equation: Equation, whole: Sequence[int]) -> Equation:
    """A draw (`random_bits`, `random_split`) or count (`iota`) that says how large it is for the whole batch.

    Args:
      equation: at the size of a microbatch.
      whole: its shape for the whole batch; of keys that draw or split, without their own dims.
    """
    primitive = _OF_WHOLE_BATCH[equation.primitive.name]
    params = {name: equation.params[name] for name in _KEPT[equation.primitive.name]}
    return equation.replace(primitive=primitive, params={**params, "whole": tuple(whole)})


def of_padded_shape(equation: Equation, shape: Sequence[int]) -> Equation:
    """The same draw or count in dims that are longer: what it makes for the elements that were there stays.

    Args:
      equation: as it was.
      shape: longer; of keys that draw or split, without their own dims.
    """
    params = {name: equation.params[name] for name in _KEPT[equation.primitive.name]}
    unpadded = tuple(params["shape"])
    params |= {"shape": tuple(shape), "whole": equation.params.get("whole", unpadded), "unpadded": unpadded}
    return equation.replace(primitive=_OF_WHOLE_BATCH[equation.primitive.name], params=params)


def _arange(extent: int) -> jax.Array:
    return jnp.arange(extent, dtype=jnp.uint32)


# What the equations mean by themselves: what the first microbatch has. Whoever knows of which microbatch they are
# evaluates them otherwise (`program.places`).


def _bits(keys: Any, *, bit_width: int, shape: Sequence[int], whole: Sequence[int], unpadded: Any = None) -> Any:
    del unpadded
    return random_bits_at(keys, bit_width, whole, [_arange(n) for n in shape])


def _split(keys: Any, *, shape: Sequence[int], whole: Sequence[int], unpadded: Any = None) -> Any:
    del unpadded
    return split_at(keys, whole, [_arange(n) for n in shape])


def _count(
    *, dtype: Any, shape: Sequence[int], dimension: int, whole: Sequence[int], unpadded: Any = None
) -> Any:  # fmt: skip
    del whole, unpadded
    return lax.broadcasted_iota(dtype, shape, dimension)


def split_at(keys: jax.Array, shape: Sequence[int], positions: Sequence[jax.Array]) -> jax.Array:
    """Some of the keys that keys are split into.

    Args:
      keys: a key or an array of keys.
      shape: of what each is split into.
      positions: for each of its dims the indices that are wanted.
    """
    if keys.ndim:
        return jax.vmap(lambda one: split_at(one, shape, positions))(keys)
    found = jax.random.split(keys, tuple(shape))
    for d, indices in enumerate(positions):
        found = jnp.take(found, indices, axis=d)
    return found


_KEPT = {"random_bits": ("bit_width", "shape"), "random_split": ("shape",), "iota": ("dtype", "shape", "dimension")}
_MEANING = {"random_bits": _bits, "random_split": _split, "iota": _count}
_OF_WHOLE_BATCH = {name: jex_core.Primitive(name) for name in _MEANING}


def _define(name: str) -> None:
    primitive, meaning = _OF_WHOLE_BATCH[name], _MEANING[name]

    def abstract(*avals: Any, **params: Any) -> Any:
        if name == "random_bits":
            return ShapedArray((*avals[0].shape, *params["shape"]), jnp.dtype(_UINTS[params["bit_width"]]))
        if name == "random_split":
            return ShapedArray((*avals[0].shape, *params["shape"]), avals[0].dtype)
        return ShapedArray(tuple(params["shape"]), params["dtype"])

    primitive.def_abstract_eval(abstract)
    primitive.def_impl(jax.jit(meaning, static_argnames=(*_KEPT[name], "whole", "unpadded")))
    mlir.register_lowering(primitive, mlir.lower_fun(meaning, multiple_results=False))


for _name in _MEANING:
    _define(_name)

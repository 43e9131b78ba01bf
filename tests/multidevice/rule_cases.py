"""Small functions of every family of operators, with arguments: what the factor rules are validated on.

Extents are even, most divide by four, and dims that do not belong together differ where they can.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

Case = tuple[Callable[..., Any], tuple[Any, ...]]

_random = np.random.default_rng(0)
KEY = jax.random.key(3)


# Arrays of NumPy: arithmetic on them compiles nothing when tests are collected.


def normal(*shape: int) -> np.ndarray:
    return np.asarray(_random.standard_normal(shape), np.float32)


def positive(*shape: int) -> np.ndarray:
    return np.abs(normal(*shape)) + np.float32(0.5)


def integers(high: int, *shape: int, low: int = 0) -> np.ndarray:
    return np.asarray(_random.integers(low, high, shape), np.int32)


def distinct(high: int, count: int) -> np.ndarray:
    return np.asarray(_random.permutation(high)[:count], np.int32)


def well_conditioned(*shape: int) -> np.ndarray:
    return normal(*shape) + 4 * np.eye(shape[-1], dtype=np.float32)


def conv(x: Any, kernel: Any, *, strides: tuple[int, int] = (1, 1), padding: Any = "SAME", **rest: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers, **rest)


def conv_backward(x: Any, kernel: Any, **options: Any) -> Any:
    """The derivative's own convolutions, dilated and with batch and feature dims exchanged."""
    y, pull = jax.vjp(partial(conv, **options), x, kernel)
    return pull(jnp.sin(y))


def ragged_backward(x: Any, w: Any, sizes: Any) -> Any:
    """The derivative's own products: over groups of rows, and with each group summed."""
    y, pull = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
    return pull(jnp.sin(y))


def ragged_batch(x: Any, w: Any, sizes: Any) -> Any:
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((2,), (2,)), ((0,), (1,))), lhs_ragged_dimensions=[1], rhs_group_dimensions=[0]
    )
    return lax.ragged_dot_general(x, w, sizes, dims)


def pool(combine: Any, start: float, window: int, stride: int, padding: str, x: Any) -> Any:
    return lax.reduce_window(x, start, combine, (1, window, window, 1), (1, stride, stride, 1), padding)


def pool_backward(combine: Any, start: float, window: int, stride: int, padding: str, x: Any) -> Any:
    y, pull = jax.vjp(partial(pool, combine, start, window, stride, padding), x)
    return pull(jnp.sin(y))


@jax.custom_vjp
def dense(x: Any, w: Any, b: Any) -> Any:
    return jnp.tanh(x @ w + b)


def _dense_backward(residuals: Any, g: Any) -> Any:
    x, w, y = residuals
    d = g * (1 - y * y)
    return d @ w.T, x.T @ d, d.sum(0)


dense.defvjp(lambda x, w, b: (y := jnp.tanh(x @ w + b), (x, w, y)), _dense_backward)


@jax.custom_vjp
def scaled(x: Any, s: Any) -> Any:
    return x * s


scaled.defvjp(lambda x, s: (x * s, (x, s)), lambda r, g: (g * r[1], jnp.sum(g * r[0])))


@jax.custom_vjp
def normalised_cotangent(x: Any) -> Any:
    return x * 1.0


normalised_cotangent.defvjp(lambda x: (x * 1.0, None), lambda _, g: (g / jnp.sqrt(jnp.sum(g * g)),))


@jax.custom_vjp
def contracted(x: Any, w: Any) -> Any:
    return jnp.einsum("bsd,df->bsf", x, w)


contracted.defvjp(
    lambda x, w: (jnp.einsum("bsd,df->bsf", x, w), (x, w)),
    lambda r, g: (jnp.einsum("bsf,df->bsd", g, r[1]), jnp.einsum("bsf,bsd->df", g, r[0]) * 2),
)


@jax.custom_vjp
def with_constant_cotangent(x: Any, w: Any) -> Any:
    return x * w


with_constant_cotangent.defvjp(
    lambda x, w: (x * w, (x, w)), lambda r, g: (g * r[1], jnp.sum(g * r[0], 0) + jnp.ones_like(r[1]))
)


@jax.custom_vjp
def without_cotangent(x: Any, i: Any) -> Any:
    return x * i


without_cotangent.defvjp(lambda x, i: (x * i, i), lambda i, g: (g * i, None))


@jax.custom_jvp
def sine_times(x: Any, w: Any) -> Any:
    return jnp.sin(x) * w


sine_times.defjvp(lambda p, t: (jnp.sin(p[0]) * p[1], jnp.cos(p[0]) * p[1] * t[0] + jnp.sin(p[0]) * t[1]))

PRODUCTS: dict[str, Case] = {
    "dot": (jnp.matmul, (normal(8, 4), normal(4, 12))),
    "dot with batch dims": (partial(jnp.einsum, "bhik,bhjk->bhij"), (normal(4, 2, 8, 4), normal(4, 2, 4, 4))),
    "dot over two dims": (partial(jnp.einsum, "bhk,hkm->bm"), (normal(4, 8, 4), normal(8, 4, 4))),
    "dot of experts": (partial(jnp.einsum, "gsec,gsm->egcm"), (normal(4, 4, 4, 2), normal(4, 4, 8))),
    "dot in bfloat16": (jnp.matmul, (normal(8, 4).astype(jnp.bfloat16), normal(4, 8).astype(jnp.bfloat16))),
    "dot in bfloat16 to float32": (
        partial(jnp.matmul, preferred_element_type=jnp.float32),
        (normal(8, 4).astype(jnp.bfloat16), normal(4, 8).astype(jnp.bfloat16)),
    ),
    "dot of integers": (jnp.matmul, (integers(5, 8, 4), integers(5, 4, 8))),
    "dot of complex": (jnp.matmul, (lax.complex(normal(8, 4), normal(8, 4)), lax.complex(normal(4, 4), normal(4, 4)))),
    "ragged dot": (lax.ragged_dot, (normal(8, 4), normal(6, 4, 10), jnp.array([3, 0, 1, 1, 0, 3], jnp.int32))),
    "ragged dot, rows left": (lax.ragged_dot, (normal(8, 4), normal(2, 4, 8), jnp.array([1, 4], jnp.int32))),
    "ragged dot's derivative": (
        ragged_backward, (normal(8, 4), normal(6, 4, 10), jnp.array([2, 0, 1, 1, 0, 3], jnp.int32)),
    ),
    "ragged dot of a batch": (ragged_batch, (normal(2, 8, 4), normal(4, 2, 4, 6), jnp.array([[3, 1, 0, 4]] * 2))),
    "triangular solve": (
        partial(lax.linalg.triangular_solve, left_side=True, lower=True),
        (well_conditioned(4, 4, 4), normal(4, 4, 8)),
    ),
    "triangular solve from the right": (
        partial(lax.linalg.triangular_solve, lower=True), (well_conditioned(2, 4, 4), normal(2, 8, 4)),
    ),
    "linear solve": (jnp.linalg.solve, (well_conditioned(4, 4, 4), normal(4, 4, 2))),
    # One index in both dims of the result; JAX has no derivative of it.
    "symmetric product": (
        lambda a, c: lax.linalg.symmetric_product(lax.stop_gradient(a), lax.stop_gradient(c)) + c,
        (normal(8, 4), normal(8, 8)),
    ),
    "cholesky": (lambda a: jnp.linalg.cholesky(a @ a.mT + 4 * jnp.eye(4)), (normal(4, 4, 4),)),
    "fft": (lambda x: (jnp.fft.fft(x), jnp.fft.irfft(jnp.fft.rfft(x)), jnp.fft.fft2(x)), (normal(4, 8, 8),)),
}  # fmt: skip

CONVOLUTIONS: dict[str, Case] = {
    "conv": (conv, (normal(4, 8, 8, 4), normal(3, 3, 4, 8))),
    "conv with stride": (partial(conv, strides=(2, 2)), (normal(4, 8, 8, 4), normal(3, 3, 4, 8))),
    "conv 5 x 5, no padding": (partial(conv, padding="VALID"), (normal(4, 8, 8, 4), normal(5, 5, 4, 8))),
    "conv 1 x 1": (conv, (normal(4, 8, 8, 4), normal(1, 1, 4, 8))),
    "conv 1 x 1 with stride": (partial(conv, strides=(2, 2)), (normal(4, 8, 8, 4), normal(1, 1, 4, 8))),
    "conv 7 x 7 with stride": (
        partial(conv, strides=(2, 2), padding=((3, 3), (3, 3))), (normal(2, 16, 16, 2), normal(7, 7, 2, 4)),
    ),
    "conv of the whole image": (partial(conv, padding="VALID"), (normal(4, 4, 4, 2), normal(4, 4, 2, 4))),
    "conv with a kernel as large as the image": (conv, (normal(4, 4, 4, 2), normal(4, 4, 2, 4))),
    "conv, dilated kernel": (partial(conv, rhs_dilation=(2, 2)), (normal(4, 8, 8, 4), normal(3, 3, 4, 8))),
    "conv, dilated image": (
        partial(conv, lhs_dilation=(2, 2), padding=((1, 2), (1, 2))), (normal(4, 8, 8, 4), normal(3, 3, 4, 8)),
    ),
    "conv in groups": (partial(conv, feature_group_count=4), (normal(4, 8, 8, 8), normal(3, 3, 2, 8))),
    "conv by depth": (partial(conv, feature_group_count=8), (normal(4, 8, 8, 8), normal(3, 3, 1, 16))),
    "conv in batch groups": (partial(conv, batch_group_count=4), (normal(8, 8, 8, 4), normal(3, 3, 4, 8))),
    "conv, one dim, causal": (
        lambda x, w: lax.conv_general_dilated(x, w, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC")),
        (normal(4, 8, 4), normal(3, 4, 8)),
    ),
    "conv, channels first": (
        lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "SAME"),
        (normal(4, 4, 8, 8), normal(8, 4, 3, 3)),
    ),
    "conv backward": (conv_backward, (normal(4, 8, 8, 4), normal(3, 3, 4, 8))),
    "conv backward with stride": (partial(conv_backward, strides=(2, 2)), (normal(4, 8, 8, 4), normal(3, 3, 4, 8))),
    "conv backward in groups": (
        partial(conv_backward, feature_group_count=4),
        (normal(4, 8, 8, 8), normal(3, 3, 2, 8)),
    ),
    "conv under vmap": (
        lambda x, w: jax.vmap(conv, in_axes=(1, None), out_axes=1)(x, w), (normal(4, 2, 8, 8, 4), normal(3, 3, 4, 8)),
    ),
    "max pool": (partial(pool, lax.max, -jnp.inf, 2, 2, "VALID"), (normal(4, 8, 8, 4),)),
    "max pool, overlapping": (partial(pool, lax.max, -jnp.inf, 3, 2, "SAME"), (normal(4, 8, 8, 4),)),
    "min pool": (partial(pool, lax.min, jnp.inf, 3, 1, "SAME"), (normal(4, 8, 8, 4),)),
    "mean pool": (partial(pool, lax.add, 0.0, 2, 2, "VALID"), (normal(4, 8, 8, 4),)),
    "mean pool, overlapping": (partial(pool, lax.add, 0.0, 3, 1, "SAME"), (normal(4, 8, 8, 4),)),
    "max pool backward": (partial(pool_backward, lax.max, -jnp.inf, 3, 2, "SAME"), (normal(4, 8, 8, 4),)),
    "mean pool backward": (partial(pool_backward, lax.add, 0.0, 3, 2, "SAME"), (normal(4, 8, 8, 4),)),
}  # fmt: skip

_TABLE, _ROWS = normal(16, 8), integers(16, 4, 4)
_INFINITE = np.where(np.arange(16)[:, None] == 3, np.float32(np.inf), _TABLE)
_BEYOND = integers(40, 4, 4, low=-40)

INDEXING: dict[str, Case] = {
    "take": (lambda x, i: jnp.take(x, i, axis=0), (_TABLE, _ROWS)),
    "take, clipped": (lambda x, i: jnp.take(x, i, axis=0, mode="clip"), (_TABLE, _BEYOND)),
    "take, filled": (lambda x, i: jnp.take(x, i, axis=0, mode="fill"), (_TABLE, _BEYOND)),
    "take, filled with a number": (lambda x, i: x.at[i].get(mode="fill", fill_value=0.5), (_TABLE, _BEYOND)),
    "take of integers, filled": (lambda x, i: jnp.take(x, i, axis=0, mode="fill"), (integers(99, 16, 8), _BEYOND)),
    "take of unsigned, filled": (
        lambda x, i: jnp.take(x, i, axis=0, mode="fill"), (integers(99, 16, 8).astype(jnp.uint32), _BEYOND),
    ),
    "take of truths, filled": (lambda x, i: jnp.take(x, i, axis=0, mode="fill"), (integers(2, 16, 8) > 0, _BEYOND)),
    "take, promised in bounds": (lambda x, i: x.at[i].get(mode="promise_in_bounds"), (_TABLE, _ROWS)),
    "take of infinities": (lambda x, i: jnp.take(x, i, axis=0), (_INFINITE, _ROWS)),
    "negative indices": (lambda x, i: x[i], (_TABLE, integers(16, 4, 4, low=-16))),
    "take of columns": (lambda x, i: jnp.take(x, i, axis=1), (normal(4, 16, 8), integers(16, 4))),
    "take along": (lambda x, i: jnp.take_along_axis(x, i, axis=1), (normal(4, 8), integers(8, 4, 2))),
    "take along, clipped": (
        lambda x, i: jnp.take_along_axis(x, i, axis=1, mode="clip"), (normal(4, 8), integers(20, 4, 2, low=-20)),
    ),
    "take along the last": (lambda x, i: jnp.take_along_axis(x, i, axis=-1), (normal(4, 4, 8), integers(8, 4, 4, 1))),
    "two indices": (lambda x, i, j: x[i, j], (normal(8, 8, 4), integers(8, 4), integers(8, 4))),
    "windows": (
        lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (k, 0), (2, 4)))(i), (normal(8, 4), integers(8, 4)),
    ),
    "one index a row": (lambda x, i: jax.vmap(lambda a, k: a[k])(x, i), (normal(4, 8, 4), integers(8, 4))),
    "scatter add": (lambda x, i, u: x.at[i].add(u), (_TABLE, integers(16, 4), normal(4, 8))),
    "scatter add, clipped": (
        lambda x, i, u: x.at[i].add(u, mode="clip"), (_TABLE, integers(40, 4, low=-20), normal(4, 8)),
    ),
    "scatter add, dropped": (
        lambda x, i, u: x.at[i].add(u, mode="drop"), (_TABLE, integers(40, 4, low=-40), normal(4, 8)),
    ),
    "scatter add of integers": (
        lambda x, i, u: x.at[i].add(u), (integers(9, 16, 8), integers(16, 4), integers(9, 4, 8)),
    ),
    "scatter": (lambda x, i, u: x.at[i].set(u), (_TABLE, distinct(16, 4), normal(4, 8))),
    "scatter, promised sorted": (
        lambda x, i, u: x.at[i].set(u, indices_are_sorted=True, unique_indices=True),
        (_TABLE, jnp.sort(distinct(16, 4)), normal(4, 8)),
    ),
    "scatter max": (lambda x, i, u: x.at[i].max(u), (_TABLE, distinct(16, 4), normal(4, 8))),
    "scatter multiply": (
        lambda x, i, u: x.at[i].multiply(u, unique_indices=True), (_TABLE, distinct(16, 4), normal(4, 8)),
    ),
    "scatter a row": (
        lambda x, i, u: jax.vmap(lambda a, k, v: a.at[k].add(v))(x, i, u),
        (normal(4, 8), integers(8, 4, 2), normal(4, 2)),
    ),
    "scatter at two indices": (
        lambda x, i, j, u: x.at[i, j].add(u), (normal(8, 8, 4), integers(8, 4), integers(8, 4), normal(4, 4)),
    ),
    "dynamic slice": (lambda x, i: lax.dynamic_slice(x, (i, 0, 2), (2, 4, 8)), (normal(8, 4, 8), jnp.int32(3))),
    "dynamic slice, clamped": (lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 4)), (normal(8, 4), jnp.int32(70))),
    "dynamic update": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (normal(8, 4), normal(2, 4), jnp.int32(3)),
    ),
    "one hot": (lambda i: nn.one_hot(i, 8), (integers(8, 4, 4),)),
}  # fmt: skip

REDUCTIONS: dict[str, Case] = {
    "reduce": (
        lambda x: [f(x, axis=(0, 2)) for f in (jnp.sum, jnp.max, jnp.min, jnp.prod)], (normal(4, 8, 4),),
    ),
    "reduce truths": (lambda x: (jnp.all(x > 0, axis=0), jnp.any(x > 1.5, axis=1)), (normal(4, 8),)),
    "reduce bits": (
        lambda x: lax.reduce(x, jnp.int32(0), lax.bitwise_or, (0,)), (integers(99, 4, 8),),
    ),
    "reduce integers": (lambda x: (jnp.sum(x, 0), jnp.max(x, 1)), (integers(9, 4, 8),)),
    "reduce by a function": (
        lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a * 1.0 + b, (1,)), (normal(4, 8),),
    ),
    "cumulative": (
        lambda x: (jnp.cumsum(x, 1), lax.cumsum(x, 0, reverse=True), jnp.cumprod(x, 1), lax.cummax(x, 1),
                   lax.cumlogsumexp(x, 1)), (normal(4, 8),),
    ),
    "sort": (lambda x: (jnp.sort(x, 1), jnp.argsort(x, 0)), (normal(4, 8),)),
    "sort of pairs": (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (normal(4, 8), normal(4, 8))),
    "top k": (lambda x: lax.top_k(x, 2), (normal(4, 8),)),
    "approximate top k": (lambda x: lax.approx_max_k(x, 2), (normal(4, 8),)),
    "argmax": (lambda x: (jnp.argmax(x, 0), jnp.argmin(x, 1)), (normal(4, 8),)),
    "logsumexp": (lambda x: (nn.logsumexp(x, 1), nn.softmax(x, 0), nn.log_softmax(x, 1)), (normal(8, 4),)),
    "variance": (lambda x: (jnp.var(x, 0), jnp.linalg.norm(x)), (normal(8, 4),)),
    "trace": (lambda x: (jnp.diagonal(x), jnp.trace(x)), (normal(8, 8),)),
    "associative scan": (
        lambda a, b: lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (a, b), axis=1),
        (normal(4, 8, 2), normal(4, 8, 2)),
    ),
}  # fmt: skip

SHAPES: dict[str, Case] = {
    "slice": (lambda x: (x[2:6], x[:, ::2], x[::3]), (normal(8, 4),)),
    "pad": (
        lambda x, v: (lax.pad(x, v, ((0, 0, 0), (1, 2, 0))), lax.pad(x, v, ((0, 0, 1), (-1, 0, 0)))),
        (normal(8, 4), jnp.float32(1.0)),
    ),
    # A block of the result holds all of the operand, some of its end, or nothing.
    "pad at the end": (
        lambda x, y, z, v: [lax.pad(one, v, ((0, 8 - len(one), 0), (0, 1, 0))) for one in (x, y, z)],
        (normal(7, 4), normal(5, 4), normal(1, 4), jnp.float32(0.5)),
    ),
    "concatenate": (lambda x, y: (jnp.concatenate([x, y], 1), jnp.stack([y, y], 1)), (normal(8, 4), normal(8, 8))),
    "split": (lambda x: jnp.split(x, 2, axis=1), (normal(8, 8),)),
    "reverse, roll, tile": (lambda x: (x[::-1], jnp.roll(x, 1, axis=1), jnp.tile(x, (2, 1))), (normal(8, 4),)),
    "select": (
        lambda c, p, x, y: (jnp.where(c, x, y), lax.select(p, x, y)),
        (integers(2, 8, 4) > 0, jnp.bool_(True), normal(8, 4), normal(8, 4)),
    ),
    "select of three": (lax.select_n, (integers(3, 8, 4), normal(8, 4), normal(8, 4), normal(8, 4))),
    "clamp": (
        lambda x, low, high: (lax.clamp(-0.5, x, 0.5), lax.clamp(low, x, high)),
        (normal(8, 4), -positive(8, 4), positive(8, 4)),
    ),
    "reshape": (
        lambda x: (x.reshape(32), x.reshape(2, 4, 4), x.reshape(4, 2, 4), x.reshape(16, 2)), (normal(8, 4),),
    ),
    "reshape that transposes first": (
        lambda x: (lax.reshape(x, (32, 3), (1, 0, 2)), lax.reshape(x, (12, 8), (2, 1, 0))), (normal(8, 4, 3),),
    ),
    "reshape that fits badly": (
        lambda x: (x.reshape(8, 12), x.reshape(4, 2, 3, 2, 2), x.reshape(4, 24), x.reshape(6, 16)), (normal(8, 4, 3),),
    ),
    "reshape of ones": (lambda x: (x.reshape(8, 1, 4, 1), jnp.squeeze(x, 0), x[..., None]), (normal(1, 8, 4),)),
    "transpose": (lambda x: x.transpose(2, 0, 1), (normal(8, 4, 2),)),
    "broadcast": (lambda x, y: (jnp.broadcast_to(x[:, None], (8, 2, 4)), x + y), (normal(8, 4), normal(1, 4))),
    "iota": (lambda x: (x + lax.broadcasted_iota(jnp.int32, (8, 4), 1), jnp.tril(x)), (integers(4, 8, 4),)),
    "barrier": (lax.optimization_barrier, (normal(8, 4),)),
    "convert": (
        lambda x: (x.astype(jnp.bfloat16), x.astype(jnp.int32), lax.bitcast_convert_type(x, jnp.uint8),
                   lax.reduce_precision(x, 8, 7)), (normal(8, 4),),
    ),
}  # fmt: skip

ELEMENTWISE: dict[str, Case] = {
    "special functions": (
        lambda x: (lax.erf(x), lax.erf_inv(jnp.tanh(x)), lax.lgamma(x + 4), lax.digamma(x + 4), lax.erfc(x),
                   jnp.expm1(x), jnp.log1p(x * x)), (normal(8, 4),),
    ),
    "one operand": (
        lambda x: (jnp.tan(x), lax.rsqrt(x * x + 1), jnp.cbrt(x), lax.logistic(x), jnp.round(x), jnp.sign(x),
                   lax.is_finite(x), jnp.exp2(x), x**3, jnp.abs(x), jnp.square(x)), (normal(8, 4),),
    ),
    "two operands": (
        lambda x, y: (x * y, x / y, jnp.maximum(x, y), jnp.fmod(x, y), jnp.power(jnp.abs(x), y), x > y,
                      jnp.arctan2(x, y), lax.nextafter(x, y)), (normal(8, 4), normal(8, 4)),
    ),
    "integers": (
        lambda x, y: (x & y, x ^ y, ~x, x << y, x >> y, x // (y + 1), lax.population_count(x), lax.clz(x)),
        (integers(9, 8, 4), integers(9, 8, 4)),
    ),
    "truths": (lambda x, y: (x & y, x | y, ~x), (integers(2, 8, 4) > 0, integers(2, 8, 4) > 0)),
    "complex": (
        lambda x, y: (lambda z: (z * z, jnp.real(z), jnp.imag(z), jnp.abs(z), jnp.conj(z)))(lax.complex(x, y)),
        (normal(8, 4), normal(8, 4)),
    ),
    "activations": (
        lambda x: (nn.relu(x), nn.silu(x), nn.gelu(x), nn.gelu(x, approximate=False), nn.softplus(x), nn.elu(x),
                   nn.relu6(x)), (normal(8, 4),),
    ),
    "random": (
        lambda k: (jax.random.bits(k, (8, 4)), jax.random.bits(k, (8, 4), jnp.uint8), jax.random.normal(k, (8, 4, 2)),
                   jax.random.bernoulli(k, 0.3, (8, 4)), jax.random.randint(k, (8, 4), 0, 77)), (KEY,),
    ),
    "random by many keys": (
        lambda k: jax.vmap(lambda q: jax.random.uniform(q, (4,)))(jax.random.split(k, 4)), (KEY,),
    ),
    "random by an old key": (lambda k: jax.random.uniform(k, (8, 4)), (jax.random.PRNGKey(2),)),
}  # fmt: skip

CALLS: dict[str, Case] = {
    "custom vjp of a layer": (dense, (normal(8, 4), normal(4, 8), normal(8))),
    "custom vjp with a scalar": (scaled, (normal(8, 4), jnp.float32(2.0))),
    "custom vjp over all elements": (normalised_cotangent, (normal(8, 4),)),
    "custom vjp with two summed dims": (contracted, (normal(4, 4, 8), normal(8, 4))),
    "custom vjp, affine": (with_constant_cotangent, (normal(8, 4), normal(4))),
    "custom vjp, no cotangent": (without_cotangent, (normal(8, 4), integers(4, 8, 4))),
    "custom jvp": (sine_times, (normal(8, 4), normal(4))),
    "cond": (
        lambda p, x, w: lax.cond(p, lambda: jnp.sin(x) * w, lambda: x + w), (jnp.bool_(True), normal(8, 4), normal(4)),
    ),
    "cond with a product": (
        lambda p, x, w: lax.cond(p, lambda: x @ w, lambda: jnp.zeros((8, 8))),
        (jnp.bool_(True), normal(8, 4), normal(4, 8)),
    ),
    "cond with a reduction": (
        lambda p, x, y: lax.cond(p, lambda: (x, jnp.sum(y, 1)), lambda: (y, jnp.sum(x, 1))),
        (jnp.bool_(False), normal(8, 4), normal(8, 4)),
    ),
    "switch": (lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda a: a * 2], x), (jnp.int32(2), normal(8, 4))),
    "while": (
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]) * 1.5), (0, x)),
        (normal(8, 4),),
    ),
    "while it is small": (lambda x: lax.while_loop(lambda c: jnp.sum(c) < 40, lambda c: c + 1.0, x), (positive(8, 4),)),
    "while with a product": (
        lambda x, w: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x)),
        (normal(8, 4), normal(4, 4)),
    ),
    "fori": (lambda n, x: lax.fori_loop(0, n, lambda i, c: c * 2 + i, x), (jnp.int32(3), normal(8, 4))),
    "scan inside cond": (
        lambda p, x, w: lax.cond(
            p, lambda: lax.scan(lambda c, r: (jnp.tanh(c * w + r), c), jnp.zeros(4), x, reverse=True), lambda: (w, x)
        ), (jnp.bool_(True), normal(8, 4), normal(4)),
    ),
    "remat inside cond": (
        lambda p, x: lax.cond(p, jax.checkpoint(lambda a: jnp.sin(jnp.sin(a))), lambda a: a, x),
        (jnp.bool_(True), normal(8, 4)),
    ),
}  # fmt: skip

GROUPS: dict[str, dict[str, Case]] = {
    "products": PRODUCTS,
    "convolutions": CONVOLUTIONS,
    "indexing": INDEXING,
    "reductions": REDUCTIONS,
    "shapes": SHAPES,
    "elementwise": ELEMENTWISE,
    "calls": CALLS,
}

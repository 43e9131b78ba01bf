"""How a leaf of a run is judged against the reference, and how the reference's own noise is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright._jax.grad import value_and_grad
from meshwright._jax.reordered import reordered
from meshwright.verify import LeafError, leaf_error

FLOAT32, BFLOAT16, WHOLE = 2.0**-23, 2.0**-7, 0.0
START = np.zeros(100)
WANTED = np.linspace(0.5, 1.0, 100)


def judged(
    got: Any, wanted: Any = WANTED, start: Any = START, noisy: Any = (), last_place: float = FLOAT32
) -> LeafError:
    arrays = [np.asarray(one, np.float64) for one in noisy]
    return leaf_error("w", np.asarray(got, np.float64), wanted, start, arrays, last_place=last_place)


@pytest.mark.parametrize(
    ("got", "agrees"),
    [
        (WANTED, True),
        (WANTED * (1 + 1e-6), True),
        (WANTED * (1 + 1e-3), False),
        (-WANTED, False),  # the sign of a gradient
        (2 * WANTED, False),  # a sum for a mean of two
        (WANTED * 7 / 8, False),  # a microbatch of eight that is lost
        (START, False),  # no update
        (np.where(np.arange(100) == 7, 0.0, WANTED), False),  # one element
        (np.where(np.arange(100) == 7, np.nan, WANTED), False),
        (np.where(np.arange(100) == 7, np.inf, WANTED), False),
    ],
)
def test_without_noise(got: np.ndarray, agrees: bool) -> None:
    error = judged(got)
    assert error.is_judged
    assert error.agrees is agrees


def test_a_small_update_of_a_large_number_is_held_to_the_update() -> None:
    start = np.full(100, 1000.0)
    wanted = start + WANTED
    assert not judged(start, wanted, start).agrees  # a hundredth of a percent of the number, but all of its change
    assert judged(wanted, wanted, start).is_judged
    # In bfloat16 the change is less than the last place, so that nothing can be said.
    assert not judged(wanted, wanted, start, last_place=BFLOAT16).is_judged


def test_noise_is_what_a_deviation_is_held_against() -> None:
    noise = 1e-3 * np.random.default_rng(0).normal(size=(3, 100))
    noisy = [WANTED + one for one in noise]
    off = WANTED + 1e-3 * np.random.default_rng(1).normal(size=100)
    assert not judged(off).agrees
    assert judged(off, noisy=noisy).agrees
    assert judged(off, noisy=noisy).is_judged
    assert not judged(WANTED * 7 / 8, noisy=noisy).agrees


def test_what_is_noise_alone_cannot_be_judged() -> None:
    draws = np.random.default_rng(0).normal(size=(5, 100))
    error = judged(draws[0], draws[1], START, draws[2:])
    assert error.agrees
    assert not error.is_judged
    assert not judged(100 * draws[0], draws[1], START, draws[2:]).agrees


def test_patterns_of_what_is_no_number() -> None:
    some = np.where(np.arange(100) % 2 == 0, np.nan, WANTED)
    assert judged(some, some).agrees
    assert judged(some, some).is_judged
    assert not judged(WANTED, some).agrees
    assert not judged(np.where(np.isnan(some), np.inf, some), some).agrees
    assert not judged(-np.full(100, np.inf), np.full(100, np.inf)).agrees
    nothing = judged(WANTED * math.nan, WANTED * math.nan)
    assert nothing.agrees
    assert not nothing.is_judged


def test_whole_numbers_have_no_tolerance() -> None:
    counts, one_more = np.arange(100.0), np.arange(100.0) + (np.arange(100) == 3)
    assert judged(counts, counts, last_place=WHOLE).is_judged
    assert not judged(one_more, counts, last_place=WHOLE).agrees
    # An argument of a maximum that rounding decides.
    assert judged(one_more, counts, counts - 1, [counts, one_more], last_place=WHOLE).agrees


def test_what_stays_as_it_is_can_be_judged() -> None:
    assert judged(WANTED, WANTED, WANTED).is_judged
    assert judged(WANTED, WANTED, WANTED).agrees
    assert not judged(WANTED + 1e-4, WANTED, WANTED).agrees


X, W = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(64, 32), (32, 16)]))


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, row: (jnp.tanh(c + row @ w), jnp.sum(c)), jnp.zeros(16), x)[1]


def branched(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.cond(jnp.sum(x) > 0, lambda: x @ w, lambda: 2 * (x @ w))


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(x.T @ x @ c[1] / 64)), (0, w))[1]


def convolved(w: jax.Array, x: jax.Array) -> jax.Array:
    image, kernel = x.reshape(2, 8, 8, 16), w.reshape(2, 2, 16, 8)
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: x @ w,
        lambda w, x: jax.checkpoint(lambda w: jax.nn.relu(x @ w))(w),
        lambda w, x: jnp.zeros(8).at[jnp.arange(64) % 8].add(jnp.sum(x, 1)),
        lambda w, x: value_and_grad(lambda w: jnp.mean(jax.nn.gelu(x @ w) ** 2))(w),
        scanned,
        branched,
        looped,
        convolved,
    ],
)
def test_sums_in_other_orders(function: Callable[..., Any]) -> None:
    """Equal but for rounding, of which there is some."""
    run = jax.jit(reordered(function, W, X))
    wanted = jax.tree.leaves(jax.jit(function)(W, X))
    found = [run(np.float32(cut), W, X) for cut in (0.25, 0.5, 0.75)]
    for one in found:
        for a, b in zip(one, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert any(bool(jnp.any(a != b)) for a, b in zip(found[0], found[1], strict=True))


def test_what_is_exact_stays_exact() -> None:
    """Sums of whole numbers, infinities in what is not summed, and what is printed, which the program said before."""

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        jax.debug.print("{x}", x=x[0, 0])
        return jnp.sum(jnp.arange(7)), jnp.where(x > 0, x, -jnp.inf) @ jnp.ones((32, 2))

    count, product = jax.jit(reordered(function, X))(np.float32(0.5), X)
    assert int(count) == 21
    np.testing.assert_array_equal(product, jnp.full((64, 2), -jnp.inf))

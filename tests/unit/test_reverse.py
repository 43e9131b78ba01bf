"""Reverse differentiation in one trace: the same as JAX's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from meshwright._jax.reverse import vjp


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (3 * ct,))  # three, to be told from what JAX would find


def function(weights: dict[str, jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jax.nn.relu(h @ w) + doubled(h), None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x, weights["layers"])
    h = jax.lax.cond(h.sum() > 0, jnp.tanh, jnp.sin, h) * weights["scale"]
    return [h, jnp.ones(2)], jnp.argmax(h)


def test_cotangents_and_results_are_those_of_jax() -> None:
    key = jax.random.key(0)
    weights = {"layers": jax.random.normal(key, (3, 4, 4)), "scale": jnp.full(4, 0.5), "unused": jnp.ones(3)}
    x = jax.random.normal(jax.random.key(1), (2, 4))

    def both(given: dict[str, jax.Array], x: jax.Array) -> tuple[object, object]:
        results, pull, aux = vjp(function, given, x)
        wanted, jax_pull, jax_aux = jax.vjp(function, given, x, has_aux=True)
        cotangents = [jnp.cos(result) for result in results]
        return (results, pull(cotangents), aux), (wanted, jax_pull(cotangents), jax_aux)

    for ours, theirs in (both(weights, x), jax.jit(both)(weights, x)):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_nothing_to_differentiate() -> None:
    results, pull, aux = vjp(lambda weights: ([jnp.ones(3)], 5), [])
    assert [x.shape for x in results] == [(3,)]
    assert pull([jnp.ones(3)]) == ([],)
    assert aux == 5
    results, pull, _ = vjp(lambda weights: ([], None), [jnp.ones(2)])
    assert list(results) == []
    np.testing.assert_array_equal(pull([])[0][0], np.zeros(2))

"""Updates around a loss function as users of Optax and `jax.lax` write them, for tests of pipelines.

Each is `(state, loss, gradients) -> (state, metrics)`; `step_of` makes a step of one, `state_of` its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

import meshwright as mw

Update = Callable[[Any, Any, Any], tuple[Any, Any]]
_ADAM = optax.adam(1e-2, eps=1e-3)
_CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))


def step_of(update: Update, forward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A step of `(state, (x, y))`, whose loss is the mean squared error of `forward`."""

    def step(state: Any, batch: Any) -> Any:
        x, y = batch
        loss, grads = mw.value_and_grad(lambda p: jnp.mean((forward(p, x) - y) ** 2))(state["params"])
        return update(state, loss, grads)

    return step


def state_of(params: Any, optimizer: Any = _ADAM) -> Any:
    """What the updates of this module keep."""
    # A count that is no optimizer's, a loss scale, a running mean, a key, an empty array, and nothing.
    numbers = {"count": jnp.int32(0), "scale": jnp.float32(1), "ema": jnp.float32(1), "key": jax.random.PRNGKey(7)}
    return {"params": params, "moments": optimizer.init(params), **numbers, "empty": jnp.zeros((0, 4)), "none": None}


def by(optimizer: Any, **extra: Callable[[Any], Any]) -> Update:
    """The update of an optimizer; `extra` are further arguments, made of the loss."""

    def update(state: Any, loss: Any, grads: Any) -> Any:
        more = {name: make(loss) for name, make in extra.items()}
        updates, moments = optimizer.update(grads, state["moments"], state["params"], **more)
        return {**state, "params": optax.apply_updates(state["params"], updates), "moments": moments}, {"loss": loss}

    return update


def descend(params: Any, grads: Any, rate: Any = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def norms(tree: Any) -> list[Any]:
    return [jnp.linalg.norm(x) for x in jax.tree.leaves(tree)]


def scaled(state: Any, loss: Any, grads: Any) -> Any:
    """Dynamic loss scaling: the update and the clipping inside a `cond`, that reads all gradients."""
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()

    def apply() -> Any:
        updates, moments = _CLIPPED.update(grads, state["moments"], state["params"])
        norm = optax.tree.norm(updates)
        params = optax.apply_updates(state["params"], jax.tree.map(lambda u: u / (1 + norm), updates))
        return {**state, "params": params, "moments": moments, "scale": state["scale"] * 2, "count": state["count"] + 1}

    kept = lax.cond(finite & (state["count"] < 2), apply, lambda: {**state, "scale": state["scale"] / 2})
    return kept, {"loss": loss, "finite": finite}


def spikes(state: Any, loss: Any, grads: Any) -> Any:
    """Skips steps whose gradient is larger than usual, counts them, and adds noise."""
    norm = optax.tree.norm(grads)
    ema = 0.9 * state["ema"] + 0.1 * norm
    skip = norm > 3 * ema
    key, *keys = jax.random.split(state["key"], 1 + len(jax.tree.leaves(grads)))
    keys = jax.tree.unflatten(jax.tree.structure(grads), keys)
    noisy = jax.tree.map(lambda g, k: g + 1e-3 * jax.random.normal(k, g.shape), grads, keys)
    params = jax.tree.map(lambda p, n: jnp.where(skip, p, n), state["params"], descend(state["params"], noisy))
    return {**state, "params": params, "ema": ema, "key": key, "count": state["count"] + skip}, {"loss": loss}


def loops(state: Any, loss: Any, grads: Any) -> Any:
    """A scan, a `fori_loop` of a length that the state says, and a `while_loop` for each tensor."""
    rates = jnp.array([0.01, 0.02])
    params, _ = lax.scan(lambda p, rate: (descend(p, grads, rate), rate), state["params"], rates)
    params = lax.fori_loop(0, state["count"], lambda _, p: descend(p, grads, 0.01), params)

    def shorten(g: Any) -> Any:
        return lax.while_loop(lambda x: jnp.linalg.norm(x) > 1e-2, lambda x: x / 2, g)

    params = descend(params, jax.tree.map(shorten, grads))
    return {**state, "params": params, "count": state["count"] + 1}, {"loss": loss}


def statistics(state: Any, loss: Any, grads: Any) -> Any:
    """Returns gradients, differences, and numbers of every tensor and of all of them."""
    params = jax.tree.map(jax.nn.relu, descend(state["params"], grads))
    each = jnp.stack(norms(grads))
    flat, _ = ravel_pytree(grads)
    metrics = {
        "loss": loss, "gradients": grads, "norms": each, "largest": jnp.argmax(each),
        "counts": jnp.histogram(flat, 5)[0], "moved": jax.tree.map(lambda a, b: a - b, params, state["params"]),
    }  # fmt: skip
    return {**state, "params": params}, metrics


def together(state: Any, loss: Any, grads: Any) -> Any:
    """All gradients as one vector, divided by its norm; and a loop over all of them that ends by their norm."""
    flat, back = ravel_pytree(grads)
    halved = lax.while_loop(lambda g: optax.tree.norm(g) > 0.05, lambda g: jax.tree.map(lambda x: x / 2, g), grads)
    params = descend(descend(state["params"], back(flat / jnp.linalg.norm(flat))), halved)
    return {**state, "params": params}, {"loss": loss}


# By name: the update and the optimizer of its state.
UPDATES: dict[str, tuple[Update, Any]] = {
    name: (by(optimizer), optimizer)
    for name, optimizer in {
        "multisteps": optax.MultiSteps(_CLIPPED, 2, should_skip_update_fn=optax.skip_not_finite),
        "apply_if_finite": optax.apply_if_finite(_CLIPPED, 5),
        "novograd": optax.novograd(1e-2),
        "mechanize": optax.contrib.mechanize(optax.sgd(1e-2)),
        "sam": optax.contrib.sam(optax.sgd(1e-2), optax.chain(optax.contrib.normalize(), optax.sgd(1e-2)), 2),
        "prodigy": optax.contrib.prodigy(),
        "lamb": optax.lamb(1e-2, eps=1e-3),
        "muon": optax.contrib.muon(1e-2),
        "schedule_free": optax.contrib.schedule_free_sgd(1e-2),
        "flatten": optax.flatten(_ADAM),
        "conditionally": optax.chain(
            optax.conditionally_transform(optax.clip_by_global_norm(0.05), lambda count: count > 0),
            optax.conditionally_mask(_ADAM, lambda count: count % 2 == 0),
        ),
    }.items()
} | {
    "scaled": (scaled, _CLIPPED), "spikes": (spikes, _ADAM), "loops": (loops, _ADAM),
    "statistics": (statistics, _ADAM), "together": (together, _ADAM),
}  # fmt: skip

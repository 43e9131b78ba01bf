"""Random training steps as users write them, for tests that hold plans of them against one device.

A step is drawn from a seed: what its layers are made of, where its random numbers come from, what its loss does with
the examples, which effects it has, how it updates, and how its state is kept. Whatever is drawn is an ordinary step: it
runs under `jax.jit`. `python tests/multidevice/random_steps.py --count 300` runs many and prints what it finds as JSON.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import io_callback
from jax.sharding import SingleDeviceSharding

import meshwright as mw

BATCH, WIDTH, LENGTH, VOCABULARY = 16, 16, 4, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStep:
    """A step with what it runs on.

    Args:
      step: `(state, batch) -> (state, metrics)`, or `(state, batch) -> gradients` beside a loss.
      make_state: its first state; a new one at each call, since steps donate it.
      batch: what every step is given.
      words: what was drawn.
      log: what its callbacks were called with, in order.
      effect: where it has one: "loss", "update" or nowhere.
      feeds_back: whether its first result is the next state.
    """

    step: Callable[..., Any]
    make_state: Callable[[], Any]
    batch: Any
    words: tuple[str, ...]
    log: list[Any]
    effect: str | None = None
    feeds_back: bool = True


@dataclass(frozen=True, slots=True)
class Choices:
    """Draws from a seed that remember what was drawn."""

    draw: random.Random
    words: list[str] = field(default_factory=list)

    def one(self, *options: str) -> str:
        found = self.draw.choice(options)
        if found != "-":
            self.words.append(found)
        return found

    def several(self, low: int, high: int, *options: str) -> list[str]:
        found = [self.draw.choice(options) for _ in range(self.draw.randint(low, high))]
        self.words.extend(found)
        return found


def _normal(seed: int, *shape: int, scale: float = 0.3) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def _dense(p: Any, h: Any, key: Any) -> Any:
    del key
    return h + jnp.tanh(h @ p["a"] + p["c"]) @ p["b"]


def _dropout(p: Any, h: Any, key: Any) -> Any:
    h = _dense(p, h, key)
    return jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0.0)


def _weight_noise(p: Any, h: Any, key: Any) -> Any:
    return h + jnp.tanh(h @ (p["a"] + 0.1 * jax.random.normal(key, p["a"].shape))) @ p["b"]


def _dropped_layer(p: Any, h: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.5), h, _dense(p, h, key))


def _cond(p: Any, h: Any, key: Any) -> Any:
    return lax.cond(jnp.sum(p["c"]) > 0, lambda: _dense(p, h, key), lambda: h * 0.5)


def _remat(p: Any, h: Any, key: Any) -> Any:
    return jax.checkpoint(lambda p, h: _dropout(p, h, key))(p, h)


def _norm(p: Any, h: Any, key: Any) -> Any:
    h = _dense(p, h, key)
    return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-3) * (1 + p["c"])


def _scanned(p: Any, h: Any, key: Any) -> Any:
    two = jax.tree.map(lambda w: jnp.stack([w, w * 0.5]), {"a": p["a"], "b": p["b"], "c": p["c"]})
    h, _ = lax.scan(lambda h, w: (_dense(w, h, key), None), h, two)
    return h


def _loop(p: Any, h: Any, key: Any) -> Any:
    return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h + i * (h @ p["a"])), _dense(p, h, key))


LAYERS: Mapping[str, Callable[..., Any]] = {
    "dense": _dense, "dropout": _dropout, "weight noise": _weight_noise, "dropped layer": _dropped_layer,
    "cond": _cond, "remat": _remat, "norm": _norm, "scanned": _scanned, "loop": _loop,
}  # fmt: skip
RANDOM = frozenset(["dropout", "weight noise", "dropped layer", "remat"])

OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.05),
    "adam": lambda: optax.adam(1e-2, eps=1e-2),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-2)),
    "momentum": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 4), momentum=0.9),
    "multisteps": lambda: optax.MultiSteps(optax.adam(1e-2, eps=1e-2), 2),
    "apply if finite": lambda: optax.apply_if_finite(optax.sgd(0.05), 3),
    "novograd": lambda: optax.novograd(1e-2, eps=1e-2),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-2),
}


def random_step(seed: int) -> RandomStep:
    """The step of a seed."""
    choices = Choices(random.Random(f"step {seed}"))
    kinds = choices.several(2, 4, *LAYERS)
    tokens = choices.one("tokens", "vectors", "vectors") == "tokens"
    tied = tokens and choices.one("tied", "untied") == "tied"
    objective = choices.one("mean", "mean", "mean", "sum", "masked mean", "normalised over the batch")
    where_key = choices.one("key in the state", "raw key in the state", "key from a counter", "key through the loss")
    aux = choices.one("no aux", "aux mean", "aux per example")
    effect = choices.one("-", "-", "-", "callback in the loss", "callback in the update", "ordered io in the update")
    update = choices.one(*OPTIMIZERS, "gradients returned")
    around = choices.one("-", "-", "skip if not finite", "norms returned", "concatenated")
    kept = choices.one("-", "-", "ema of the same arrays", "optimizer state in the host", "batch also in the state")
    if kept == "optimizer state in the host" and effect == "ordered io in the update":
        effect = "callback in the update"  # jax.jit itself cannot run the two together (JAX 0.10)
    log: list[Any] = []
    optimizer = OPTIMIZERS["sgd" if update == "gradients returned" else update]()
    params: dict[str, Any] = {
        "layers": [
            {"a": _normal(10 * i, WIDTH, 2 * WIDTH if _wide(kind) else WIDTH),
             "b": _normal(10 * i + 1, 2 * WIDTH if _wide(kind) else WIDTH, WIDTH),
             "c": _normal(10 * i + 2, WIDTH if kind in ("norm", "loop") or not _wide(kind) else 2 * WIDTH) * 0.1}
            for i, kind in enumerate(kinds)
        ],
        "head": _normal(98, WIDTH, VOCABULARY if tokens else WIDTH),
    }  # fmt: skip
    if tokens:
        params["table"] = _normal(99, VOCABULARY, WIDTH)
        if tied:
            del params["head"]
    batch: dict[str, Any] = {"mask": np.random.default_rng(5).integers(0, 2, BATCH).astype(np.float32)}
    if tokens:
        batch["x"] = np.random.default_rng(6).integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
    else:
        batch["x"], batch["y"] = _normal(7, BATCH, WIDTH, scale=1.0), _normal(8, BATCH, WIDTH, scale=1.0)

    def key_of(state: Any) -> Any:
        if where_key == "key from a counter":
            return jax.random.fold_in(jax.random.key(3), state["count"])
        if where_key == "raw key in the state":
            return jax.random.wrap_key_data(state["key"])
        return jax.random.fold_in(state["key"], state["count"])

    def loss_of(params: Any, batch: Any, state: Any) -> Any:
        # Made before the loss or inside it: both are usual.
        key = key_of(state)
        h = params["table"][batch["x"]] if tokens else batch["x"]
        for number, (kind, p) in enumerate(zip(kinds, params["layers"], strict=True)):
            h = LAYERS[kind](p, h, jax.random.fold_in(key, number))
        out = h @ (params["table"].T if tied else params["head"])
        if tokens:
            each = optax.softmax_cross_entropy_with_integer_labels(out, jnp.roll(batch["x"], 1, axis=1)).mean(-1)
        else:
            each = jnp.mean((out - batch["y"]) ** 2, -1)
        if objective == "mean":
            loss = jnp.mean(each)
        elif objective == "sum":
            loss = 0.01 * jnp.sum(each)
        elif objective == "masked mean":
            loss = jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])
        else:
            weight = batch["mask"] - batch["mask"].mean()
            loss = jnp.mean(each * weight / (weight.std() + 1e-3))
        if effect == "callback in the loss":
            jax.debug.callback(lambda v: log.append(float(v)), loss)
        others: dict[str, Any] = {}
        if aux == "aux mean":
            others["accuracy"] = jnp.mean(each < 1.0)
        elif aux == "aux per example":
            others["each"] = each
        if where_key == "key through the loss":
            others["key"], others["count"] = state["key"], state["count"] + 1
        return loss, others

    def step(state: Any, batch: Any) -> Any:
        (loss, others), grads = mw.value_and_grad(
            lambda params: loss_of(params, batch, state), has_aux=True
        )(state["params"])  # fmt: skip
        metrics = {"loss": loss, **others}
        if effect == "callback in the update":
            jax.debug.callback(lambda v: log.append(float(v)), _norm(grads))
        if effect == "ordered io in the update":
            io_callback(lambda v: log.append(float(v)), None, loss, ordered=True)
            io_callback(lambda v: log.append(float(v)), None, loss * 2, ordered=True)
        if update == "gradients returned":
            return {"grads": grads, "metrics": metrics}
        if around == "concatenated":
            flat, unravel = jax.flatten_util.ravel_pytree(grads)
            grads = unravel(flat / (1e-3 + jnp.linalg.norm(flat)))
        held = state["opt"]
        if kept == "optimizer state in the host":
            held = jax.tree.map(lambda v: jax.device_put(v, jax.memory.Space.Device), held)
        updates, opt = optimizer.update(grads, held, state["params"])
        new = optax.apply_updates(state["params"], updates)
        if around == "skip if not finite":
            new, opt = lax.cond(jnp.isfinite(loss), lambda: (new, opt), lambda: (state["params"], held))
        if kept == "optimizer state in the host":
            opt = jax.tree.map(lambda v: jax.device_put(v, jax.memory.Space.Host), opt)
        if around == "norms returned":
            metrics["norms"] = jax.tree.map(jnp.linalg.norm, grads)
        after = {"params": new, "opt": opt, "count": others.get("count", state["count"] + 1)}
        if "key" in state:
            after["key"] = others.get("key", state["key"])
        if "ema" in state:
            after["ema"] = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state["ema"], new)
        if "first" in state:
            after["first"] = state["first"] * 0.5 + 0.1 * jnp.mean(batch["mask"])
        return after, {name: value for name, value in metrics.items() if name not in ("key", "count")}

    device_batch = jax.tree.map(jnp.asarray, batch)

    def make_state() -> Any:
        fresh = jax.tree.map(jnp.array, params)
        state = {"params": fresh, "opt": optimizer.init(fresh), "count": jnp.int32(0)}
        if where_key == "raw key in the state":
            state["key"] = jax.random.key_data(jax.random.key(11))
        elif where_key != "key from a counter":
            state["key"] = jax.random.key(11)
        if kept == "ema of the same arrays":
            state["ema"] = fresh
        elif kept == "optimizer state in the host":
            host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
            state["opt"] = jax.tree.map(lambda v: jax.device_put(v, host), state["opt"])
        elif kept == "batch also in the state":
            state["first"] = device_batch["mask"]
        return state

    return RandomStep(
        step=step, make_state=make_state, batch=device_batch, words=tuple(choices.words), log=log,
        effect=effect.split()[-1] if effect != "-" else None, feeds_back=update != "gradients returned",
    )  # fmt: skip


def _norm(tree: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))


def _wide(kind: str) -> bool:
    return kind not in ("norm", "loop", "weight noise")


OPTIONS: Sequence[Mapping[str, Any]] = (
    {},
    {"microbatches": 2},
    {"microbatches": 4, "mesh": {"data": 2, "model": 4}},
    {"stages": 2, "microbatches": 1},
    {"stages": 2, "microbatches": 4},
    {"stages": 3, "submeshes": (2, 2, 4), "microbatches": 2},
    {"preset": "zero(stage=3)", "microbatches": 2},
    {"preset": "megatron(tp=2, pp=2)", "microbatches": 4},
    {"mesh": {"data": 2, "model": 4}, "zero": 1},
    {"stages": 2, "schedule": "gpipe", "microbatches": 2, "remat": "layer"},
)  # fmt: skip


def options_of(seed: int) -> Mapping[str, Any]:
    """How the step of a seed is parallelised: any step meets any of these."""
    return random.Random(f"options {seed}").choice(OPTIONS)


def outcome(seed: int, steps: int = 3) -> str:
    """Run the step of a seed by a plan and on one device.

    Returns "equal", or "refused: " with the words of the refusal.

    Raises:
      AssertionError: if a result, or what callbacks were told, is not that of one device.
    """
    one, options = random_step(seed), options_of(seed)
    truth, wanted = _run(jax.jit(one.step), one, steps)
    parallel = mw.parallelize(one.step, **options)
    try:
        found, told = _run(parallel, one, steps)
    except mw.PlanError as error:
        return f"refused: {error}"
    planned = parallel.plan(one.make_state(), one.batch)
    _compare(found, truth)
    count = planned.microbatches if one.effect == "loss" else 1
    assert len(told) == count * len(wanted), f"callbacks ran {len(told)} times, {len(wanted)} on one device"
    if count == 1:
        np.testing.assert_allclose(told, wanted, rtol=1e-3, atol=1e-5)
    return "equal"


def _run(step: Callable[..., Any], one: RandomStep, steps: int) -> tuple[Any, list[Any]]:
    """What some steps return at the end, and what callbacks were told."""
    one.log.clear()
    state, result = one.make_state(), None
    for _ in range(steps if one.feeds_back else 1):
        result = step(state, one.batch)
        if one.feeds_back:
            state = result[0]
    jax.block_until_ready(result)
    jax.effects_barrier()
    return result, list(one.log)


def _compare(found: Any, truth: Any, rtol: float = 2e-3, atol: float = 1e-5) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(truth)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(truth), strict=True):
        name = jax.tree_util.keystr(path)
        assert isinstance(a, jax.Array), f"{name} is {type(a).__name__}"
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert a.sharding.memory_kind == b.sharding.memory_kind, f"{name} lies in {a.sharding.memory_kind}"
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * np.max(np.abs(y), initial=0.0) + atol, err_msg=name)


def main() -> None:
    """Run many seeds; print how they ended as JSON."""
    import argparse
    import json
    import sys
    import traceback

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    arguments = parser.parse_args()
    ends: Counter[str] = Counter()
    failed = []
    for seed in range(arguments.first, arguments.first + arguments.count):
        try:
            end = outcome(seed)
        except Exception as error:  # each is a finding, whatever it is
            end = "failed"
            where = traceback.extract_tb(error.__traceback__)[-1]
            failed.append(
                {
                    "seed": seed,
                    "what": f"{type(error).__name__}: {error}"[:400],
                    "at": f"{where.filename.split('/')[-1]}:{where.lineno}",
                    "step": random_step(seed).words,
                    "options": repr(options_of(seed)),
                }
            )
            print(json.dumps(failed[-1]), file=sys.stderr, flush=True)
        ends[end] += 1
        jax.clear_caches()
    refusals = sum(count for end, count in ends.items() if end.startswith("refused"))
    print(
        json.dumps(
            {
                "equal": ends["equal"],
                "refused": refusals,
                "failed": len(failed),
                "refusals": {k[:300]: v for k, v in ends.most_common() if k.startswith("refused")},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    import os

    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    main()

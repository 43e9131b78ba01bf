"""Predicted beside compiled, for steps that run by a plan: peak memory, and the collectives of every kind.

Run ``python benchmarks/memory_plans.py [--only NAME] [--variant NAME]``: prints one JSON object with a row per model
and variant of planning (predicted and compiled peak and their ratio; the kinds of collectives whose predicted and
compiled bytes differ), the versions, and the command that repeats it. Nothing is executed, only planned, traced
and compiled for eight virtual CPU devices.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import zoo
from meshwright._jax.grad import value_and_grad
from meshwright._jax.hlo import CompiledFacts, read_compiled
from meshwright.errors import PlanError
from meshwright.plan import Collective
from meshwright.planning.plan_for import plan_for
from meshwright.runtime.step import PlannedStep

Tree = Any
Case = tuple[Callable[..., Any], tuple[Tree, ...]]
Struct = jax.ShapeDtypeStruct

_SCALAR_BYTES = 8  # an operand of a collective up to this size is not worth predicting

VARIANTS: dict[str, dict[str, Any]] = {
    "free": {},
    "zero1": {"zero": 1},
    "zero3": {"zero": 3},
    "remat": {"remat": "layer"},
    "microbatches2": {"microbatches": 2},
    "microbatches4": {"microbatches": 4},
    "zero3_microbatches2": {"zero": 3, "microbatches": 2},
    "zero3_remat_microbatches4": {"zero": 3, "remat": "layer", "microbatches": 4},
    "mesh2x4": {"mesh": (2, 4)},
}
_NEEDS_MARKER = ("microbatches2", "microbatches4", "zero3_microbatches2", "zero3_remat_microbatches4", "zero1")


def _zoo(name: str, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        target = zoo.build(name, **options)
        return target.step, (target.example_state, target.example_batch)

    return make


def _mlp() -> Case:
    target = zoo.mlp(width=256, layers=6, batch=2048)
    return target.step, (target.example_state, target.example_batch)


def _bert() -> Case:
    target = zoo.bert_layers(hidden=128, sequence=64, batch=64)
    return target.step, (target.example_state, target.example_batch)


def _dropout(rate: float, key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def _normalised(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _dropout_transformer() -> Case:
    """Two layers with dropout on attention weights and on both branches; the step's key is an argument."""
    batch, length, width, heads = 64, 32, 64, 4
    layer = {"qkv": Struct((width, 3 * width), jnp.float32), "out": Struct((width, width), jnp.float32)}
    layer |= {"up": Struct((width, 4 * width), jnp.float32), "down": Struct((4 * width, width), jnp.float32)}

    def attention(p: Tree, x: jax.Array, key: jax.Array) -> jax.Array:
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], heads, -1), 3, axis=-1)
        weights = jax.nn.softmax(jnp.einsum("bsnd,btnd->bnst", q, k) / q.shape[-1] ** 0.5)
        return jnp.einsum("bnst,btnd->bsnd", _dropout(0.1, key, weights), v).reshape(x.shape) @ p["out"]

    def loss(params: Tree, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        for index, p in enumerate(params):
            keys = jax.random.split(jax.random.fold_in(key, index), 3)
            x = x + _dropout(0.1, keys[0], attention(p, _normalised(x), keys[1]))
            x = x + _dropout(0.1, keys[2], jax.nn.gelu(_normalised(x) @ p["up"]) @ p["down"])
        return jnp.mean((x - y) ** 2)

    def step(params: Tree, x: jax.Array, y: jax.Array, key: jax.Array) -> tuple[Tree, jax.Array]:
        value, grads = value_and_grad(loss)(params, x, y, key)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    activations = Struct((batch, length, width), jnp.float32)
    return step, ([layer, layer], activations, activations, jax.eval_shape(lambda: jax.random.key(0)))


def _plain_grad() -> Case:
    """A perceptron whose step calls `jax.grad`: planned as one program, forward, backward and update."""
    params = [Struct((256, 256), jnp.float32)] * 4

    def loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - y) ** 2)

    def step(params: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array]:
        grads = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), sum(jnp.sum(g * g) for g in grads)

    batch = Struct((1024, 256), jnp.float32)
    return step, (params, batch, batch)


CASES: dict[str, Callable[[], Case]] = {
    "gpt": _zoo("gpt-tiny", global_batch=64),
    "gpt_bfloat16": _zoo("gpt-tiny", global_batch=64, dtype="bfloat16"),
    "llama": _zoo("llama-tiny", global_batch=64),
    "moe": _zoo("moe-tiny", global_batch=64),
    "wresnet": _zoo("wresnet-tiny", global_batch=32),
    "unet": _zoo("unet-tiny", global_batch=64),
    "mlp": _mlp,
    "bert": _bert,
    "dropout": _dropout_transformer,
    "plain_grad": _plain_grad,
}


def collective_differences(predicted: Mapping[str, Collective], compiled: CompiledFacts) -> dict[str, dict[str, Any]]:
    """By kind, numbers and bytes where the bytes differ by more than one per cent; scalars alone are left out.

    Numbers are shown, not compared: newer XLA joins arrays into one before it moves them, and the loss travels along.
    """
    found: dict[str, tuple[int, float]] = {}
    for collective in compiled.collectives:
        if collective.bytes > _SCALAR_BYTES * collective.operands:
            count, size = found.get(collective.kind, (0, 0.0))
            runs = collective.count
            # XLA's CPU backend hands an all-to-all over in as many blocks as there are devices.
            arrays = 1 if collective.kind == "all_to_all" else collective.operands
            found[collective.kind] = (count + runs * arrays, size + runs * collective.bytes)
    rows = {}
    for kind in sorted({*found, *predicted}):
        count, size = found.get(kind, (0, 0.0))
        ours = predicted.get(kind, Collective(kind=kind, count=0, bytes=0.0))
        if abs(ours.bytes - size) > 0.01 * size:
            rows[kind] = {
                "predicted_count": ours.count,
                "compiled_count": count,
                "predicted_bytes": ours.bytes,
                "compiled_bytes": size,
            }
    return rows


def measure(case: Case, options: Mapping[str, Any]) -> dict[str, Any]:
    """One row."""
    started = time.perf_counter()
    step, arguments = case
    planning = plan_for(step, arguments, cluster="local", **options)
    planned_seconds = time.perf_counter() - started
    predicted = planning.plan.stages[0].memory.total
    planned = PlannedStep(planning.program, planning.plan, jax.devices()[: planning.plan.num_devices])
    compiled = read_compiled(planned.lower().compile())
    return {
        "predicted_peak_bytes": round(predicted),
        "compiled_peak_bytes": compiled.peak_bytes,
        "peak_ratio": round(predicted / compiled.peak_bytes, 3),
        "collectives": sum(c.count * c.operands for c in compiled.collectives),
        "collectives_that_differ": collective_differences(planning.plan.collectives(), compiled),
        "plan_seconds": round(planned_seconds, 2),
        "seconds": round(time.perf_counter() - started, 2),
    }


def main() -> None:
    """Prints the result as JSON; progress goes to standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only models of this name; several with commas")
    parser.add_argument("--variant", default="", help="only these variants, with commas between")
    asked = parser.parse_args()
    rows: dict[str, Any] = {}
    for name, make in CASES.items():
        for variant, options in VARIANTS.items():
            if (asked.only and name not in asked.only.split(",")) or (
                name == "plain_grad" and variant in _NEEDS_MARKER
            ):
                continue
            if asked.variant and variant not in asked.variant.split(","):
                continue
            try:
                row = measure(make(), options)
            except PlanError as error:
                row = {"refused": str(error)}
            rows[f"{name}/{variant}"] = row
            print(f"{name}/{variant}: {json.dumps(row)}", file=sys.stderr, flush=True)
    result = {
        "benchmark": "memory_plans",
        "command": " ".join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "rows": rows,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

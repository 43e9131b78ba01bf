"""Predicted beside compiled peak memory, on training steps of the shapes the literature uses.

Run ``python benchmarks/memory.py [--only NAME]``: prints one JSON object with a row per program (predicted and compiled
bytes, their ratio), the versions, and the command that repeats it. Nothing is executed, only traced and compiled.
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from meshwright._jax.hlo import read_compiled
from meshwright._jax.liveness_adapter import dataflow_of
from meshwright.memory.liveness import predict

Tree = Any
Struct = jax.ShapeDtypeStruct


def _spec(*dims: int, dtype: Any = jnp.float32) -> Struct:
    return Struct(dims, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A step to compile: its function, abstract arguments and the donated ones."""

    step: Callable[..., Any]
    arguments: tuple[Tree, ...]
    donated: tuple[int, ...]


def _sgd(loss: Callable[..., jax.Array], rate: float = 1e-2) -> Callable[..., Any]:
    def step(params: Tree, *batch: jax.Array) -> tuple[Tree, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    return step


def _adam(loss: Callable[..., jax.Array], rate: float = 1e-3) -> Callable[..., Any]:
    def step(state: tuple[Tree, Tree, Tree, jax.Array], *batch: jax.Array) -> tuple[Any, jax.Array]:
        params, first, second, count = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        count = count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)
        scale = jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        params = jax.tree.map(lambda p, m, v: p - rate * scale * m / (jnp.sqrt(v) + 1e-8), params, first, second)
        return (params, first, second, count), value

    return step


def _adam_state(params: Tree) -> tuple[Tree, Tree, Tree, Struct]:
    return params, params, params, _spec()


def _mlp_loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array, y: jax.Array) -> jax.Array:
    for weight, bias in params[:-1]:
        x = jax.nn.gelu(x @ weight + bias)
    weight, bias = params[-1]
    return jnp.mean((x @ weight + bias - y) ** 2)


def _mlp(batch: int, width: int, depth: int) -> tuple[Tree, tuple[Struct, ...]]:
    params = [(_spec(width, width), _spec(width)) for _ in range(depth)]
    return params, (_spec(batch, width), _spec(batch, width))


def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logp, labels[..., None], axis=-1).mean()


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bsnd,btnd->bnst", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9).astype(jnp.float32), axis=-1).astype(v.dtype)
    return jnp.einsum("bnst,btnd->bsnd", weights, v)


def _gpt_block(p: Tree, x: jax.Array, heads: int, psum: Callable[[jax.Array], jax.Array] = lambda a: a) -> jax.Array:
    batch, length, _ = x.shape
    h = _layer_norm(x, p["ln1"], p["ln1b"])
    q, k, v = (jnp.einsum("bsd,de->bse", h, p[name]).reshape(batch, length, heads, -1) for name in ("wq", "wk", "wv"))
    x = x + psum(_attention(q, k, v).reshape(batch, length, -1) @ p["wo"])
    h = _layer_norm(x, p["ln2"], p["ln2b"])
    return x + psum(jax.nn.gelu(h @ p["up"] + p["upb"]) @ p["down"]) + p["downb"]


def _gpt_loss(heads: int, remat: bool, params: Tree, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    x = params["embed"][tokens] + params["position"]
    block = partial(_gpt_block, heads=heads)
    for layer in params["layers"]:
        x = (jax.checkpoint(block) if remat else block)(layer, x)
    return _cross_entropy(_layer_norm(x, params["ln"], params["lnb"]) @ params["head"], labels)


def _gpt_layer(width: int, hidden: int, dtype: Any = jnp.float32, inner: int | None = None) -> Tree:
    spec = partial(_spec, dtype=dtype)
    inner = inner or width
    return {
        **{name: spec(width) for name in ("ln1", "ln1b", "ln2", "ln2b", "downb")},
        **{name: spec(width, inner) for name in ("wq", "wk", "wv")},
        "wo": spec(inner, width),
        "up": spec(width, hidden),
        "upb": spec(hidden),
        "down": spec(hidden, width),
    }


def _gpt(batch: int, length: int, width: int, layers: int, vocab: int, dtype: Any = jnp.float32) -> tuple[Tree, Any]:
    spec = partial(_spec, dtype=dtype)
    params = {
        "embed": spec(vocab, width),
        "position": spec(length, width),
        "head": spec(width, vocab),
        "ln": spec(width),
        "lnb": spec(width),
        "layers": [_gpt_layer(width, 4 * width, dtype) for _ in range(layers)],
    }
    return params, (_spec(batch, length, dtype=jnp.int32), _spec(batch, length, dtype=jnp.int32))


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _rotate(x: jax.Array) -> jax.Array:
    length, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(length)[:, None] * (10000.0 ** (-jnp.arange(half) / half))
    sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _llama_block(p: Tree, x: jax.Array, heads: int) -> jax.Array:
    batch, length, _ = x.shape
    h = _rms_norm(x, p["n1"])
    q, k, v = ((h @ p[name]).reshape(batch, length, heads, -1) for name in ("wq", "wk", "wv"))
    x = x + _attention(_rotate(q), _rotate(k), v).reshape(batch, length, -1) @ p["wo"]
    h = _rms_norm(x, p["n2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def _llama_loss(heads: int, remat: bool, params: Tree, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    block = partial(_llama_block, heads=heads)
    block = jax.checkpoint(block) if remat else block
    x = params["embed"][tokens]
    x, _ = lax.scan(lambda c, p: (block(p, c), None), x, params["layers"])
    return _cross_entropy(_rms_norm(x, params["norm"]) @ params["head"], labels)


def _llama(batch: int, length: int, width: int, layers: int, vocab: int) -> tuple[Tree, Any]:
    hidden = width * 8 // 3 // 8 * 8
    params = {
        "embed": _spec(vocab, width),
        "head": _spec(width, vocab),
        "norm": _spec(width),
        "layers": {
            **{name: _spec(layers, width) for name in ("n1", "n2")},
            **{name: _spec(layers, width, width) for name in ("wq", "wk", "wv", "wo")},
            **{name: _spec(layers, width, hidden) for name in ("gate", "up")},
            "down": _spec(layers, hidden, width),
        },
    }
    return params, (_spec(batch, length, dtype=jnp.int32), _spec(batch, length, dtype=jnp.int32))


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _batch_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def _resnet_loss(params: Tree, x: jax.Array, labels: jax.Array) -> jax.Array:
    x = jax.nn.relu(_batch_norm(_conv(x, params["stem"]), *params["stem_bn"]))
    for block in params["blocks"]:
        stride = 1 if block["k1"].shape[2] == block["k1"].shape[3] else 2
        h = jax.nn.relu(_batch_norm(_conv(x, block["k1"], stride), *block["bn1"]))
        h = _batch_norm(_conv(h, block["k2"]), *block["bn2"])
        x = jax.nn.relu(h + (_conv(x, block["skip"], stride) if "skip" in block else x))
    return _cross_entropy(x.mean((1, 2)) @ params["head"], labels)


def _resnet(batch: int, side: int, width: int, stages: int) -> tuple[Tree, Any]:
    blocks, channels = [], width
    for stage in range(stages):
        for repeat in range(2):
            out = channels * 2 if stage and not repeat else channels
            block = {
                "k1": _spec(3, 3, channels, out),
                "k2": _spec(3, 3, out, out),
                "bn1": (_spec(out), _spec(out)),
                "bn2": (_spec(out), _spec(out)),
            }
            if out != channels:
                block["skip"] = _spec(1, 1, channels, out)
            blocks.append(block)
            channels = out
    params = {
        "stem": _spec(3, 3, 3, width),
        "stem_bn": (_spec(width), _spec(width)),
        "blocks": blocks,
        "head": _spec(channels, 100),
    }
    return params, (_spec(batch, side, side, 3), _spec(batch, dtype=jnp.int32))


def _unet_loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    skips = []
    for kernel in params["down"]:
        x = jax.nn.silu(_conv(x, kernel))
        skips.append(x)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    x = jax.nn.silu(_conv(x, params["middle"]))
    for kernel, skip in zip(params["up"], reversed(skips), strict=True):
        x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        x = jax.nn.silu(_conv(jnp.concatenate([x, skip], axis=-1), kernel))
    return jnp.mean((_conv(x, params["out"]) - y) ** 2)


def _unet(batch: int, side: int, width: int) -> tuple[Tree, Any]:
    params = {
        "down": [_spec(3, 3, 3, width), _spec(3, 3, width, 2 * width), _spec(3, 3, 2 * width, 4 * width)],
        "middle": _spec(3, 3, 4 * width, 4 * width),
        "up": [_spec(3, 3, 8 * width, 2 * width), _spec(3, 3, 4 * width, width), _spec(3, 3, 2 * width, width)],
        "out": _spec(3, 3, width, 3),
    }
    return params, (_spec(batch, side, side, 3), _spec(batch, side, side, 3))


def _sharded(loss: Callable[..., jax.Array], params: Tree, batch: Any, axis: str, rate: float = 1e-2) -> Program:
    """Data parallelism written out: every device takes a slice of the batch and the gradients are summed."""
    mesh = jax.make_mesh((8,), (axis,), axis_types=(AxisType.Auto,))

    def step(params: Tree, *batch: jax.Array) -> tuple[Tree, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        grads = jax.tree.map(lambda g: lax.psum(g, axis), grads)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), lax.pmean(value, axis)

    step = jax.shard_map(step, mesh=mesh, in_specs=(P(), *(P(axis) for _ in batch)), out_specs=P(), check_vma=False)
    wide = tuple(Struct((leaf.shape[0] * 8, *leaf.shape[1:]), leaf.dtype) for leaf in batch)
    return Program(step=step, arguments=(params, *wide), donated=(0,))


def _tensor_parallel(batch: int, length: int, width: int, layers: int, heads: int) -> Program:
    """Megatron's split of a block over eight devices, with the sums over them in the forward and the backward pass."""
    mesh = jax.make_mesh((8,), ("y",), axis_types=(AxisType.Auto,))

    @jax.custom_vjp
    def enter(x: jax.Array) -> jax.Array:
        return x

    enter.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "y"),))

    @jax.custom_vjp
    def leave(x: jax.Array) -> jax.Array:
        return lax.psum(x, "y")

    leave.defvjp(lambda x: (lax.psum(x, "y"), None), lambda _, g: (g,))

    def loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        for layer in params:
            x = _gpt_block(layer, enter(x), heads // 8, leave)
        return jnp.mean((x - y) ** 2)

    layer = _gpt_layer(width, 4 * width)
    names = {"wq": P(None, "y"), "wk": P(None, "y"), "wv": P(None, "y"), "wo": P("y"), "up": P(None, "y")}
    specs = {name: {**names, "upb": P("y"), "down": P("y")}.get(name, P()) for name in layer}
    step = jax.shard_map(
        _sgd(loss),
        mesh=mesh,
        in_specs=([specs] * layers, P(), P()),
        out_specs=([specs] * layers, P()),
        check_vma=False,
    )
    return Program(
        step=step,
        arguments=([layer] * layers, _spec(batch, length, width), _spec(batch, length, width)),
        donated=(0,),
    )


def _zero3(batch: int, width: int, depth: int) -> Program:
    """Weights stored split over eight devices, gathered at use, their gradients reduce-scattered."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        whole = [(lax.all_gather(w, "x", axis=0, tiled=True), b) for w, b in params]
        return _mlp_loss(whole, x, y)

    params, data = _mlp(batch, width, depth)
    specs = [(P("x"), P())] * depth
    step = jax.shard_map(
        _sgd(loss), mesh=mesh, in_specs=(specs, P("x"), P("x")), out_specs=(specs, P()), check_vma=False
    )
    wide = tuple(_spec(leaf.shape[0] * 8, *leaf.shape[1:]) for leaf in data)
    return Program(step=step, arguments=(params, *wide), donated=(0,))


def _plain(step: Callable[..., Any], params: Tree, batch: tuple[Struct, ...], donate: bool = True) -> Program:
    return Program(step=step, arguments=(params, *batch), donated=(0,) if donate else ())


def suite() -> dict[str, Callable[[], Program]]:
    """The programs by name; each is built only when asked for."""

    def sgd(loss: Callable[..., jax.Array], model: tuple[Tree, Any], donate: bool = True) -> Program:
        return _plain(_sgd(loss), *model, donate)

    def adam(loss: Callable[..., jax.Array], model: tuple[Tree, Any]) -> Program:
        return _plain(_adam(loss), _adam_state(model[0]), model[1])

    gpt, llama = partial(_gpt_loss, 8, False), partial(_llama_loss, 8, False)
    return {
        "mlp_wide_batch": lambda: sgd(_mlp_loss, _mlp(4096, 512, 6)),
        "mlp_wide_batch_kept": lambda: sgd(_mlp_loss, _mlp(4096, 512, 6), donate=False),
        "mlp_adam": lambda: adam(_mlp_loss, _mlp(1024, 1024, 6)),
        "gpt2_short": lambda: sgd(gpt, _gpt(8, 128, 256, 2, 1024)),
        "gpt4_long": lambda: sgd(gpt, _gpt(4, 512, 256, 4, 1024)),
        "gpt4_vocab": lambda: sgd(gpt, _gpt(8, 128, 256, 4, 16384)),
        "gpt4_adam": lambda: adam(gpt, _gpt(8, 256, 512, 4, 4096)),
        "gpt4_bfloat16": lambda: sgd(gpt, _gpt(8, 256, 256, 4, 1024, jnp.bfloat16)),
        "gpt4_remat": lambda: sgd(partial(_gpt_loss, 8, True), _gpt(8, 256, 256, 4, 1024)),
        "llama_scan8": lambda: sgd(llama, _llama(4, 256, 256, 8, 1024)),
        "llama_scan8_adam": lambda: adam(llama, _llama(4, 256, 256, 8, 1024)),
        "llama_scan8_remat": lambda: sgd(partial(_llama_loss, 8, True), _llama(4, 256, 256, 8, 1024)),
        "resnet_bn": lambda: sgd(_resnet_loss, _resnet(32, 32, 32, 3)),
        "resnet_bn_adam": lambda: adam(_resnet_loss, _resnet(8, 64, 32, 3)),
        "unet": lambda: sgd(_unet_loss, _unet(8, 64, 32)),
        "mlp_data_parallel": lambda: _sharded(_mlp_loss, *_mlp(2048, 512, 6), "x"),
        "gpt4_data_parallel": lambda: _sharded(gpt, *_gpt(4, 256, 256, 4, 1024), "x"),
        "gpt4_tensor_parallel": lambda: _tensor_parallel(8, 256, 512, 4, 16),
        "mlp_zero3": lambda: _zero3(1024, 1024, 6),
    }


def measure(program: Program) -> dict[str, Any]:
    """One row: what is predicted from the traced step and what the compiler's own analysis says."""
    started = time.perf_counter()
    predicted = predict(dataflow_of(program.step, *program.arguments, donate_argnums=program.donated))
    predicted_seconds = time.perf_counter() - started
    jitted = jax.jit(program.step, donate_argnums=program.donated)
    compiled = read_compiled(jitted.lower(*program.arguments).compile())
    return {
        "predicted_temp_bytes": predicted.temp_bytes,
        "compiled_temp_bytes": compiled.temp_bytes,
        "predicted_peak_bytes": predicted.peak_bytes,
        "compiled_peak_bytes": compiled.peak_bytes,
        "temp_ratio": round(predicted.temp_bytes / compiled.temp_bytes, 3),
        "peak_ratio": round(predicted.peak_bytes / compiled.peak_bytes, 3),
        "predicted_seconds": round(predicted_seconds, 3),
    }


def main() -> None:
    """Prints the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="run only programs whose name contains this")
    chosen = parser.parse_args().only or ""
    rows = {name: measure(make()) for name, make in suite().items() if chosen in name}
    result = {
        "benchmark": "memory",
        "command": " ".join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "rows": rows,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

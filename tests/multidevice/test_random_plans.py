"""Random plans of small programs: every operator by an algorithm drawn at random, results and gradients of one device.

No search would choose such plans; they meet conversions, settled values, loops and rematerialised segments in
combinations that good plans leave out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn
from jax.sharding import Mesh, PartitionSpec
from rule_cases import dense, integers, normal

from meshwright._jax.jaxpr import ClosedJaxpr, eliminate_dead_code, inline, open_jaxpr
from meshwright.lowering.evaluate import ShardedProgram
from meshwright.program.build import build_graph
from meshwright.program.graph import Graph
from meshwright.program.rules import Rules
from meshwright.program.segments import Segments
from meshwright.sharding import Algorithm, Spec, algorithms, convert

TOLERANCE = 1e-4
MESHES = ((8,), (2, 4), (2, 2, 2))


def perceptron(p: Any, x: Any, key: Any) -> Any:
    h = nn.gelu(x @ p["in"] + p["bias"])
    h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0.0)
    scale = 1 + 0.1 * jax.random.normal(jax.random.fold_in(key, 1), h.shape)
    y = (h * scale) @ p["out"]
    return jnp.mean((y - jnp.roll(x, 1, axis=1)) ** 2), (jnp.argmax(y, 1), jnp.max(h, 1))


def attention(p: Any, tokens: Any) -> Any:
    x = jnp.take(p["embedding"], tokens, axis=0) + p["position"][None, : tokens.shape[1]]
    q, k, v = jnp.einsum("btd,cdhk->cbthk", x, p["qkv"])
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / 2.0
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    weights = nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    x = x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, p["o"])
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    logits = x @ p["embedding"].T
    ours = jnp.take_along_axis(nn.log_softmax(logits), jnp.roll(tokens, 1, 1)[..., None], axis=-1)
    return -jnp.mean(ours), (jnp.sum(weights, 2),)


def layers(p: Any, x: Any) -> Any:
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def layer(h: Any, w: Any) -> Any:
        h = h + jnp.tanh(h @ w["a"]) @ w["b"] * p["scale"]
        return h, jnp.mean(h, -1)

    h, means = lax.scan(layer, x, p["layers"], unroll=1)
    _, sums = lax.scan(lambda c, r: (c + r, c * 2), jnp.zeros(x.shape[0]), means, reverse=True)
    return jnp.mean(jnp.sin(h)) + jnp.mean(sums**2), (means,)


def experts(p: Any, x: Any) -> Any:
    gates = nn.softmax(x @ p["router"])
    chosen, which = lax.top_k(gates, 2)
    mask = nn.one_hot(which, gates.shape[-1])
    position = (jnp.cumsum(mask.sum(1), axis=0) * mask.sum(1) - 1).astype(jnp.int32)
    combine = jnp.einsum("sk,ske,sec->sec", chosen, mask, nn.one_hot(position, 8))
    inside = jnp.einsum("sec,sd->ecd", (combine > 0).astype(x.dtype), x)
    made = jnp.einsum("ecf,efd->ecd", nn.relu(jnp.einsum("ecd,edf->ecf", inside, p["w"])), p["v"])
    y = jnp.einsum("sec,ecd->sd", combine, made)
    return jnp.mean((y - x) ** 2) + 0.1 * jnp.mean(gates.mean(0) * mask.sum((0, 1))), (which,)


def images(p: Any, x: Any) -> Any:
    conv = partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = conv(x, p["stem"], window_strides=(2, 2), padding="SAME")
    mean, var = h.mean((0, 1, 2)), h.var((0, 1, 2))
    h = nn.relu((h - mean) * lax.rsqrt(var + 1e-5) * p["scale"])
    h = h + conv(h, p["same"], window_strides=(1, 1), padding="SAME")
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = jnp.concatenate([h, lax.rev(h, (1,))], axis=-1)
    return jnp.mean((h.mean((1, 2)) @ p["head"]) ** 2), (mean,)


def control_flow(p: Any, x: Any, flag: Any, index: Any) -> Any:
    h = dense(x, p["w"], p["b"])
    h = lax.cond(flag, lambda: nn.silu(h) * p["b"], lambda: h + 1)
    steps = lax.while_loop(lambda c: jnp.sum(c) < 99, lambda c: c * 2, jnp.abs(lax.stop_gradient(h)) + 0.5)
    h = h * steps / (1 + steps)
    h = lax.switch(index, [jnp.sin, jnp.tanh, nn.softplus], h)
    h = lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c @ p["w"].T @ p["w"]), h)
    table = jnp.zeros((8, 8)).at[jnp.arange(8) // 2].add(h)
    return jnp.mean(nn.logsumexp(table * 3, axis=1) ** 2), (steps,)


PROGRAMS: dict[str, tuple[Callable[..., Any], Any, tuple[Any, ...]]] = {
    "perceptron": (
        perceptron, {"in": normal(8, 16), "bias": normal(16), "out": normal(16, 8)}, (normal(8, 8), jax.random.key(5)),
    ),
    "attention": (
        attention,
        {"embedding": normal(16, 8), "position": normal(8, 8), "qkv": normal(3, 8, 2, 4), "o": normal(2, 4, 8)},
        (integers(16, 4, 8),),
    ),
    "layers": (
        layers, {"layers": {"a": normal(2, 8, 8), "b": normal(2, 8, 8)}, "scale": normal(8)}, (normal(8, 8),),
    ),
    "experts": (experts, {"router": normal(8, 4), "w": normal(4, 8, 8), "v": normal(4, 8, 8)}, (normal(16, 8),)),
    "images": (
        images,
        {"stem": normal(3, 3, 4, 8), "scale": normal(8), "same": normal(3, 3, 8, 8), "head": normal(16, 4)},
        (normal(8, 8, 8, 4),),
    ),
    "control flow": (
        control_flow, {"w": normal(8, 8), "b": normal(8)}, (normal(8, 8), jnp.bool_(True), jnp.int32(1)),
    ),
}  # fmt: skip


def drawn(graph: Graph, sizes: dict[str, int], draw: random.Random) -> tuple[list[Algorithm], dict[int, Spec]]:
    """An algorithm for every operator, and for some values a spec that all their readers start from."""
    chosen = []
    for operator in graph.operators:
        moving = [v is not None and graph.values[v].differentiated for v in operator.operands]
        options = algorithms(operator.rule, sizes, moving, combines_at_once=operator.combine in ("max", "min"))
        chosen.append(draw.choice(options))
    settled = {}
    for value in graph.values:
        readers = graph.consumers.get(value.index, ())
        if not value.constant and len(readers) >= 2 and draw.random() < 0.5:
            specs = [chosen[reader].operands[position] for reader, position in readers]
            start = draw.choice(specs)
            if all(convert(start, spec) is not None for spec in specs):
                settled[value.index] = start
    return chosen, settled


def segments_of(closed: ClosedJaxpr, draw: random.Random) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """A run of the program's equations to be rematerialised."""
    first, last = sorted(draw.sample(range(len(open_jaxpr(closed).eqns) + 1), 2))
    return {(): [(first, last)]}


def input_specs(graph: Graph, chosen: Sequence[Algorithm], draw: random.Random) -> list[Spec]:
    specs = []
    for value in graph.inputs:
        readers = graph.consumers.get(value, ())
        spec = Spec.replicated(len(graph.values[value].shape))
        if readers and draw.random() < 0.7:
            reader, position = draw.choice(readers)
            spec = Spec(chosen[reader].operands[position].dims)
        specs.append(spec)
    return specs


def partition(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in spec.dims))


def assert_plan_agrees(name: str, shape: tuple[int, ...], seed: int) -> None:
    loss, params, batch = PROGRAMS[name]
    leaves, tree = jax.tree.flatten(params)
    count = len(leaves)

    def flat(*args: Any) -> tuple[Any, ...]:
        value, aux = loss(jax.tree.unflatten(tree, args[:count]), *args[count:])
        return value, *aux

    closed = eliminate_dead_code(inline(jax.make_jaxpr(flat)(*leaves, *batch)))
    rules = Rules()
    graph = build_graph(closed, rules, parameters=range(count), losses=[0])
    draw = random.Random(f"{name} {shape} {seed}")
    sizes = dict(zip("xyz", shape, strict=False))
    chosen, settled = drawn(graph, sizes, draw)
    program = ShardedProgram(closed, graph, rules, chosen, settled, sizes, Segments(segments_of(closed, draw)))
    specs = input_specs(graph, chosen, draw)
    outs = [Spec.replicated(len(v.aval.shape)) for v in open_jaxpr(closed).outvars]

    def local(*shards: Any) -> Any:
        def run(*moving: Any) -> tuple[Any, Any]:
            value, *aux = program([*moving, *shards[count:]], specs, outs)
            return value, aux

        return jax.value_and_grad(run, argnums=tuple(range(count)), has_aux=True)(*shards[:count])

    mesh = Mesh(np.array(jax.devices()).reshape(shape), tuple(sizes))
    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(partition(s) for s in specs),
        out_specs=((PartitionSpec(), [PartitionSpec()] * (len(outs) - 1)), tuple(partition(s) for s in specs[:count])),
        check_vma=False,
    )
    found = jax.tree.leaves(hurried(step, *leaves, *batch))
    expected = jax.tree.leaves(truth(name))
    for a, b in zip(found, expected, strict=True):
        difference = np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)))
        assert difference <= TOLERANCE * max(np.max(np.abs(b)), 1e-3)


def hurried(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` compiled without optimisation, which takes longer than the one run it is for."""
    return jax.jit(function).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})(*args)


_TRUTHS: dict[str, Any] = {}


def truth(name: str) -> Any:
    """Loss, auxiliary results and gradients on one device, of each program once."""
    if name not in _TRUTHS:
        loss, params, batch = PROGRAMS[name]
        (value, aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *batch)
        _TRUTHS[name] = ((value, list(aux)), grads)
    return _TRUTHS[name]


# Every program, and every mesh twice.
QUICK = [(name, MESHES[number % len(MESHES)]) for number, name in enumerate(PROGRAMS)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[] if (name, shape) in QUICK else pytest.mark.slow)
        for name in PROGRAMS
        for shape in MESHES
    ],
    ids=str,
)
def test_a_random_plan_gives_the_results_and_gradients_of_one_device(name: str, shape: tuple[int, ...]) -> None:
    assert_plan_agrees(name, shape, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_more_random_plans(name: str, shape: tuple[int, ...], seed: int) -> None:
    assert_plan_agrees(name, shape, seed)

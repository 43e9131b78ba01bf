"""A program with padded dims computes what it did: values and gradients, whatever is behind the ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from jax import lax

import meshwright as mw
from meshwright._jax.jaxpr import evaluate, open_jaxpr
from meshwright.program.padded_dims import PaddedDim
from meshwright.program.trace import Program, trace_program

Loss = Callable[[Any, Any], Any]


def programs(loss: Loss, p: Any, x: Any, padded: list[PaddedDim]) -> tuple[Program, Program]:
    """The core of a step as it is, and padded."""

    def step(p: Any, x: Any) -> Any:
        return mw.value_and_grad(loss)(p, x)

    plain, longer = trace_program(step, (p, x)), trace_program(step, (p, x), padded=padded)
    assert plain.fingerprint == longer.fingerprint
    return plain, longer


def outcome(program: Program, p: Any, x: Any) -> tuple[Any, list[Any]]:
    """Value and gradients of a core."""
    leaves = [*jax.tree.leaves(p), *jax.tree.leaves(x)]
    inputs = [leaves[at] for at in (*program.core_inputs, *program.parameter_inputs) if at is not None]
    first = program.num_consts

    def value(*parameters: Any) -> Any:
        return evaluate(program.core, *inputs[:first], *parameters)[0]

    return jax.jit(jax.value_and_grad(value, argnums=tuple(range(len(inputs) - first))))(*inputs[first:])


def shapes(program: Program) -> set[tuple[int, ...]]:
    return {value.shape for value in program.graph.values}


_unpadded: WeakKeyDictionary[Loss, tuple[Any, Any, Any]] = WeakKeyDictionary()


def unpadded(plain: Program, loss: Loss, p: Any, x: Any) -> Any:
    """`outcome` of the program as it is, compiled once for all that is padded of it."""
    known = _unpadded.get(loss)
    if known is None or known[0] is not p or known[1] is not x:
        known = _unpadded[loss] = p, x, outcome(plain, p, x)
    return known[2]


def check(loss: Loss, p: Any, x: Any, padded: list[PaddedDim], has: int | None, rtol: float = 2e-5) -> None:
    """The padded program has a dim of `has` elements, where one is given, and computes the same."""
    plain, longer = programs(loss, p, x, padded)
    if has is not None:
        assert not any(has in shape for shape in shapes(plain))
        assert any(has in shape for shape in shapes(longer))
    before, after = unpadded(plain, loss, p, x), outcome(longer, p, x)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(b, a, rtol=rtol, atol=2e-6)


def normal(seed: int, *shape: int) -> jax.Array:
    """Drawn by NumPy, which compiles nothing."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[0]), jnp.float32)


VOCABULARY, WIDTH, HEADS, INNER, BATCH, POSITIONS = 37, 20, 5, 30, 6, 8


@cache
def decoder(scan: bool = False, remat: bool = False) -> tuple[Loss, Any, Any]:
    """A tiny language model of two layers, its head tied to its embedding."""

    def layer(p: Any, x: Any) -> Any:
        q, k, v = ((x @ p[n]).reshape(*x.shape[:2], HEADS, -1) for n in ("q", "k", "v"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["o"]
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x + jax.nn.gelu(x @ p["inner"]) @ p["outer"]

    def loss(p: Any, tokens: Any) -> Any:
        x, apply = p["embedding"][tokens], jax.checkpoint(layer) if remat else layer
        if scan:
            x, _ = lax.scan(lambda x, one: (apply(one, x), None), x, p["layers"])
        else:
            for one in p["layers"]:
                x = apply(one, x)
        logs = jax.nn.log_softmax(x @ p["embedding"].T)
        return -jnp.take_along_axis(logs, tokens[..., None], -1).mean()

    def of_layer(seed: int) -> Any:
        sizes = dict.fromkeys(("q", "k", "v", "o"), (WIDTH, WIDTH)) | {"inner": (WIDTH, INNER), "outer": (INNER, WIDTH)}
        return {n: normal(seed + i, *shape) for i, (n, shape) in enumerate(sizes.items())}

    layers = [of_layer(1), of_layer(11)]
    p = {
        "embedding": normal(0, VOCABULARY, WIDTH),
        "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *layers) if scan else layers,
    }
    return loss, p, jax.random.randint(jax.random.key(9), (BATCH, POSITIONS), 0, VOCABULARY)


BATCH_DIM, VOCABULARY_DIM = PaddedDim("args[1]", 0, 7), PaddedDim("args[0]['embedding']", 0, 8)


@pytest.mark.parametrize(
    ("padded", "has"),
    [
        # The last one has both.
        pytest.param([BATCH_DIM], 7, marks=pytest.mark.slow),
        pytest.param([VOCABULARY_DIM], 40, marks=pytest.mark.slow),
        ([PaddedDim("args[1]", 1, 9)], 9),
        # Hidden states, which normalisation sums over.
        ([PaddedDim("args[0]['embedding']", 1, 22)], 22),
        ([PaddedDim(f"args[0]['layers'][0]['{name}']", 1, 32) for name in ("q", "v")], 32),
        ([PaddedDim("args[0]['layers'][1]['inner']", 1, 33), BATCH_DIM, VOCABULARY_DIM], 33),
    ],
    ids=str,
)
def test_a_decoder_with_any_of_its_dims_padded(padded: list[PaddedDim], has: int) -> None:
    check(*decoder(), padded, has)


@pytest.mark.parametrize("remat", [False, True])
def test_a_loop_of_layers_with_padded_dims(remat: bool) -> None:
    dims = [("q", 2, 32), ("v", 2, 32), ("inner", 2, 33)]
    padded = [PaddedDim(f"args[0]['layers']['{name}']", dim, multiple) for name, dim, multiple in dims]
    check(*decoder(scan=True, remat=remat), [*padded, BATCH_DIM, VOCABULARY_DIM], 33)


def test_what_needs_no_padding_is_the_program_as_it_is() -> None:
    loss, p, tokens = decoder()
    plain, longer = programs(loss, p, tokens, [PaddedDim("args[1]", 0, 3)])
    names = [[op.name for op in one.graph.operators if op.name != "convert_element_type"] for one in (plain, longer)]
    assert names[0] == names[1]  # but for numbers that are converted when they are traced


def rows(n: int = 6, width: int = 4) -> tuple[Any, Any]:
    return {"w": normal(3, width, width), "b": normal(4, width)}, normal(5, n, width)


@jax.custom_vjp
def rounded(x: Any) -> Any:
    return jnp.round(x * 4) / 4


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g * 3,))


def logarithm(x: Any) -> Any:
    return jnp.log(jnp.abs(x))


PIECES: dict[str, tuple[Loss, int | None]] = {
    # A logarithm of what is padded with zeros is minus infinity, and its derivative infinite.
    "logarithm": (lambda p, x: jnp.log(1e-3 + (x @ p["w"]) ** 2).mean(), 7),
    "of zero": (lambda p, x: jnp.log(jnp.abs(x) * jnp.exp(p["b"])).sum(), 7),
    "quotient": (lambda p, x: ((x @ p["w"]) / (x * p["b"])).sum(), 7),
    "norms of rows": (lambda p, x: jnp.linalg.norm(x @ p["w"], axis=-1).sum(), 7),
    "largest": (lambda p, x: (x @ p["w"]).max(0).sum() - (x @ p["w"]).min(), 7),
    "statistics": (lambda p, x: ((x @ p["w"] - (x @ p["w"]).mean(0)) / ((x @ p["w"]).std(0) + 0.1)).sum(0)[0], 7),
    "shifted": (lambda p, x: ((x @ p["w"] + 1.0) * 0.5).sum() + (2.0 - x).sum() + jnp.exp(x @ p["b"]).sum(), 7),
    "scaled by an infinity": (lambda p, x: jnp.where(jnp.isnan(x * jnp.inf), 1.0, x @ p["w"]).sum(), 7),
    # The derivative of a learnt number sums what is behind the end, which no number is.
    "learnt scale": (lambda p, x: logarithm(x).sum() * 0 + (p["b"][1] * logarithm(x)).sum(), 7),
    "learnt quotient": (lambda p, x: (p["b"][1] / x).sum() + (logarithm(x) / p["b"][2]).sum(), 7),
    "learnt power": (lambda p, x: jnp.power(jnp.abs(x) * jnp.exp(p["b"]), jnp.abs(p["b"][1])).sum(), 7),
    "learnt bound": (lambda p, x: jnp.maximum(jnp.abs(x) * p["b"], p["b"][1]).sum() + logarithm(x).sum(), 7),
    "learnt number, spread": (lambda p, x: (jnp.full(x.shape, p["b"][1]) * logarithm(x)).sum(), 7),
    "learnt border": (lambda p, x: lax.pad(logarithm(x * p["b"]), p["b"][1], [(0, 0, 0), (1, 1, 0)]).sum(), 7),
    "learnt scale in a loop": (
        lambda p, x: lax.scan(lambda c, s: (c + (s * logarithm(x)).sum(), None), 0.0, p["b"])[0], 7
    ),
    "norms with a learnt gain": (
        lambda p, x: (p["b"][0] * (x @ p["w"]) / jnp.linalg.norm(x @ p["w"], axis=-1, keepdims=True) @ p["w"]).sum(), 7
    ),
    "a weight that was sorted": (
        lambda p, x: logarithm(jnp.abs(x) @ lax.sort((jnp.abs(p["w"]), lax.iota(jnp.int32, 16).reshape(4, 4)),
                                                      num_keys=1)[0]).sum(), 7
    ),
    "the best, rounded": (lambda p, x: (rounded(lax.top_k(x @ p["w"], 2)[0]) ** 2).sum(), 7),
    "largest in eight bits": (lambda p, x: jnp.abs((x @ p["w"]).astype(jnp.float8_e4m3fn)).max().astype("f"), 7),
    "count": (lambda p, x: (x @ p["w"]).sum() / (1 + (x > 0).sum() + jnp.any(x > 2) + jnp.all(x > -9)), 7),
    "which": (lambda p, x: (x @ p["w"])[jnp.argmax(x[:, 0])].sum(), 7),
    "sorted": (lambda p, x: (jnp.sort(x @ p["w"], axis=0) * jnp.arange(6.0)[:, None]).sum(), 7),
    "sorted along another dim": (lambda p, x: (jnp.sort(x @ p["w"], axis=1) * p["b"]).sum(), 7),
    "cumulative": (lambda p, x: jnp.cumsum(x @ p["w"], axis=0).sum(), 7),
    "cut": (lambda p, x: (x @ p["w"])[1:].sum() + (x[::2] @ p["w"]).sum(), 7),
    "joined": (lambda p, x: (jnp.concatenate([x, 2 * x]) @ p["w"]).sum(), 7),
    "columns joined": (lambda p, x: jnp.concatenate([x @ p["w"], x], 1).mean(), 7),
    "flattened": (lambda p, x: jnp.tanh((x @ p["w"]).reshape(-1)).sum(), 28),
    "positions": (lambda p, x: (x @ p["w"] * jnp.arange(x.shape[0])[:, None]).sum(), 7),
    "of each other": (lambda p, x: jax.nn.softmax((x @ p["w"]) @ x.T).std(), 7),
    "relu": (lambda p, x: jax.nn.relu(x @ p["w"]).sum(), 7),
    "logsumexp": (lambda p, x: jax.nn.logsumexp(x @ p["w"]) + jax.nn.logsumexp(x @ p["w"], axis=0).sum(), 7),
    "branch": (lambda p, x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x @ p["w"]).sum(), None),
    "loop": (lambda p, x: (lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x) @ p["w"]).sum(), None),
    "dropout": (
        lambda p, x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x @ p["w"], 0.0).sum(), 7
    ),
    "scan over rows": (lambda p, x: lax.scan(lambda c, r: (c + r @ p["w"], c), jnp.zeros(4), x)[1].sum(), None),
    "carry that grows": (
        lambda p, x: lax.scan(lambda c, _: (c + jnp.tanh(x @ p["w"]), c.sum()), jnp.zeros(x.shape), None, 3)[0].sum(), 7
    ),
    "carry without rows": (
        lambda p, x: lax.scan(lambda c, _: (c + jnp.log(jnp.abs(x) * jnp.exp(c + p["b"])).mean(0), None),
                              jnp.zeros(4), None, 2)[0].sum(), 7
    ),
    "top": (lambda p, x: lax.top_k(x @ p["w"], 2)[0].sum(), 7),
    "written": (lambda p, x: jnp.zeros((6, 4)).at[2].set(p["b"]).sum() + (x @ p["w"]).at[3].add(p["b"]).sum(), 7),
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
def test_pieces_with_padded_rows(name: str) -> None:
    loss, has = PIECES[name]
    p, x = rows()
    check(loss, p, x, [PaddedDim("args[1]", 0, 7)], has)


def test_masks_and_random_bits_are_drawn_at_the_padded_size() -> None:
    """What depends on no array is not padded: every reader would have all of it."""

    def loss(p: Any, x: Any) -> Any:
        kept = jax.random.bernoulli(jax.random.key(1), 0.5, x.shape)
        seen = jnp.tril(jnp.ones((len(x), len(x)), bool))
        return (jnp.where(seen, jnp.where(kept, x @ p["w"], 0.0) @ x.T, 0.0) ** 2).sum()

    p, x = rows()
    _, longer = programs(loss, p, x, [PaddedDim("args[1]", 0, 7)])
    pads = [operator for operator in longer.graph.operators if operator.name == "pad"]
    assert len(pads) == 1  # the rows
    check(loss, p, x, [PaddedDim("args[1]", 0, 7)], 7)


def test_indices_behind_the_end_break_no_promise() -> None:
    """A gather promised unique indices, and its derivative a scatter; those of padded rows are all the same."""

    def loss(p: Any, x: Any) -> Any:
        found = p["table"].at[x].get(unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds")
        return (found**2).sum()

    dims = [PaddedDim("args[1]", 0, 4)]
    table, indices = {"table": normal(1, 5, 3)}, jnp.array([0, 2, 4])
    _, longer = programs(loss, table, indices, dims)
    promised = [e.params for e in open_jaxpr(longer.core).eqns if e.primitive.name == "gather"]
    assert [(one["unique_indices"], one["indices_are_sorted"]) for one in promised] == [(False, False)]
    check(loss, table, indices, dims, None)


def test_types_stay_what_they_are() -> None:
    p, x = rows()
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
    dims = [PaddedDim("args[1]", 0, 7), PaddedDim("args[0]['w']", 1, 5)]

    # A compiler may leave out a rounding between two operations, in either program.
    def loss(p: Any, x: Any) -> Any:
        return jnp.tanh(x.astype(jnp.bfloat16) @ p["w"] + p["b"]).sum()

    check(loss, half, x, dims, 7, rtol=2**-7)
    plain, longer = programs(loss, half, x, dims)
    assert {value.dtype for value in longer.graph.values} == {value.dtype for value in plain.graph.values} | {
        "bool",
        "int32",
    }


def test_functions_with_derivatives_of_their_own() -> None:
    @jax.custom_vjp
    def scaled(x: Any, w: Any) -> Any:
        return x * w

    def backward(kept: Any, cotangent: Any) -> Any:
        x, w = kept
        return cotangent * w, (cotangent * x / jnp.where(x == 0, 0.0, 1.0)).sum(0)

    scaled.defvjp(lambda x, w: (scaled(x, w), (x, w)), backward)
    p, x = rows()
    # The cotangent of what is padded is divided by zero inside.
    check(lambda p, x: (scaled(x @ p["w"], p["b"]) ** 2).sum(), p, x, [PaddedDim("args[1]", 0, 7)], 7)


def test_results_of_a_derivative_of_ones_own_vary() -> None:
    """Whatever is inside, whole numbers or `stop_gradient`: cotangents come back to them."""

    @jax.custom_vjp
    def whole(x: Any) -> Any:
        return (lax.stop_gradient(x) * 8).astype(jnp.int32).astype(x.dtype) / 8

    whole.defvjp(lambda x: (whole(x), None), lambda _, g: (g * 2,))
    p, x = rows()
    check(lambda p, x: (rounded(whole(x @ p["w"])) ** 2).sum(), p, x, [PaddedDim("args[1]", 0, 7)], 7)
    # Here the sum of what comes back to `b` is masked, as no number is behind the end.
    check(lambda p, x: (whole(p["b"]) * logarithm(x)).sum(), p, x, [PaddedDim("args[1]", 0, 7)], 7)
    check(lambda p, x: logarithm(jnp.abs(x) @ jnp.abs(whole(p["w"] * 9))).sum(), p, x, [PaddedDim("args[1]", 0, 7)], 7)


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_looked_up_as_far_as_the_users_table_goes(mode: str) -> None:
    last = 4 if mode == "promise_in_bounds" else 6  # of five rows, padded to eight

    def loss(p: Any, x: Any) -> Any:
        found = p["table"].at[x].get(mode=mode, fill_value=2.0)
        return (found**2).sum() + (p["table"] @ jnp.ones(3)).sum()

    table = {"table": normal(1, 5, 3)}
    indices = jnp.array([0, 4, last, -1 if mode != "promise_in_bounds" else 0])
    check(loss, table, indices, [PaddedDim("args[0]['table']", 0, 8)], 8)


@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize(("dtype", "extent"), [(jnp.uint8, 100), (jnp.int8, 100), (jnp.int16, 260), (jnp.uint32, 260)])
def test_looked_up_by_other_numbers(mode: str, dtype: Any, extent: int) -> None:
    """As far as JAX itself looks up by them: the derivative for 260 rows by eight bits drops most rows."""

    def loss(p: Any, x: Any) -> Any:
        return (jnp.take(p["table"], x, axis=0, mode=mode) ** 2).sum()

    table, indices = {"table": normal(1, extent, 3)}, jnp.array([0, 4, 90], dtype)
    check(loss, table, indices, [PaddedDim("args[0]['table']", 0, 8)], -(-extent // 8) * 8)


def test_keys_of_padded_examples_stay_as_they_are() -> None:
    def loss(p: Any, x: Any) -> Any:
        rows, keys = x

        def trip(h: Any, _: Any) -> Any:
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (4,)))(keys)
            return jnp.tanh(jnp.where(kept, h @ p["w"], 0.0)), None

        return lax.scan(trip, rows, None, 3)[0].sum()

    p, x = rows()
    dims = [PaddedDim("args[1][0]", 0, 7), PaddedDim("args[1][1]", 0, 7)]
    check(loss, p, (x, jax.random.split(jax.random.key(0), 6)), dims, 7)


def test_what_cannot_be_padded_is_refused() -> None:
    p, x = rows()

    def step(p: Any, x: Any) -> Any:
        return mw.value_and_grad(lambda p, x: (x @ p["w"]).sum())(p, x)

    with pytest.raises(mw.PlanError, match=r"dim 0 of args\[7\].*needed a dim of an input"):
        trace_program(step, (p, x), padded=[PaddedDim("args[7]", 0, 5)])
    with pytest.raises(ValueError, match="multiple of 0"):
        PaddedDim("args[1]", 0, 0)


def test_attention_with_padded_batch_and_heads() -> None:
    def loss(p: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in p["qkv"])
        return (mw.attention(q, k, v, causal=True, sinks=p["sinks"]) ** 2).sum()

    p = {"qkv": [normal(i, 4, 5, 8) for i in range(3)], "sinks": normal(7, 5)}
    x = normal(8, 3, 6, 4)
    heads = [PaddedDim(f"args[0]['qkv'][{i}]", 1, 7) for i in range(3)]
    check(loss, p, x, [PaddedDim("args[1]", 0, 7)], 7)
    check(loss, p, x, heads, 7)
    check(loss, p, x, [PaddedDim("args[1]", 1, 7)], None)


def test_convolutions_with_padded_batch_and_channels() -> None:
    def loss(p: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = jax.nn.relu(y + p["bias"])
        return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()

    p, x = {"kernel": normal(1, 3, 3, 2, 5), "bias": normal(2, 5)}, normal(3, 6, 4, 4, 2)
    check(loss, p, x, [PaddedDim("args[1]", 0, 7)], 7)
    check(loss, p, x, [PaddedDim("args[0]['kernel']", 3, 7)], 7)
    check(loss, p, x, [PaddedDim("args[1]", 3, 3)], None)


def test_experts_are_padded() -> None:
    """Each token takes the two best of five experts, every expert sees all tokens."""

    def loss(p: Any, x: Any) -> Any:
        scores = jax.nn.softmax(x @ p["router"])
        best, which = lax.top_k(scores, 2)
        gates = (jax.nn.one_hot(which, 5) * best[..., None]).sum(1)
        hidden = jax.nn.relu(jnp.einsum("td,edf->etf", x, p["inner"]))
        return (jnp.einsum("etf,efd,te->td", hidden, p["outer"], gates) ** 2).sum()

    p = {"router": normal(1, 4, 5), "inner": normal(2, 5, 4, 6), "outer": normal(3, 5, 6, 4)}
    padded = [PaddedDim("args[0]['inner']", 0, 8)]
    check(loss, p, normal(4, 10, 4), padded, 8)


def test_layer_boundaries_stay() -> None:
    def loss(p: Any, x: Any) -> Any:
        x = jnp.tanh(x @ p["w"])
        mw.layer_boundary()
        x, _ = lax.scan(lambda x, _: (mw.layer_boundary() or jnp.tanh(x @ p["w"]), None), x, None, 3)
        return x.sum()

    p, x = rows()
    plain, longer = programs(loss, p, x, [PaddedDim("args[1]", 0, 7)])
    assert len(longer.boundaries.before) == len(plain.boundaries.before) == 1
    assert len(longer.boundaries.scans) == len(plain.boundaries.scans) == 1
    (cut,), eqns = longer.boundaries.before, open_jaxpr(longer.core).eqns
    assert any(eqn.primitive.name == "tanh" for eqn in eqns[:cut])
    check(loss, p, x, [PaddedDim("args[1]", 0, 7)], 7)


def test_a_step_with_its_gradients_inside_is_padded_too() -> None:
    """A step whose loss is not marked is one program, with the backward pass in it."""

    def step(p: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.log(1e-3 + (x @ p["w"] + p["b"]) ** 2).mean())(p)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    p, x = rows()
    program = trace_program(step, (p, x), padded=[PaddedDim("args[1]", 0, 7)])
    assert any(7 in shape for shape in shapes(program))
    found = evaluate(program.core, *jax.tree.leaves((p, x)))
    for a, b in zip(jax.tree.leaves(step(p, x)), found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    batch=st.integers(2, 7), width=st.integers(2, 9), inner=st.integers(2, 9), out=st.integers(2, 9),
    multiples=st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8)),
    activation=st.sampled_from([jnp.tanh, jax.nn.gelu, jax.nn.softplus, jnp.exp, jax.nn.softmax]),
)  # fmt: skip
def test_any_sizes_to_any_multiples(
    batch: int, width: int, inner: int, out: int, multiples: tuple[int, ...], activation: Any
) -> None:
    def loss(p: Any, x: Any) -> Any:
        h = activation(x @ p["a"] + p["c"])
        return jax.nn.logsumexp(h @ p["b"], axis=-1).mean() + (h**2).sum(0).max()

    p = {"a": normal(1, width, inner), "b": normal(2, inner, out), "c": normal(3, inner)}
    dims = [("args[1]", 0), ("args[1]", 1), ("args[0]['a']", 1), ("args[0]['b']", 1)]
    padded = [PaddedDim(*dim, multiple) for dim, multiple in zip(dims, multiples, strict=True)]
    check(loss, p, normal(4, batch, width), padded, None)

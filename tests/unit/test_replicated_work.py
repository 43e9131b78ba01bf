"""Notes on work that devices do alike: which dim, at which line, and what another size of it would gain."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import meshwright as mw
from meshwright.program.rules import ReplicationWarning
from meshwright.program.trace import trace_program

CLUSTER = "p4d.24xlarge:1"
HERE = re.escape(__file__)


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def language_model(vocabulary: int, *, width: int = 512, heads: int = 8, batch: int = 8) -> tuple[Any, Any]:
    """A step and its arguments: one layer of attention and one of products, the embedding tied to the head."""

    def step(p: Any, tokens: Any) -> Any:
        def loss(p: Any) -> Any:
            x = p["embedding"][tokens]
            q, k, v = ((x @ p[name]).reshape(*tokens.shape, heads, -1) for name in ("q", "k", "v"))
            scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
            x = x + jnp.einsum("bhst,bthd->bshd", scores, v).reshape(x.shape) @ p["o"]
            x = x + jax.nn.gelu(x @ p["inner"]) @ p["outer"]
            logits = x @ p["embedding"].T
            chosen = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

        value, grads = mw.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, grads), value

    parameters = {name: shape(width, width) for name in ("q", "k", "v", "o")}
    parameters |= {"embedding": shape(vocabulary, width), "inner": shape(width, 4 * width)}
    parameters |= {"outer": shape(4 * width, width)}
    return step, (parameters, shape(batch, 256, dtype=jnp.int32))


def planned(model: tuple[Any, Any], **options: Any) -> mw.Plan:
    return mw.plan_for(*model, cluster=CLUSTER, **options).plan


def milliseconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def about(plan: mw.Plan, words: str) -> list[str]:
    return [note for note in plan.notes if words in note]


@pytest.mark.parametrize(
    "preset", ["megatron(tp=8)", pytest.param("fsdp_tp(tp=4)", marks=pytest.mark.slow), "megatron(tp=4, pp=2)"]
)
def test_a_preset_names_the_vocabulary_that_it_cannot_split(preset: str) -> None:
    """What a padded one is said to save is what its plan takes less, but for what that moves in place of it."""
    plan = planned(language_model(50257), preset=preset)
    (note,) = about(plan, "does not divide")
    assert "dim 0 (50257) of args[0]['embedding']" in note
    assert re.search(rf"{HERE}:\d+", note)
    assert "50304" in note
    found = re.search(r"save at most ([\d.]+ \w+) of ([\d.]+ \w+) a step", note)
    assert found is not None
    saved, step = map(milliseconds, found.groups())
    assert step == pytest.approx(1e3 * plan.predicted.step_seconds, rel=0.01)
    padded = planned(language_model(50304), preset=preset)
    assert not about(padded, "does not divide")
    gained = 1e3 * (plan.predicted.step_seconds - padded.predicted.step_seconds)
    assert 0.8 * gained <= saved <= 1.3 * gained


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"microbatches": 4}, marks=pytest.mark.slow)], ids=["free", "microbatches"]
)
def test_a_search_says_what_a_padded_vocabulary_would_take(options: dict[str, Any]) -> None:
    """As the plan of the padded program on the same mesh takes."""
    plan = planned(language_model(50257), **options)
    (note,) = about(plan, "no axis of the 8 devices divides 50257")
    found = re.search(r"would take ([\d.]+ \w+) in place of ([\d.]+ \w+)", note)
    assert found is not None
    after, before = map(milliseconds, found.groups())
    padded = planned(language_model(50304), mesh=dict(plan.stages[0].mesh), **options)
    assert before == pytest.approx(1e3 * plan.predicted.step_seconds, rel=0.05)
    assert after == pytest.approx(1e3 * padded.predicted.step_seconds, rel=0.05)
    assert not about(padded, "divides")


def test_of_several_stages_the_costliest_is_padded() -> None:
    plan = planned(language_model(50257), stages=2)
    (note,) = about(plan, "divides 50257")
    assert "for stage 2" in note


def test_stages_of_stacked_layers_are_padded_too() -> None:
    """Each stage holds some rows of the stacked parameters, with their share of the optimizer's state."""

    def step(state: Any, tokens: Any) -> Any:
        p, momentum = state

        def loss(p: Any) -> Any:
            x, _ = lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w["in"]) @ w["out"], None), p["e"][tokens], p["layers"])
            return jnp.mean(jax.nn.logsumexp(x @ p["head"], -1))

        value, grads = mw.value_and_grad(loss)(p)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return (jax.tree.map(lambda a, m: a - 0.1 * m, p, momentum), momentum), value

    def noted(vocabulary: int) -> list[str]:
        layers = {"in": shape(4, 512, 8192), "out": shape(4, 8192, 512)}
        parameters = {"e": shape(vocabulary, 512), "head": shape(512, vocabulary), "layers": layers}
        model = step, ((parameters, parameters), shape(8, 256, dtype=jnp.int32))
        return about(planned(model, stages=2, microbatches=2), "divides")

    (note,) = noted(20011)
    assert "divides 20011" in note
    assert "for stage 2" in note
    assert not noted(20480)


def test_heads_that_are_too_few_are_named() -> None:
    model = language_model(50304, width=1600, heads=25)
    (note,) = about(planned(model, preset="megatron(tp=8)"), "does not divide 25")
    assert "25 blocks" in note
    assert "32 would save" in note


def test_a_plan_that_splits_everything_has_no_notes() -> None:
    assert not planned(language_model(50304)).notes
    assert planned(language_model(50304), preset="megatron(tp=8)").notes == ("held to the preset megatron(tp=8, dp=1)",)


def whole_run(width: int, batch: int) -> tuple[Any, Any]:
    """Epochs over shuffled minibatches inside the step, as reinforcement learning is written."""

    def step(w: Any, data: Any, key: Any) -> Any:
        def minibatch(w: Any, rows: Any) -> Any:
            value, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(rows @ w) - rows) ** 2))(w)
            return w - 0.1 * grad, value

        def epoch(carry: Any, _: Any) -> Any:
            w, key = carry
            key, now = jax.random.split(key)
            shuffled = data[jax.random.permutation(now, batch)]
            w, losses = lax.scan(minibatch, w, shuffled.reshape(4, batch // 4, width))
            return (w, key), losses

        (w, _), losses = lax.scan(epoch, (w, key), None, length=4)
        return w, losses

    return step, (shape(width, width), shape(batch, width), shape(2, dtype=jnp.uint32))


def test_devices_that_do_the_work_of_one_are_noted_with_the_loop() -> None:
    (note,) = about(planned(whole_run(64, 512)), "8 devices do the same work")
    assert re.search(rf"in the scan at {HERE}:\d+", note)
    assert "of one" not in note


def inverse(p: Any, x: Any) -> Any:
    return jnp.mean((x @ jnp.linalg.inv(p @ p.T + jnp.eye(len(p)))) ** 2)


def loop(p: Any, x: Any) -> Any:
    y = lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[1])), (0, lax.stop_gradient(p)))[1]
    return jnp.mean((x @ p @ y) ** 2)


@pytest.mark.parametrize(("loss", "name"), [(inverse, "custom_linear_solve"), (loop, "while")])
def test_an_operator_that_nothing_splits_warns_where_it_costs_something(loss: Callable[..., Any], name: str) -> None:
    def step(p: Any, x: Any) -> Any:
        value, grad = mw.value_and_grad(loss)(p, x)
        return p - 0.1 * grad, value

    with pytest.warns(ReplicationWarning, match=rf"{name} at {HERE}:\d+.*runs whole on every device"):
        plan = planned((step, (shape(1024, 1024), shape(64, 1024))))
    assert about(plan, f"{name} at {__file__}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned((step, (shape(8, 8), shape(1 << 22, 8))), preset="data_parallel()")


def test_lines_inside_libraries_are_those_of_their_callers() -> None:
    args = shape(64, 64), shape(8, 64)
    graph = trace_program(lambda p, x: (p, mw.value_and_grad(inverse)(p, x)), args).graph
    lines = [operator.source for operator in graph.operators if operator.name == "lu"]
    assert lines
    assert all(__file__ in line for line in lines)

"""What no axis divides is padded or noted, and what devices do alike is noted: the dim, the line, and what it costs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import meshwright as mw
from meshwright.notes.replicated_work import replicated_work
from meshwright.program.rules import ReplicationWarning
from meshwright.program.trace import trace_program
from meshwright.search.restrictions.constraints import Constraints

CLUSTER = "p4d.24xlarge:1"
HERE = re.escape(__file__)


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


@cache
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


_plans: dict[tuple[Any, str], mw.Plan] = {}


def planned(model: tuple[Any, Any], **options: Any) -> mw.Plan:
    """The plan of a model; of each model and options once, since several tests compare with the same."""
    if not {"preset", "submeshes"}.intersection(options):
        options.setdefault("stages", 1)
    key = model[0], repr(sorted(options.items()))
    if key not in _plans:
        _plans[key] = mw.plan_for(*model, cluster=CLUSTER, **options).plan
    return _plans[key]


def milliseconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def about(plan: mw.Plan, words: str) -> list[str]:
    return [note for note in plan.notes if words in note]


def seconds_of(plan: mw.Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


def padded_note(plan: mw.Plan) -> tuple[str, float, float]:
    """The note on what is padded, and the milliseconds of a step that it tells: as planned, and without padding."""
    (note,) = about(plan, "padded: ")
    found = re.search(r"; ([\d.]+ \w+) a step, ([\d.]+ \w+) without", note)
    assert found is not None, note
    return note, milliseconds(found[1]), milliseconds(found[2])


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"x": 2, "y": 4}},  # the one that is found, too
        {"preset": "megatron(tp=8)"},
        {"preset": "megatron(tp=4, pp=2)"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"microbatches": 4}, marks=pytest.mark.slow),
        pytest.param({"preset": "fsdp_tp(tp=4)"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_padded_vocabulary_is_nearly_as_fast_as_an_even_one(options: dict[str, Any]) -> None:
    plan = planned(language_model(50257), **options)
    note, after, before = padded_note(plan)
    assert "dim 0 of args[0]['embedding'] from 50257 to 50304" in note
    assert after == pytest.approx(1e3 * seconds_of(plan), rel=0.03)
    assert before == pytest.approx(1e3 * seconds_of(planned(language_model(50257), padding=False, **options)), rel=0.03)
    # Of a model of one layer masks, and bringing the embedding into its layout, are a larger share than of others
    # (`benchmarks/padding.py`).
    assert before - after >= 0.6 * (before - 1e3 * seconds_of(planned(language_model(50304), **options)))
    assert not about(plan, "does not divide")


@pytest.mark.parametrize("options", [{"time_limit_seconds": 0.0}, {"padding": False}], ids=str)
def test_what_is_not_padded_is_bounded(options: dict[str, Any]) -> None:
    """What padding is said to save at most is no less than what it saves."""
    plan, even = (planned(language_model(size), preset="megatron(tp=8)", **options) for size in (50257, 50304))
    (note,) = about(plan, "does not divide 50257")
    assert "dim 0 (50257) of args[0]['embedding']" in note
    assert re.search(rf"{HERE}:\d+", note)
    found = re.search(r"save at most ([\d.]+ \w+) of ([\d.]+ \w+) a step, of compute", note)
    assert found is not None
    assert milliseconds(found[2]) == pytest.approx(1e3 * seconds_of(plan), rel=0.01)
    gained = 1e3 * (seconds_of(plan) - seconds_of(even))
    assert gained <= milliseconds(found[1]) <= 1.3 * gained
    assert not about(even, "does not divide")


def layers(batch: int, width: int, *, flat: bool = False) -> tuple[Any, Any]:
    """A step of four square layers, and its arguments; of images of 3 x 5 numbers if flat."""

    def step(ws: Any, b: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = b["x"].reshape(-1, width)
            for w in ws:
                h = jax.nn.gelu(h @ w)
            return jnp.mean((h - b["y"].reshape(-1, width)) ** 2)

        value, grads = mw.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    rows = (batch, 5, width) if flat else (batch, width)
    return step, ([shape(width, width)] * 4, {"x": shape(*rows), "y": shape(*rows)})


@pytest.mark.parametrize(
    ("model", "options", "larger", "words"),
    [
        (layers(63487, 64), {}, layers(63488, 64), "from 63487 to 63488"),
        (layers(8191, 512), {}, layers(8192, 512), "from 8191 to 8192"),
        (layers(60002, 64), {}, layers(60008, 64), "from 60002 to 60008"),
        (layers(12004, 64, flat=True), {}, layers(12008, 64, flat=True), "from 12004 to 12008"),
        pytest.param(
            language_model(512, batch=30), {}, language_model(512, batch=32), "from 30 to 32", marks=pytest.mark.slow
        ),
        pytest.param(
            language_model(512, batch=120), {"microbatches": 4}, language_model(512, batch=128),
            "from 30 to 32 in each of 4 microbatches", marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_batch_that_nothing_divides_is_padded_to_the_next_that_is(
    model: tuple[Any, Any], options: dict[str, Any], larger: tuple[Any, Any], words: str
) -> None:
    plan = planned(model, **options)
    note, _, before = padded_note(plan)
    assert words in note
    assert 1e3 * seconds_of(plan) < before
    assert seconds_of(plan) <= 1.13 * seconds_of(planned(larger, **options))
    assert not about(plan, "do the same work")
    assert not about(plan, "does not divide")


def test_what_is_no_faster_padded_stays_and_is_not_noted() -> None:
    """With the batch split over all devices two heads need not be, and eight would be four times the work."""
    plan = planned(language_model(512, heads=2))
    assert not plan.padded
    assert not about(plan, "does not divide")


def test_dims_of_all_layers_are_padded_together() -> None:
    """None of eight layers by itself is much of a step."""

    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = x
            for w in ws:
                h = h + jax.nn.gelu(h @ w["in"]) @ w["out"]
            return jnp.mean(h**2)

        value, grads = mw.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    def plan_of(inner: int) -> mw.Plan:
        ws = [{"in": shape(256, width), "out": shape(width, 256)} for width in (*[inner] * 8, 1024)]
        return planned((step, (ws, shape(4096, 256))), preset="megatron(tp=8)")

    plan = plan_of(2049)
    note, _, _ = padded_note(plan)
    assert "dim 1 of args[0][0]['in'] from 2049 to 2056 and 7 more" in note
    assert len(plan.padded) == 8
    assert seconds_of(plan) <= 1.2 * seconds_of(plan_of(2056))


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

    def plan_of(vocabulary: int) -> mw.Plan:
        layers = {"in": shape(4, 512, 8192), "out": shape(4, 8192, 512)}
        parameters = {"e": shape(vocabulary, 512), "head": shape(512, vocabulary), "layers": layers}
        tokens, preset = shape(8, 256, dtype=jnp.int32), "megatron(tp=4, pp=2)"
        return planned((step, ((parameters, parameters), tokens)), preset=preset, microbatches=2)

    plan = plan_of(20011)
    note, after, before = padded_note(plan)
    assert "dim 1 of args[0][0]['head'] from 20011 to 2" in note
    assert before - after >= 0.3 * (before - 1e3 * seconds_of(plan_of(20096)))


def test_heads_that_are_too_few_are_padded() -> None:
    """25 heads of 64 are 32 of 64 inside, where the parameters have 1600 numbers."""
    plan = planned(language_model(50304, width=1600, heads=25), preset="megatron(tp=8)")
    note, after, before = padded_note(plan)
    assert "from 1600 to 2048" in note
    assert after < 0.95 * before


def test_what_is_padded_is_told_by_size() -> None:
    note, _, _ = padded_note(planned(language_model(50257, width=1600, heads=25), preset="megatron(tp=8)"))
    assert "from 50257 to 50304" in note
    assert "from 1600 to 2048" in note


def test_a_preset_whose_axis_nothing_suits_as_it_is() -> None:
    model = layers(8191, 512)
    plan = planned(model, preset="data_parallel()")
    assert about(plan, "from 8191 to 8192")
    assert about(plan, "without there is none")
    with pytest.raises(mw.PlanError, match="a batch that 8 divides"):
        planned(model, preset="data_parallel()", padding=False)


def test_what_fits_with_a_padded_vocabulary_alone() -> None:
    options = {"preset": "megatron(tp=8)", "microbatches": 1}
    model = language_model(50257, width=1024)
    peaks = [planned(model, padding=pads, **options).stages[0].memory.total for pads in (False, True)]
    assert peaks[1] < 0.8 * peaks[0]
    limit = 0.9 * peaks[0]
    with pytest.raises(mw.PlanError, match="usable on a device"):
        planned(model, padding=False, memory_per_device=limit, **options)
    assert planned(model, memory_per_device=limit, **options).padded


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
    assert re.search(r"the search proved that no layout that was asked for is faster by more than 0.[123] %", note)


def test_a_search_that_did_not_end_claims_no_proof() -> None:
    planning = mw.plan_for(*whole_run(64, 512), cluster=CLUSTER, stages=1)
    predicted = replace(planning.plan.predicted, optimality_gap=0.5)
    notes = replicated_work(
        planning.program, replace(planning.plan, predicted=predicted), planning.cluster, Constraints()
    )
    (note,) = (one for one in notes if "8 devices do the same work" in one)
    assert "the search did not find out whether a layout that splits it is faster" in note


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

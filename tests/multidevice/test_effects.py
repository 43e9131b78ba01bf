"""Prints and callbacks of a step run as often as under `jax.jit`, in order, on whole values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify, io_callback

import meshwright as mw
from meshwright.errors import PlanError

KEY = jax.random.key(3)
EXAMPLES, WIDTH = 16, 32


class Seen(list[tuple[Any, ...]]):
    """What callbacks were called with."""

    def note(self, tag: str) -> Callable[..., None]:
        return lambda *values: self.append((tag, *(np.asarray(value, np.float64) for value in values)))

    def take(self) -> list[tuple[Any, ...]]:
        """All until now, in order, what `jax.jit` gives no order last; no longer kept."""
        jax.effects_barrier()
        found = sorted(self, key=lambda one: one[0] == "unordered")
        self.clear()
        return found


@pytest.fixture
def seen() -> Seen:
    return Seen()


def weights() -> dict[str, jax.Array]:
    a = jnp.linspace(0, 1, WIDTH * 2 * WIDTH).reshape(WIDTH, 2 * WIDTH) * 0.01
    return {"a": a, "b": jnp.full((2 * WIDTH, WIDTH), 0.01)}


def batch() -> dict[str, jax.Array]:
    x = jnp.linspace(0, 1, EXAMPLES * WIDTH).reshape(EXAMPLES, WIDTH)
    return {"x": x, "y": jnp.zeros((EXAMPLES, WIDTH))}


def step_with(
    in_loss: Callable[..., None] = lambda **values: None,
    in_update: Callable[..., None] = lambda **values: None,
    before: Callable[..., None] = lambda **values: None,
    layer: Callable[[Any], Any] = lambda h: h,
    value_and_grad: Callable[..., Any] = mw.value_and_grad,
) -> Callable[..., Any]:
    """A perceptron's training step that calls what it is given on its values."""

    def step(w: Any, b: Any) -> Any:
        before(w=w, x=b["x"])

        def loss_of(w: Any) -> Any:
            h = layer(jnp.tanh(b["x"] @ w["a"]))
            loss = jnp.mean((h @ w["b"] - b["y"]) ** 2)
            in_loss(w=w, x=b["x"], h=h, loss=loss)
            return loss

        loss, grads = value_and_grad(loss_of)(w)
        in_update(w=w, grads=grads, loss=loss)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    return step


def assert_same(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    assert [tag for tag, *_ in found] == [tag for tag, *_ in expected]
    for (tag, *values), (_, *wanted) in zip(found, expected, strict=True):
        for a, b in zip(values, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7, err_msg=tag)


def assert_as_under_jit(step: Callable[..., Any], seen: Seen, *, steps: int = 1, **options: Any) -> Any:
    """Run a step on one device and by a plan, and compare what callbacks saw and the loss."""
    parallel, alone = mw.parallelize(step, **options), jax.jit(step)
    w, again = weights(), weights()
    for _ in range(steps):
        w, loss = alone(w, batch())
        expected = seen.take()
        again, found = parallel(again, batch())
        assert_same(seen.take(), expected)
        assert expected
        np.testing.assert_allclose(np.asarray(found), loss, rtol=1e-4)
    return parallel


def everything(seen: Seen) -> Callable[..., Any]:
    """A step with effects of all kinds in all places, all in one order."""
    note = seen.note

    def debug(tag: str, *values: Any) -> None:
        jax.debug.callback(note(tag), *values, ordered=True)

    def before(w: Any, x: Any) -> None:
        debug("argument", w["b"], x)
        debug("nothing")
        jax.vmap(lambda row: jax.debug.callback(note("unordered"), row.sum()))(x[:1])

    def trip(carry: Any, row: Any) -> Any:
        jax.lax.cond(row.sum() > 3, lambda: debug("large", row), lambda: debug("small", carry, row[:2]))
        jax.lax.fori_loop(0, 2, lambda i, c: (debug("inner", i, c), c + 1.0)[1], carry)
        return carry + 1.0, None

    def in_loss(w: Any, x: Any, h: Any, loss: Any) -> None:
        debug("loss", loss, h)
        jax.jit(lambda v: debug("jitted", v, 2.0))(w["a"])
        jax.lax.scan(trip, 0.0, x[:3], reverse=True)
        debug("constant", jnp.arange(3), jax.random.key_data(KEY))
        jax.debug.callback(note("key"), jax.random.fold_in(KEY, 1), ordered=True)

    def in_update(w: Any, grads: Any, loss: Any) -> None:
        debug("gradient", grads["a"], optax.tree.norm(grads))
        jax.lax.cond(jnp.isnan(loss), lambda: debug("nan"), lambda: debug("fine", loss))

    return step_with(in_loss, in_update, before)


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1},
        {"stages": 2},
        pytest.param({"preset": "zero(3)"}, marks=pytest.mark.slow),
        pytest.param({"preset": "megatron(tp=4)"}, marks=pytest.mark.slow),
    ],
)
def test_all_kinds(seen: Seen, options: dict[str, Any]) -> None:
    assert_as_under_jit(everything(seen), seen, steps=2, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1, "pins": {"args[1]*": (None, None)}},  # else a microbatch has examples of each device's block
        {"stages": 2},
        pytest.param({"stages": 2, "schedule": "zero_bubble"}, marks=pytest.mark.slow),
        pytest.param({"stages": 2, "schedule": "gpipe"}, marks=pytest.mark.slow),
    ],
)
def test_in_the_loss_once_a_microbatch(seen: Seen, options: dict[str, Any]) -> None:
    """In the order of microbatches, on the values of each; said in the plan's notes."""

    def in_loss(w: Any, x: Any, h: Any, loss: Any) -> None:
        jax.debug.callback(seen.note("loss"), loss, x, ordered=True)
        jax.debug.callback(seen.note("nothing"), ordered=True)
        jax.lax.scan(lambda c, row: (c, jax.debug.callback(seen.note("row"), row, ordered=True)), None, h)
        jax.lax.scan(lambda c, _: (c, jax.debug.callback(seen.note("trip"), ordered=True)), None, length=len(x))

    step = step_with(in_loss, lambda loss, **values: jax.debug.callback(seen.note("update"), loss))
    parallel = mw.parallelize(step, microbatches=4, **options)
    _, loss = parallel(weights(), batch())
    found = seen.take()
    expected, whole, size = [], batch(), EXAMPLES // 4
    for number in range(4):
        part = {name: x[number * size : (number + 1) * size] for name, x in whole.items()}
        jax.jit(step)(weights(), part)
        expected += [one for one in seen.take() if one[0] != "update"]
    assert_same(found, [*expected, ("update", np.asarray(loss))])
    notes = [note for note in parallel.plan(weights(), batch()).notes if "once a microbatch" in note]
    assert len(notes) == 2  # those in a loop over the examples run as often as under jax.jit
    assert all("jax.debug.callback at" in note and "test_effects.py" in note for note in notes)


@pytest.mark.parametrize("options", [{"stages": 1}, pytest.param({"stages": 2}, marks=pytest.mark.slow)])
def test_io_callback(seen: Seen, options: dict[str, Any]) -> None:
    """Ordered or not, with results that nothing reads or without any."""

    def count(value: Any) -> Any:
        seen.note("counted")(value)
        return np.int32(1)

    def in_update(w: Any, grads: Any, loss: Any) -> None:
        io_callback(count, jax.ShapeDtypeStruct((), jnp.int32), loss, ordered=True)
        io_callback(seen.note("weight"), None, w["a"], ordered=True)

    before = jax.jit(lambda x: io_callback(count, jax.ShapeDtypeStruct((), jnp.int32), x.sum(), ordered=True))
    assert_as_under_jit(step_with(in_update=in_update, before=lambda w, x: before(x)), seen, **options)


def test_printing(capfd: pytest.CaptureFixture[str]) -> None:
    def in_loss(h: Any, loss: Any, **values: Any) -> None:
        jax.debug.print("loss {:.4f} of {name}", loss, name="step", ordered=True)
        jax.debug.print("rows {}", h[:2, :2].astype(jnp.bfloat16), ordered=True)

    step = step_with(in_loss)
    printed = []
    for run in (jax.jit(step), mw.parallelize(step, stages=1)):
        run(weights(), batch())
        jax.effects_barrier()
        printed.append(capfd.readouterr().out)
    assert "loss 0.00" in printed[0]
    assert printed[0] == printed[1]


def test_steps_that_are_planned_whole(seen: Seen) -> None:
    """Two marked calls, in a scan, and derivatives of the user's own, whose backward pass prints."""

    @jax.custom_vjp
    def watched(x: Any) -> Any:
        return x

    def backward(_: None, cotangent: Any) -> Any:
        jax.debug.callback(seen.note("cotangent"), cotangent, ordered=True)
        return (cotangent,)

    watched.defvjp(lambda x: (x, None), backward)
    inner = step_with(lambda loss, **v: jax.debug.callback(seen.note("loss"), loss, ordered=True), layer=watched)

    def step(w: Any, b: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(2, EXAMPLES // 2, WIDTH), b)
        w, losses = jax.lax.scan(inner, w, parts)
        return w, losses.mean()

    assert_as_under_jit(step, seen, stages=1)


@pytest.mark.parametrize(
    ("microbatches", "count"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)  # fmt: skip
def test_inference(seen: Seen, microbatches: int, count: int) -> None:
    @jax.custom_jvp
    def layer(x: Any) -> Any:
        jax.debug.callback(seen.note("layer"), x.sum(), ordered=True)
        return x

    layer.defjvp(lambda primals, tangents: (primals[0], tangents[0]))

    def step(w: Any, b: Any) -> Any:
        h = layer(jnp.tanh(b["x"] @ w["a"]))
        return h @ w["b"]

    expected = jax.jit(step)(weights(), batch())
    (alone,) = seen.take()
    parallel = mw.parallelize(step, stages=2, schedule="inference", microbatches=microbatches)
    np.testing.assert_allclose(parallel(weights(), batch()), expected, rtol=1e-4)
    found = seen.take()
    assert len(found) == count
    np.testing.assert_allclose(sum(value for _, value in found), alone[1], rtol=1e-4)


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stacked_layers_on_several_stages(seen: Seen, microbatches: int) -> None:
    """Each stage has some rows of the parameter and of its gradient: callbacks see all of them."""
    stack = {"w": jnp.linspace(0, 1, 8 * WIDTH * WIDTH).reshape(8, WIDTH, WIDTH) * 0.1}

    def step(w: Any, b: Any) -> Any:
        def loss_of(w: Any) -> Any:
            def layer(h: Any, row: Any) -> Any:
                h = jnp.tanh(h @ row)
                if microbatches == 1:
                    jax.debug.callback(seen.note("layer"), h, h > 0, ordered=True)
                return h, None

            return jnp.mean((jax.lax.scan(layer, b["x"], w["w"])[0] - b["y"]) ** 2)

        loss, grads = mw.value_and_grad(loss_of)(w)
        jax.debug.callback(seen.note("stacks"), w["w"], grads["w"], jnp.sum(grads["w"] ** 2), ordered=True)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    jax.jit(step)(stack, batch())
    expected = seen.take()
    parallel = mw.parallelize(step, stages=2, microbatches=microbatches)
    assert all(stage.parameters[0].rows for stage in parallel.plan(stack, batch()).stages)
    parallel(jax.tree.map(jnp.copy, stack), batch())
    assert_same(seen.take(), expected)


def test_layers_of_ones_own(seen: Seen) -> None:
    """A boundary between prints stays where it is."""

    def layer(h: Any) -> Any:
        jax.debug.callback(seen.note("first"), h, ordered=True)
        mw.layer_boundary()
        jax.debug.callback(seen.note("second"), h.sum(), ordered=True)
        return 2 * h

    parallel = assert_as_under_jit(step_with(layer=layer), seen, stages=2)
    bare = mw.parallelize(step_with(layer=lambda h: (mw.layer_boundary(), 2 * h)[1]), stages=2)
    parts = [
        [len(stage.parameters) for stage in one.plan(weights(), batch()).stages] for one in (parallel, bare)
    ]  # fmt: skip
    assert parts == [[1, 1], [1, 1]]


@pytest.mark.slow
def test_a_plan_is_timed_without_effects(seen: Seen) -> None:
    step = step_with(in_update=lambda loss, **v: jax.debug.callback(seen.note("loss"), loss))
    parallel = mw.parallelize(step, stages=1, refine="measure", time_limit_seconds=5)
    parallel.plan(weights(), batch())
    assert not seen.take()
    parallel(weights(), batch())
    assert len(seen.take()) == 1


def test_a_checkpointed_region_runs_its_effects_once(seen: Seen) -> None:
    def layer(h: Any) -> Any:
        return jax.checkpoint(lambda v: (jax.debug.callback(seen.note("region"), v.sum()), jnp.sin(v))[1])(h)

    parallel = mw.parallelize(step_with(layer=layer), stages=1)
    parallel(weights(), batch())
    assert len(seen.take()) == 1
    assert any("jax.checkpoint" in note for note in parallel.plan(weights(), batch()).notes)


# Refusals


def _with_read_result(w: Any, b: Any) -> Any:
    scale = io_callback(lambda x: np.float32(2), jax.ShapeDtypeStruct((), jnp.float32), b["x"][0, 0])
    return step_with()(w, {**b, "x": scale * b["x"]})


def _in_a_while_loop(loss: Any, **values: Any) -> None:
    jax.lax.while_loop(lambda c: c < 3, lambda c: (jax.debug.print("{}", c), c + 1)[1], jnp.int32(loss))


@jax.custom_jvp
def _printing(x: Any) -> Any:
    jax.debug.print("{}", x.sum())
    return x


_printing.defjvp(lambda primals, tangents: (_printing(*primals), tangents[0]))


@jax.custom_vjp
def _printing_backwards(x: Any) -> Any:
    return x


_printing_backwards.defvjp(lambda x: (x, None), lambda _, ct: (jax.debug.print("{}", ct.sum()), (ct,))[1])


@pytest.mark.parametrize(
    ("step", "name", "got"),
    [
        (_with_read_result, "io_callback", "whose result the step reads"),
        (step_with(in_update=_in_a_while_loop), "jax.debug.print", "a while loop"),
        (step_with(layer=_printing), "jax.debug.print", "a derivative rule of its own"),
        (step_with(layer=_printing_backwards), "jax.debug.print", "a derivative rule of its own"),
        (step_with(lambda loss, **v: checkify.check(loss < 1, "large")), "checkify.check", "not functionalised"),
        (
            step_with(lambda h, **v: jax.debug.inspect_array_sharding(h, callback=print)), "inspect_sharding",
            "an effect on a device",
        ),
    ],
)  # fmt: skip
def test_refusals(step: Callable[..., Any], name: str, got: str) -> None:
    with pytest.raises(PlanError) as refused:
        mw.parallelize(step, stages=1).plan(weights(), batch())
    assert refused.value.refused == name
    assert got in refused.value.got
    assert "test_effects.py" in refused.value.where


def test_printing_backwards_as_the_refusal_advises(seen: Seen) -> None:
    step = step_with(layer=_printing_backwards, value_and_grad=jax.value_and_grad)
    mw.parallelize(step, stages=1).plan(weights(), batch())


# Checks


@pytest.mark.parametrize("where", ["in_loss", "in_update"])
def test_checkify(where: str) -> None:
    def check(loss: Any, **values: Any) -> None:
        checkify.check(loss > 1, "too small: {}", loss)

    checked = checkify.checkify(step_with(**{where: check}))
    (expected, _), (found, _) = jax.jit(checked)(weights(), batch()), mw.parallelize(checked)(weights(), batch())
    assert "too small: 0.00" in (expected.get() or "")
    assert found.get()[:18] == expected.get()[:18]
    if where == "in_update":  # the loss function is still marked
        (error, _) = mw.parallelize(checked, stages=2, microbatches=2)(weights(), batch())
        assert found.get()[:18] == error.get()[:18]


def test_automatic_checks_see_into_the_loss() -> None:
    checked = checkify.checkify(step_with(layer=lambda h: jnp.log(-h)), errors=checkify.float_checks)
    expected, _ = jax.jit(checked)(weights(), batch())
    found, _ = mw.parallelize(checked)(weights(), batch())
    assert "nan generated by primitive: log" in (found.get() or "")
    assert found.get() == expected.get()

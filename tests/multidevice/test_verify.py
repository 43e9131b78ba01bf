"""`verify`: what a plan predicts is what the compiled programs do, and a plan or a runtime that is wrong is caught."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright import cli, zoo
from meshwright._jax.grad import value_and_grad
from meshwright.errors import PlanError
from meshwright.runtime import local_step, step
from meshwright.runtime.pipeline import stage_program
from meshwright.targets import step_target, zoo_target
from meshwright.verify import LeafError, Verification, leaf_error, verify
from meshwright.zoo import mlp

pytestmark = pytest.mark.compiled

WHOLE = jax.ShapeDtypeStruct((64, 64), "float32")
BATCH = jax.ShapeDtypeStruct((256, 64), "float32")


def train_step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    # Scaled so that gradients stay near one: large ones would make every step the same, and the comparison empty.
    loss, grad = value_and_grad(lambda w: 1e-3 * jnp.mean((jax.nn.relu(x @ w) @ w.T) ** 2))(state["w"])
    moment = 0.9 * state["moment"] + 0.1 * grad**2
    return {"w": state["w"] - 0.1 * grad / jnp.sqrt(moment + 1e-3), "moment": moment}, loss


TRAINED = step_target(train_step, ({"w": WHOLE, "moment": WHOLE}, BATCH), name="step")


def failing(verification: Verification) -> set[str]:
    return {check.name for check in verification.checks if not check.passed}


@pytest.fixture(scope="module")
def data_parallel() -> Verification:
    """A step with its state split by ZeRO-1, so that there is an all-gather and a reduce-scatter."""
    return verify(TRAINED, zero=1)


def test_a_step_with_abstract_arguments(data_parallel: Verification) -> None:
    assert data_parallel.passed, data_parallel.checks
    assert data_parallel.reference == "one device"
    assert not data_parallel.not_judged
    size = 64 * 64 * 4
    (stage,) = data_parallel.stages
    assert {k: t.bytes for k, t in stage.compiled.items()} == {"all_gather": size, "reduce_scatter": size}
    assert data_parallel.step_seconds > 0


@pytest.mark.parametrize(
    ("errors", "passes"),
    [([2.0], False), ([math.nan], False), ([2.0, 0.5, 3.0], False), ([2.0, 0.5, 0.6], True)],
)
def test_results_are_off_by_the_median_of_the_starts(
    data_parallel: Verification, errors: list[float], passes: bool
) -> None:
    """In units of what is allowed."""
    first, *others = data_parallel.starts[0]
    starts = tuple(
        (dataclasses.replace(first, deviation=math.inf if math.isnan(e) else e * first.allowed), *others)
        for e in errors
    )
    assert dataclasses.replace(data_parallel, starts=starts).passed == passes


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"predicted": {}}, {"all_gather bytes", "reduce_scatter bytes"}),
        ({"compiled": {}}, {"all_gather bytes", "reduce_scatter bytes"}),
        ({"flops": 1.03}, {"FLOPs"}),
        ({"flops": 0.97}, {"FLOPs"}),
        ({"peak_bytes": 1.3}, {"peak memory"}),
        ({"peak_bytes": 1e6}, {"peak memory", "peak memory within the limit"}),
    ],
)
def test_a_fact_that_was_not_predicted(data_parallel: Verification, changes: dict[str, Any], names: set[str]) -> None:
    (stage,) = data_parallel.stages
    made = {
        name: (getattr(stage, name)[0], getattr(stage, name)[1] * change) if isinstance(change, float) else change
        for name, change in changes.items()
    }
    assert failing(dataclasses.replace(data_parallel, stages=(dataclasses.replace(stage, **made),))) == names


def test_fewer_devices_than_there_are() -> None:
    found = verify(zoo_target(mlp(layers=2, width=32, batch=64)), devices=4, timed_steps=1)
    assert found.plan.num_devices == 4
    assert found.passed, found.checks


def test_more_devices_than_there_are() -> None:
    with pytest.raises(PlanError, match="run on 16 devices"):
        verify(zoo_target(mlp(layers=2, width=32, batch=64)), devices=16)


def test_outputs_of_a_function_without_a_state() -> None:
    target = step_target(
        lambda w, x: {"y": jnp.tanh(x @ w), "best": jnp.argmax(x @ w, axis=1)},
        (WHOLE, jax.ShapeDtypeStruct((32, 64), "float32")),
        name="f",
    )
    found = verify(target, steps=1, timed_steps=1)
    assert found.passed, found.checks


def test_a_step_whose_microbatches_differ_from_its_batch() -> None:
    """The spread of a batch is not the mean of its parts' spreads: the truth is one device with the same parts."""

    def spread(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = value_and_grad(lambda w: jnp.std(x @ w))(w)
        return w - 0.1 * grad, loss

    x = jax.random.normal(jax.random.key(0), (64, 64)) * jnp.arange(64)[:, None]
    target = step_target(spread, (jnp.ones((64, 64)), x), name="spread")
    # Split over the devices, a microbatch is a piece of every device's part: other examples than in an unsplit batch.
    by_batch = {"args?1?": ("x", None)}
    found = verify(target, timed_steps=1, microbatches=4, reduction="mean", mesh=(8,), pins=by_batch)
    assert found.plan.stages[0].inputs[0].spec.dims == (("x",), ())
    assert found.reference == "one device, the same microbatches"
    assert all(error.agrees for error in found.errors)


def noisy(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """With dropout, whose numbers depend on where examples stand."""

    def loss(w: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w)
        kept = jax.random.bernoulli(state["key"], 0.5, h.shape)
        return jnp.mean((jnp.where(kept, h, 0) @ w.T - x) ** 2)

    value, grad = value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.1 * grad, "key": state["key"]}, value


NOISY = step_target(
    noisy, ({"w": 0.1 * jnp.ones((64, 64)), "key": jax.random.key(0)}, jnp.sin(jnp.arange(4096.0).reshape(64, 64))),
    name="noisy",
)  # fmt: skip
FAULTS = {
    "the mean is not taken": (local_step, "share_of_loss", lambda real: lambda *a: 4.0, {"microbatches": 4}),
    "gradients are not summed": (
        local_step, "run_together", lambda real: lambda values, *rest: real([0.9 * v for v in values], *rest), {},
    ),
    "a microbatch is left out": (
        local_step, "_cut", lambda real: lambda x, d, n, b: real(x, d, n, b).at[0].set(0), {"microbatches": 4},
    ),
    "results come in another order": (
        local_step, "_cut", lambda real: lambda x, d, n, b: real(x, d, n, b)[..., ::-1], {"microbatches": 2},
    ),
    "numbers are drawn again": (
        local_step, "MicrobatchRows", lambda real: lambda **rows: real(**{**rows, "number": 0}), {"microbatches": 4},
    ),
    "a stage draws others": (
        stage_program, "MicrobatchRows", lambda real: lambda **rows: real(**{**rows, "number": 0}),
        {"stages": 2, "microbatches": 4},
    ),
    "state goes back a step": (
        step, "put", lambda real: lambda x, sharding: real(1.01 * x if x.dtype == jnp.float32 else x, sharding), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_runtime_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, function, fault, options = FAULTS[name]
    monkeypatch.setattr(where, function, fault(getattr(where, function)))
    found = verify(NOISY, steps=2, timed_steps=0, **options)
    assert any(check.startswith("error after") for check in failing(found))


def test_without_a_fault_it_passes() -> None:
    assert not [name for name in failing(verify(NOISY, steps=2, timed_steps=0, microbatches=4)) if "error" in name]


def test_what_rounding_alone_decides_is_not_judged() -> None:
    """The key bias of an attention has no gradient but rounding, which Adam brings to full size."""
    optimizer = optax.adam(1e-3)

    def attention(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        def loss(p: dict[str, jax.Array]) -> jax.Array:
            q, k, v = x @ p["q"], x @ p["k"] + p["bias"], x @ p["v"]
            return jnp.mean((jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v - x) ** 2)

        value, grads = value_and_grad(loss)(state["p"])
        updates, opt = optimizer.update(grads, state["o"])
        return {"p": optax.apply_updates(state["p"], updates), "o": opt}, value

    parameters = {name: jax.random.normal(jax.random.key(i), (16, 16)) / 4 for i, name in enumerate("qkv")}
    parameters["bias"] = jnp.zeros(16)
    state = {"p": parameters, "o": optimizer.init(parameters)}
    target = step_target(attention, (state, jax.random.normal(jax.random.key(9), (16, 8, 16))), name="attention")
    found = verify(target, timed_steps=0)
    assert not [name for name in failing(found) if "error" in name]
    judged = {one.name for one in found.judged}
    assert any("'q'" in name for name in judged)


def test_a_leaf_against_the_reference() -> None:
    start, wanted = np.zeros(4), np.ones(4)

    def error(got: Any, *reordered: Any, last_place: float = 1e-7) -> LeafError:
        others = [np.asarray(one) for one in reordered]
        return leaf_error("x", np.asarray(got), wanted, start, others, last_place=last_place)

    assert error(wanted).agrees
    assert not error(wanted * 1.001).agrees
    assert error(wanted * 1.001, wanted * 1.0005, wanted).agrees, "within ten times its noise"
    assert not error([1, 1, 1, np.nan]).agrees
    assert not error([1, 1, 1, 2], last_place=0.0).agrees
    assert not error(wanted * 2, wanted * 3).is_judged


TINY = [name for name in zoo.names() if name.endswith("-tiny")]


@pytest.mark.parametrize("name", TINY)
def test_the_models_of_the_zoo(name: str) -> None:
    found = verify(zoo_target(zoo.build(name)), steps=2, timed_steps=0)
    assert found.passed, [check for check in found.checks if not check.passed]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"preset": "zero(stage=3)"}, {"stages": 2, "microbatches": 2}], ids=str)
@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny", "wresnet-tiny", "unet-tiny"])
def test_the_models_of_the_zoo_by_other_plans(name: str, options: dict[str, Any]) -> None:
    found = verify(zoo_target(zoo.build(name)), steps=2, timed_steps=0, **options)
    assert not [check for check in failing(found) if "memory" not in check]


def linen_step() -> Any:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return x + nn.Dense(32)(nn.gelu(nn.LayerNorm()(nn.Dense(64)(x))))

    model = Block()

    def run(params: Any, x: jax.Array) -> Any:
        value, grads = value_and_grad(lambda p: jnp.mean((model.apply(p, x) - jnp.roll(x, 1, axis=1)) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return run, model.init(jax.random.key(0), jnp.ones((2, 32)))


def nnx_step() -> Any:
    from flax import nnx

    model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(64, 32, rngs=nnx.Rngs(1)))
    graph, params = nnx.split(model)

    def run(params: Any, x: jax.Array) -> Any:
        value, grads = value_and_grad(lambda p: jnp.mean((nnx.merge(graph, p)(x) - x**2) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return run, params


def equinox_step() -> Any:
    import equinox as eqx

    params, static = eqx.partition(eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0)), eqx.is_array)

    def run(params: Any, x: jax.Array) -> Any:
        value, grads = value_and_grad(lambda p: jnp.mean((jax.vmap(eqx.combine(p, static))(x) - x**2) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return run, params


@pytest.mark.parametrize("make", [linen_step, nnx_step, equinox_step])
def test_programs_of_each_framework(make: Any) -> None:
    run, params = make()
    found = verify(step_target(run, (params, jax.random.normal(jax.random.key(1), (64, 32))), name="f"), timed_steps=0)
    assert found.passed, [check for check in found.checks if not check.passed]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "small.py"
    path.write_text(
        "import jax, jax.numpy as jnp\n"
        "def f():\n"
        "    args = jax.ShapeDtypeStruct((64, 64), 'float32'), jax.ShapeDtypeStruct((32, 64), 'float32')\n"
        "    return lambda w, x: jnp.sum(jnp.tanh(x @ w)), args\n"
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", f"{path}:f", "--mesh", "8", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert found["passed"]
    assert found["step_seconds"]["measured"] > 0


def test_the_command_for_stages_a_preset_and_a_saved_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    for options in (["--stages", "2", "--microbatches", "2"], ["--preset", "zero(stage=3)"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["verify", "mlp-tiny", *options, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert ended.value.code == int(not found["passed"])
    with pytest.raises(SystemExit):
        cli.main(["plan", "mlp-tiny", "--cluster", "local", "--out", str(plan)])
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "mlp-tiny", "--plan", str(plan)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == "passed"

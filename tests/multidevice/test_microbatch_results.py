"""With microbatches, what a loss function returns beside the loss is what the whole batch would have given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from one_device import TENSOR, assert_as_on_one_device

import meshwright as mw
from meshwright import zoo
from meshwright._jax.jaxpr import open_jaxpr
from meshwright.cluster import load_cluster
from meshwright.errors import PlanError
from meshwright.lowering.local_step import LocalStep
from meshwright.planning.plan_for import plan_for
from meshwright.program.reduction import ReductionWarning
from meshwright.program.trace import trace_program

_RANDOM = np.random.default_rng(0)
X, Y = (jnp.asarray(_RANDOM.normal(size=(32, 16)), jnp.float32) for _ in range(2))
PARAMETERS = {"out": jnp.asarray(_RANDOM.normal(size=(16, 16)) * 0.3, jnp.float32)}


def error(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((y - target) ** 2)


def test_results_beside_the_loss_are_those_of_the_whole_batch() -> None:
    def step(p, b):
        def loss(p):
            y = b[0] @ p["out"]
            aux = {
                "max": y.max(), "min": jnp.min(y, axis=0), "sum": y.sum(), "mean": jnp.abs(y).mean(),
                "count": jnp.array(y.shape[0]), "positive": jnp.sum(y[:, 0] > 0), "weight": jnp.sum(p["out"]),
                "rows": y * 2, "truth": jnp.array(True),
            }  # fmt: skip
            return error(y, b[1]), aux

        (value, aux), gradients = mw.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), {"loss": value, **aux}

    assert_as_on_one_device(step, PARAMETERS, (X, Y), microbatches=4)
    assert_as_on_one_device(step, PARAMETERS, (X, Y), microbatches=2, reduction="mean", **TENSOR)


def test_what_is_not_linear_in_a_sum_is_made_of_the_whole_of_it() -> None:
    def step(p, b):
        def loss(p):
            y = b[0] @ p["out"]
            count, total = jnp.sum(y > 0), jnp.sum(y)
            aux = {
                "thirds": count // 3, "square": total * total, "ratio": total / jnp.sum(y * y), "shifted": total + 1.0,
                "less": jnp.mean(y) - total / 7, "less a count": total - count, "inverse": 3.0 / total, "minus": -total,
            }  # fmt: skip
            return 0.5 * error(y, b[1]) + jnp.mean(y) * jnp.sum(p["out"]) - jnp.sum(p["out"] ** 2) / 3, aux

        (value, aux), gradients = mw.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), {"loss": value, **aux}

    assert_as_on_one_device(step, PARAMETERS, (X, Y))
    assert_as_on_one_device(step, PARAMETERS, (X, Y), **TENSOR)


@pytest.mark.parametrize("row", [0, 31])
def test_any_and_all_are_of_the_whole_batch(row: int) -> None:
    """What one example decides, in the first microbatch or in the last."""

    def step(p, b):
        def loss(p):
            y = b[0] @ p["out"]
            return error(y, b[1]), {
                "any": jnp.any(b[0] > 50),
                "all": jnp.all(b[0] < 50),
                "finite": jnp.isfinite(y).all(),
            }

        (value, aux), gradients = mw.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - 1e-4 * aux["all"] * g, p, gradients), {"loss": value, **aux}

    assert_as_on_one_device(step, PARAMETERS, (X.at[row, 3].set(100.0), Y), microbatches=4)
    assert_as_on_one_device(step, PARAMETERS, (X.at[row, 3].set(100.0), Y), microbatches=4, **TENSOR)


@pytest.mark.parametrize("other", [jnp.std, lambda y: jnp.argmax(y) == 3], ids=["deviation", "truth"])
def test_a_result_that_does_not_combine_is_said_to(other) -> None:
    def step(p, b):
        def loss(p):
            y = b[0] @ p["out"]
            return error(y, b[1]), other(y)

        (value, aux), gradients = mw.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), (value, aux)

    with pytest.warns(ReductionWarning, match=r"test_microbatch_results.py:\d+.* is neither a mean nor a sum"):
        mw.parallelize(step, microbatches=2).plan(PARAMETERS, (X, Y))


def _trained(loss):
    def step(p, b):
        value, gradients = mw.value_and_grad(lambda p: loss(b[0] @ p["out"], b[1]))(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value

    return step


def _gradient_by_its_norm() -> Any:
    function = jax.custom_vjp(lambda y: y)
    function.defvjp(lambda y: (y, None), lambda _, g: (g / jnp.linalg.norm(g),))
    return function


def _own_block(y: jax.Array) -> jax.Array:
    """A region by hand in which blocks of the batch are told apart."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(lambda y: y * jax.lax.axis_index("rows"), mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))(
        y
    )


_MEETINGS = {
    "pairs": lambda y, t: jax.nn.softplus(y @ t.T),
    "contrastive": lambda y, t: -jnp.diag(jax.nn.log_softmax(y @ t.T)),
    "distances": lambda y, t: jnp.sum((y[:, None] - y[None]) ** 2, -1),
    "in a checkpoint": lambda y, t: jax.checkpoint(lambda y: jnp.tanh(y @ y.T))(y),
    "the next example's": lambda y, t: y * jnp.roll(t, 1, axis=0),
    "shifted": lambda y, t: y[1:] - y[:-1],
    "padded": lambda y, t: y - jax.lax.pad(y, 0.0, ((-1, 1, 0), (0, 0, 0))),
    "the next one's index": lambda y, t: y * y[(jnp.arange(len(y)) + 1) % len(y)],
    "the other end": lambda y, t: y * y[len(y) - 1 - jnp.arange(len(y))],
    "halves": lambda y, t: y[: len(y) // 2] - y[len(y) // 2 :],
    "split in two": lambda y, t: jnp.prod(jnp.stack(jnp.split(y, 2)), 0),
    "two by half": lambda y, t: jnp.prod(y.reshape(2, -1, 16), 0),
    "the worse half": lambda y, t: jax.lax.top_k(jnp.mean(y, 1), len(y) // 2)[0],
    "sorted": lambda y, t: jnp.sort(y, 0) * t,
    "ranked": lambda y, t: jnp.argsort(jnp.argsort(y[:, 0])) * t[:, 0],
    "running": lambda y, t: jnp.cumsum(y, 0),
    "spectrum": lambda y, t: jnp.abs(jnp.fft.fft(y, axis=0)),
    "convolved": lambda y, t: jax.lax.conv_general_dilated(y.T[:, None], jnp.ones((1, 1, 3)), (1,), "SAME"),
    "one row": lambda y, t: jax.lax.dynamic_update_slice(y, jnp.zeros((1, 16)), (3, 0)),
    "batch normalised": lambda y, t: ((y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-3)) ** 4,
    "time and batch": lambda y, t: jnp.stack([y, t]).reshape(-1, 16) * jnp.stack([y, t], 1).reshape(-1, 16),
    "gradient by its norm": lambda y, t: _gradient_by_its_norm()(y),
    "own block": lambda y, t: _own_block(y),
    "chosen by the mean": lambda y, t: jax.lax.cond(jnp.mean(y) > 0, jnp.sin, jnp.cos, y),
}


@pytest.mark.parametrize("name", _MEETINGS)
def test_losses_in_which_examples_meet_are_not_cut(name: str) -> None:
    loss = _trained(lambda y, t: jnp.mean(_MEETINGS[name](y, t)))
    with pytest.raises(PlanError, match=r"examples meet each other.*test_microbatch_results.py"):
        mw.parallelize(loss, microbatches=4).plan(PARAMETERS, (X, Y))


def test_examples_may_meet_within_a_microbatch_where_the_user_says_so() -> None:
    step = _trained(lambda y, t: jnp.mean(_MEETINGS["batch normalised"](y, t)))
    assert mw.plan_for(step, (PARAMETERS, (X, Y)), cluster="p3.16xlarge:1").plan.microbatches == 1
    found = mw.plan_for(step, (PARAMETERS, (X, Y)), cluster="p3.16xlarge:1", stages=2).plan
    assert found.microbatches == 1
    assert any("test_microbatch_results.py" in note and "no others are possible" in note for note in found.notes)
    told = mw.parallelize(step, microbatches=4, reduction="mean").plan(PARAMETERS, (X, Y))
    assert any("every microbatch computes it of its own examples" in note for note in told.notes)


MASK = jnp.asarray(_RANDOM.random(32) < 0.7, jnp.float32)
LABELS = jnp.asarray(_RANDOM.integers(0, 16, 32))


@jax.custom_vjp
def _clipped(y: jax.Array) -> jax.Array:
    return y


_clipped.defvjp(lambda y: (y, None), lambda _, g: (jnp.clip(g, -1e-4, 1e-4),))


def _kept_apart(p: Any, b: Any) -> Any:
    """What microbatches may seem not to allow and do: a mean over what is no padding, statistics of the batch without
    parameters, one entry of each example, a loop over examples, views of an example, regions by hand."""
    x, mask, labels = b["x"], b["mask"], b["labels"]
    count, rows = mask.sum(), jnp.arange(len(x))
    y = x @ p["out"]
    each = jnp.mean(y**2, -1)
    padded = jnp.where(count > 0, (each * mask).sum() / jnp.where(count > 0, count, 1.0), 0.0)
    advantage = (x[:, 0] - x[:, 0].mean()) / (x[:, 0].std() + 1e-8)
    balanced = each / jnp.bincount(labels, length=16)[labels]
    picked = jax.nn.log_softmax(y)[rows, labels] + y.at[rows, labels].set(0.0).sum(-1)
    looped = jax.lax.map(lambda row: jnp.sum(jnp.tanh(row)), y)
    one, other = jnp.split(jnp.concatenate([x, 2 * x]) @ p["out"], 2)
    turned = jnp.diff(jnp.stack([x, 2 * x]).reshape(-1, 16).reshape(2, -1, 16) @ p["out"], axis=0)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    by_hand = jax.shard_map(
        lambda y: jax.nn.softmax(y + y[..., :1]), mesh=mesh, in_specs=P("rows"), out_specs=P("rows")
    )
    valid = jnp.where(jnp.arange(len(x)) < 29, each, 0.0)
    value = padded - jnp.mean(each * advantage) + jnp.mean(balanced) - jnp.mean(picked) + jnp.mean(looped)
    value += jnp.mean((one - other) ** 2) + jnp.mean(turned**2) + jnp.mean(by_hand(y) ** 2) + jnp.mean(valid)
    value += (
        jnp.mean(_clipped(y) ** 2) + jnp.mean(y[::2] * y[1::2]) + jax.lax.cond(x.mean() > 0, jnp.sum, jnp.max, p["out"])
    )
    return value, {"count": count, "rows": jnp.arange(len(x)), "each": each}


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2, "mesh": (8,), "pins": {"args[1]['x']": ("x", None)}},
        {"microbatches": 2, "stages": 2},
        pytest.param({"microbatches": 2, "preset": "data_parallel()"}, marks=pytest.mark.slow),
        pytest.param({"microbatches": 2, "preset": "zero(stage=3)"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_losses_in_which_examples_are_kept_apart(options: dict[str, Any]) -> None:
    def step(p, b):
        (value, aux), gradients = mw.value_and_grad(_kept_apart, has_aux=True)(p, b)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), {"loss": value, **aux}

    assert_as_on_one_device(step, PARAMETERS, {"x": X, "mask": MASK, "labels": LABELS}, steps=2, **options)


def test_groups_of_examples_are_not_taken_apart() -> None:
    """Pairs of neighbours, where a device's part of a microbatch is one example."""
    step = _trained(lambda y, t: jnp.mean((y[::2] - y[1::2]) ** 2))
    options = {"mesh": (8,), "pins": {"args[1][0]": ("x", None)}}
    with pytest.raises(PlanError, match=r"16 groups of neighbouring examples.*try microbatches=2"):
        mw.parallelize(step, cluster="local", microbatches=4, **options).plan(PARAMETERS, (X, Y))
    assert_as_on_one_device(step, PARAMETERS, (X, Y), microbatches=2, **options)
    told = mw.parallelize(step, cluster="local", microbatches=4, reduction="mean", **options).plan(PARAMETERS, (X, Y))
    assert any("groups of 2 neighbouring examples" in note for note in told.notes)


def test_halves_of_a_batch_side_by_side_are_cut() -> None:
    # Two views of each example, one after the other along the last dim or as a dim of their own.
    def loss(y, t):
        one, other = jnp.split(jnp.stack([y, t], axis=1).reshape(-1, 2, y.shape[1]), 2, axis=1)
        return jnp.mean((one - other) ** 2)

    assert_as_on_one_device(_trained(loss), PARAMETERS, (X, Y), microbatches=4)


def test_a_result_that_compares_examples_is_refused() -> None:
    def step(p, b):
        def loss(p):
            y = b[0] @ p["out"]
            return error(y, b[1]), y @ y.T

        (value, aux), gradients = mw.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), (value, aux)

    with pytest.raises(PlanError, match=r"a result of shape \(32, 32\) in which examples.*meet.*results.py:\d+"):
        mw.parallelize(step, microbatches=2).plan(PARAMETERS, (X, Y))


def test_an_array_with_the_batch_in_two_dims_is_refused() -> None:
    def step(p, b):
        mask = jnp.eye(b[0].shape[0])
        value, gradients = mw.value_and_grad(lambda p: jnp.mean(mask @ (b[0] @ p["out"])))(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value

    with pytest.raises(PlanError, match=r"\(32, 32\) with the batch in more than one dim"):
        mw.parallelize(step, microbatches=2).plan(PARAMETERS, (X, Y))


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "unet-tiny", "bert-tiny"])
def test_microbatches_of_one_example_have_a_reduction(name) -> None:
    model = zoo.build(name)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape[1:]), x.dtype), model.example_batch)
    program = trace_program(model.step, (model.example_state, batch), microbatches=8)
    assert program.reduction == "mean"


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_number_that_is_summand_and_broadcast_is_summed_once(microbatches: int) -> None:
    """The mean of a split parameter, whose cotangent is made of summands too, scales that parameter."""
    rng = np.random.default_rng(1)
    shapes = {"first": (64, 256), "second": (256, 64)}
    state = {name: jnp.asarray(rng.normal(size=shape) * 0.1, jnp.float32) for name, shape in shapes.items()}
    batch = tuple(jnp.asarray(rng.normal(size=(256, 64)), jnp.float32) for _ in range(2))

    def step(p, b):
        def loss(p):
            first, second = (w * jnp.mean(jnp.abs(w)) for w in (p["first"], p["second"]))
            return error(jnp.tanh(b[0] @ first) @ second, b[1])

        value, gradients = mw.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value

    assert_as_on_one_device(step, state, batch, preset="fsdp_tp(tp=4)", microbatches=microbatches)


def _regularised(p, b):
    """A loss of parts that are summands over different devices, or over none; one is not linear in a sum."""

    def loss(p):
        h = b[0] @ p["out"]
        norm, second = jnp.sum(p["out"] ** 2), sum([jnp.mean(h), 3.0])
        value = second / 2 + error(h, b[1]) + 0.01 * norm - jnp.sqrt(norm) - (0.25 - jnp.mean(jnp.abs(h)))
        return value, {"norm": norm, "less": 1.0 - second}

    (value, aux), gradients = mw.value_and_grad(loss, has_aux=True)(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), {"loss": value, **aux}


@pytest.mark.parametrize("where", [{"preset": "data_parallel()"}, {"preset": "fsdp_tp(tp=2)"}, TENSOR], ids=str)
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_what_is_added_may_be_summands_over_different_devices(where, microbatches: int) -> None:
    assert_as_on_one_device(_regularised, PARAMETERS, (X, Y), **where, microbatches=microbatches, reduction="mean")


def _sums_of_numbers(step: Any, arguments: Any, **options: Any) -> int:
    """Sums of single numbers over devices in the loop over four microbatches."""
    planning = plan_for(step, arguments, cluster=load_cluster("cpu"), microbatches=4, **options)
    local = LocalStep(planning.program, planning.plan)
    traced = jax.make_jaxpr(local.on(local.abstract_mesh(), "cpu"))(*local.avals())
    loops = [e for e in _equations(open_jaxpr(traced)) if e.primitive.name == "scan" and e.params["length"] == 4]
    assert loops
    inside = [e for loop in loops for e in _equations(open_jaxpr(loop.params["jaxpr"]))]
    return sum(e.primitive.name.startswith("psum") and e.outvars[0].aval.shape == () for e in inside)


@pytest.mark.parametrize("name", ["gpt-tiny", "wresnet-tiny", pytest.param("moe-tiny", marks=pytest.mark.slow)])
def test_no_microbatch_waits_for_the_sum_of_its_loss(name: str) -> None:
    """Data parallel in four microbatches: devices meet to sum the loss once a step, not in the loop."""
    target = zoo.build(name, global_batch=32)
    arguments = target.example_state, target.example_batch
    assert _sums_of_numbers(target.step, arguments, preset="data_parallel()") == 0


def test_of_a_quotient_of_sums_the_lower_one_is_summed_in_every_microbatch() -> None:
    def step(p, b):
        def loss(p):
            weights = jnp.abs(b[1])
            return jnp.sum((b[0] @ p["out"]) ** 2 * weights) / jnp.sum(weights)

        value, gradients = mw.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value

    assert _sums_of_numbers(step, (PARAMETERS, (X, Y)), preset="data_parallel()", reduction="mean") == 1
    assert_as_on_one_device(step, PARAMETERS, (X, Y), preset="data_parallel()")
    assert_as_on_one_device(step, PARAMETERS, (X, Y), **TENSOR)


def test_a_number_is_summed_in_every_microbatch_that_needs_the_whole_of_it() -> None:
    def step(p, b):
        value, gradients = mw.value_and_grad(lambda p: jnp.sqrt(error(b[0] @ p["out"], b[1])))(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value

    assert _sums_of_numbers(step, (PARAMETERS, (X, Y)), preset="data_parallel()", reduction="mean") == 1


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from _equations(open_jaxpr(inner))


def _behind_scatters(name: str, microbatches: int) -> list[list[str]]:
    """What reads each scattered gradient of ZeRO-3."""
    target = zoo.build(name, global_batch=32)
    arguments = target.example_state, target.example_batch
    planning = plan_for(
        target.step, arguments, cluster=load_cluster("cpu"), microbatches=microbatches, preset="zero(stage=3)"
    )
    local = LocalStep(planning.program, planning.plan)
    traced = jax.make_jaxpr(local.on(local.abstract_mesh(), "cpu"))(*local.avals())
    equations = list(_equations(open_jaxpr(traced)))
    read_by: dict[int, list[str]] = {}
    for equation in equations:
        for operand in equation.invars:
            read_by.setdefault(id(operand), []).append(equation.primitive.name)
    scatters = [e for e in equations if e.primitive.name == "reduce_scatter"]
    assert scatters
    return [read_by.get(id(e.outvars[0]), []) for e in scatters]


def test_a_scattered_gradient_stays_in_its_microbatch() -> None:
    """XLA's TPU compiler takes a reduce-scatter out of a loop that adds its results up, but for a barrier behind it."""
    assert all(names == ["optimization_barrier"] for names in _behind_scatters("gpt-tiny", 4))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_layers_scattered_gradients_may_be_sent_beside_the_next(microbatches: int) -> None:
    """XLA runs the reduce-scatters of a scan's layers beside the next layer, but for a barrier behind them."""
    readers = _behind_scatters("llama-tiny", microbatches)
    held = [names for names in readers if "optimization_barrier" in names]
    assert len(held) <= (0 if microbatches == 1 else 3)  # embedding, head and last norm are no part of the scan

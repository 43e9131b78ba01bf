"""Programs that name a mesh: one that is set around the call, constraints to it, Explicit axes, manual regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import with_sharding_constraint as constrained
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from one_device import assert_equal_trees

import meshwright as mw
from meshwright.compare import compare
from meshwright.errors import PlanError
from meshwright.planning.plan_for import plan_for
from meshwright.searches import run_searches

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
STAGES = {"stages": 2, "microbatches": 4}


def weights() -> Any:
    keys = jax.random.split(jax.random.key(0))
    return {"a": 0.2 * jax.random.normal(keys[0], (16, 16)), "b": 0.2 * jax.random.normal(keys[1], (16, 16))}


def batch() -> Any:
    return jax.random.normal(jax.random.key(2), (32, 16))


def mesh(axis_type: AxisType = AUTO) -> Any:
    return jax.make_mesh((8,), ("data",), axis_types=(axis_type,))


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> Any:
        value, grads = mw.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value

    return step


def plain(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)


def bare(w: Any, x: Any) -> Any:
    return jnp.mean((constrained(jnp.tanh(x @ w["a"]), P("data")) @ w["b"]) ** 2)


@jax.custom_vjp
def sine(x: Any) -> Any:
    return constrained(jnp.sin(x), P("data"))


sine.defvjp(lambda x: (constrained(jnp.sin(x), P("data")), x), lambda x, g: (constrained(g * jnp.cos(x), P("data")),))


def custom(w: Any, x: Any) -> Any:
    return jnp.mean((sine(x @ w["a"]) @ w["b"]) ** 2)


@jax.custom_vjp
def gated(x: Any, gate: Any) -> Any:
    return x * gate


gated.defvjp(lambda x, gate: (x * gate, gate), lambda gate, g: (g * gate, None))


def without_cotangent(w: Any, x: Any) -> Any:
    """Of an operand that a rule has none for."""
    h = constrained(jnp.tanh(x @ w["a"]), P("data"))
    return jnp.mean((gated(h, constrained(jnp.cos(h), P("data"))) @ w["b"]) ** 2)


def nested(w: Any, x: Any) -> Any:
    def body(h: Any, _: Any) -> Any:
        return constrained(jnp.tanh(h @ w["a"]), P("data")), None

    h, _ = jax.lax.scan(jax.checkpoint(body), x, None, length=2)
    return jnp.mean((h @ w["b"]) ** 2)


def resharded(w: Any, x: Any) -> Any:
    h = jax.sharding.reshard(jnp.tanh(x @ w["a"]), P(None, "data"))
    return jnp.mean((jax.sharding.reshard(h, P("data")) @ w["b"]) ** 2)


def typed(w: Any, x: Any) -> Any:
    """What JAX infers from the types: in_specs of the manual region, and a result that has to be said."""
    h = jax.shard_map(lambda x: jnp.tanh(x) * x.shape[0], out_specs=P("data"))(x)
    return jnp.mean(jnp.einsum("ij,jk->ik", h, w["a"], out_sharding=P("data")) @ w["b"])


@pytest.mark.parametrize(
    ("axis_type", "loss", "options"),
    [
        (AUTO, bare, {}),
        (AUTO, bare, STAGES),
        (AUTO, without_cotangent, {}),
        pytest.param(AUTO, plain, {}, marks=pytest.mark.slow),
        pytest.param(AUTO, custom, {}, marks=pytest.mark.slow),
        pytest.param(AUTO, custom, STAGES, marks=pytest.mark.slow),
        pytest.param(AUTO, nested, {"microbatches": 4}, marks=pytest.mark.slow),
        (EXPLICIT, typed, {}),
        pytest.param(EXPLICIT, plain, STAGES, marks=pytest.mark.slow),
        pytest.param(EXPLICIT, resharded, {"microbatches": 4}, marks=pytest.mark.slow),
        pytest.param(EXPLICIT, resharded, STAGES, marks=pytest.mark.slow),
    ],
)
def test_a_step_called_under_a_mesh(axis_type: AxisType, loss: Any, options: Any) -> None:
    user = mesh(axis_type)
    with jax.set_mesh(user):
        x = jax.device_put(batch(), NamedSharding(user, P("data")))
        reference, parallel = jax.jit(step_of(loss)), mw.parallelize(step_of(loss), **options)
        expected, value = reference(weights(), x)
        found, got = parallel(weights(), x)
        assert_equal_trees(got, value)
        again = reference(expected, x)
        found, got = parallel(found, x)  # the state is on no mesh of the user's now: planned once all the same
        assert_equal_trees(got, again[1])
        assert len({id(one) for one in parallel._steps.values()}) == 1
        assert_equal_trees(parallel.init(weights), weights())
        assert not jax.sharding.get_abstract_mesh().empty


def test_under_a_mesh_that_is_entered() -> None:
    with pytest.warns(DeprecationWarning, match="with mesh"):
        entered = mesh().__enter__()
    try:
        assert_equal_trees(
            mw.parallelize(step_of(bare))(weights(), batch()), jax.jit(step_of(bare))(weights(), batch())
        )
    finally:
        entered.__exit__(None, None, None)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_plans_are_compared_under_a_mesh(axis_type: AxisType) -> None:
    """As of a module that sets one where it is imported (Qwen3 of jax-llm-examples)."""
    args = (weights(), jax.ShapeDtypeStruct(batch().shape, batch().dtype))
    with jax.set_mesh(mesh(axis_type)):
        loss = typed if axis_type == EXPLICIT else bare
        auto, *presets = compare(step_of(loss), args, cluster="local")
        (found,) = run_searches(step_of(loss), args, cluster="local", methods=["bfs"], time_limit_seconds=5)
        assert not jax.sharding.get_abstract_mesh().empty
    assert auto.step_seconds <= min(one.step_seconds for one in presets) < float("inf")
    assert found.points or found.reason


def followed(loss: Any, x: Any) -> list[str]:
    """What the plan's notes say of the step's wishes about layouts."""
    return [note for note in plan_for(step_of(loss), (weights(), x)).plan.notes if note.startswith("layouts are")]


def test_constraints_are_noted_with_their_lines() -> None:
    with jax.set_mesh(mesh()):
        (note,) = followed(bare, batch())
    assert "not followed: with_sharding_constraint at" in note
    assert "test_users_meshes.py" in note
    assert "(bare) to P('data',)" in note or "(bare) to PartitionSpec('data',)" in note
    x = jax.device_put(batch(), NamedSharding(mesh(EXPLICIT), P("data")))
    with jax.set_mesh(mesh(EXPLICIT)):
        (note,) = followed(plain, x)
    assert "Explicit axes (data=8)" in note
    assert followed(plain, batch()) == []


def scattered(w: Any, x: Any) -> Any:
    """Indices that are constrained, and a scatter: what follows a constraint has its mesh in its type."""
    i = constrained(jnp.arange(x.shape[0]), NamedSharding(mesh(), P("data")))[:, None]
    top = jnp.argsort(x, axis=1)[:, :2]
    return jnp.mean(jnp.zeros(x.shape).at[i, top].set((x @ w["a"] @ w["b"])[:, :2]))


def iota_like(w: Any, x: Any) -> Any:
    h = constrained(x @ w["a"], NamedSharding(mesh(), P("data")))
    mask = jax.lax.broadcasted_iota(jnp.int32, h.shape, 1) <= jnp.argmax(x, axis=1)[:, None]
    return jnp.mean(jnp.where(mask, h, 0.0) @ w["b"] + jax.nn.one_hot(jnp.argmax(h, axis=1), 16))


def experts(over: Any) -> Callable[..., Any]:
    """A manual region over a mesh axis of one device, with what JAX cannot map (ragged_dot) and what talks."""

    def body(x: Any, a: Any, b: Any) -> Any:
        h = x @ a
        if over.size == 1:
            h = jax.lax.ragged_dot(x, jnp.stack([a, b]), jnp.full((2,), x.shape[0] // 2, jnp.int32))
        h = jax.lax.psum(h, "expert") + jax.lax.axis_index("expert")
        h = jax.lax.all_to_all(jax.lax.all_gather(h, "expert", tiled=True), "expert", 0, 0, tiled=True)
        return jax.lax.psum_scatter(jax.lax.ppermute(h, "expert", [(0, 0)]), "expert", tiled=True)

    def loss(w: Any, x: Any) -> Any:
        region = jax.shard_map(
            body, mesh=over, in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=False
        )  # fmt: skip
        return jnp.mean(region(x, w["a"], w["b"]) ** 2)

    return loss


def one() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "expert"))


def eight() -> Mesh:
    return Mesh(np.array(jax.devices())[None], ("expert", "data"))


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (lambda: scattered, {}),
        (lambda: experts(one()), {}),
        pytest.param(lambda: iota_like, {}, marks=pytest.mark.slow),
        pytest.param(lambda: iota_like, {**STAGES, "reduction": "mean"}, marks=pytest.mark.slow),
        pytest.param(lambda: experts(eight()), {}, marks=pytest.mark.slow),
    ],
)
def test_a_program_that_names_a_mesh(loss: Any, options: Any) -> None:
    step = step_of(loss())
    assert_equal_trees(mw.parallelize(step, **options)(weights(), batch()), jax.jit(step)(weights(), batch()))


def test_a_region_that_cannot_be_mapped_is_refused() -> None:
    def loss(w: Any, x: Any) -> Any:
        def body(x: Any, a: Any) -> Any:
            return jax.lax.ragged_dot(x, jnp.stack([a, a]), jnp.full((2,), x.shape[0] // 2, jnp.int32))

        return jnp.mean(jax.shard_map(body, mesh=mesh(), in_specs=(P("data"), P()), out_specs=P("data"))(x, w["a"]))

    with pytest.raises(PlanError, match=r"a shard_map.*ragged_dot.*test_users_meshes\.py"):
        plan_for(step_of(loss), (weights(), batch()))

"""Every conversion between specs moves the value rightly, and its derivative is its dual.

For each pair of specs of a matrix over a 2x2 mesh: shards of a random matrix in the source spec are converted and held
against the shards of the target spec; then a linear loss with known gradient is taken of the result, in the way a
reader in the target spec would, and the gradient that comes back is held against the source spec.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshwright.lowering.collectives import run_conversion
from meshwright.sharding import Spec, convert

AXES = {"x": 2, "y": 2}
SHAPE = (4, 8)


def specs(*, partial: bool) -> list[Spec]:
    """All specs of a matrix over two axes, both orders where two axes split one dim."""
    found = set()
    for states in product(["whole", "broadcast", *(["partial"] if partial else []), 0, 1], repeat=2):
        for order in (("x", "y"), ("y", "x")):
            state = dict(zip(AXES, states, strict=True))
            dims = tuple(tuple(a for a in order if state[a] == d) for d in range(2))
            found.add(
                Spec(
                    dims,
                    partial=frozenset(a for a in AXES if state[a] == "partial"),
                    broadcast=frozenset(a for a in AXES if state[a] == "broadcast"),
                )
            )
    return sorted(found, key=repr)


def position(axes: tuple[str, ...], device: dict[str, int]) -> int:
    index = 0
    for axis in axes:
        index = index * AXES[axis] + device[axis]
    return index


def block(matrix: np.ndarray, spec: Spec, device: dict[str, int]) -> np.ndarray:
    """One device's block of a matrix, partial axes left out of account."""
    for dim, axes in enumerate(spec.dims):
        pieces = int(np.prod([AXES[a] for a in axes]))
        matrix = np.split(matrix, pieces, axis=dim)[position(axes, device)]
    return matrix


def summand(axes: frozenset[str], device: dict[str, int]) -> float:
    """Weights of the summands over partial axes: they add up to one."""
    weight = 1.0
    for axis in axes:
        weight *= (0.25, 0.75)[device[axis]]
    return weight


DEVICES = [{"x": i, "y": j} for i in range(2) for j in range(2)]


def stacked(matrix: np.ndarray, spec: Spec, over: frozenset[str]) -> np.ndarray:
    """Shards of all devices, `[2, 2, ...]`; a sum over the axes `over`."""
    shards = [block(matrix, spec, d) * summand(over, d) for d in DEVICES]
    return np.stack(shards).reshape(2, 2, *shards[0].shape)


SOURCES = specs(partial=True)


@pytest.mark.parametrize("source", SOURCES[::3], ids=repr)
def test_conversions_move_the_value_and_its_cotangent(source: Spec) -> None:
    random = np.random.default_rng(0)
    matrix, weights = random.normal(size=SHAPE), random.normal(size=SHAPE)
    targets = [t for t in specs(partial=False) if convert(source, t) is not None]
    assert targets
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def local(shard: jax.Array, *readers: jax.Array) -> Any:
        shard, results = shard[0, 0], []
        for target, reader in zip(targets, readers, strict=True):
            conversion = convert(source, target)
            assert conversion is not None

            def loss(x: jax.Array, conversion: Any = conversion, reader: jax.Array = reader) -> Any:
                moved = run_conversion(x, conversion, AXES, differentiated=True)
                return jnp.sum(moved * reader[0, 0]), moved

            grad, moved = jax.grad(loss, has_aux=True)(shard)
            results.append((moved[None, None], grad[None, None]))
        return results

    split = PartitionSpec("x", "y")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    # A reader in a broadcast spec gives each device a part of the cotangent.
    readers = [stacked(weights, target, target.broadcast) for target in targets]
    found = run(stacked(matrix, source, source.partial), *readers)
    for target, (moved, grad) in zip(targets, found, strict=True):
        np.testing.assert_allclose(
            moved, stacked(matrix, target, frozenset()), rtol=1e-5, atol=1e-6, err_msg=repr(target)
        )
        given = np.asarray(grad)
        for axis in sorted(source.broadcast):
            # The cotangent of a broadcast value is partial: its summands add up to the whole.
            dim = list(AXES).index(axis)
            given = np.broadcast_to(given.sum(axis=dim, keepdims=True), given.shape)
        expected = stacked(weights, source, frozenset())
        np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-5, err_msg=f"{source} to {target}")


def test_conversions_that_cannot_exist() -> None:
    whole = Spec(((), ()))
    assert convert(whole, Spec(((), ()), partial=frozenset({"x"}))) is None
    assert convert(Spec(((), ()), broadcast=frozenset({"x"})), whole) is None
    assert convert(whole, whole) == ()


def test_a_spec_gives_each_axis_one_state() -> None:
    with pytest.raises(ValueError, match="two states"):
        Spec((("x",), ("x",)))


def test_small_moves_come_first() -> None:
    """A value that is partial over one axis and changes the dim another splits is exchanged before it is summed."""
    steps = convert(Spec((("x",), ()), partial=frozenset({"y"})), Spec(((), ("x",))))
    assert steps is not None
    assert [s.kind for s in steps] == ["all_to_all", "all_reduce"]
    assert [s.buffer_fraction(AXES) for s in steps] == [0.5, 0.5]

"""Convolutions and pooling split spatially: numbers of one device, and as many bytes exchanged as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from rule_cases import Case, conv, integers, normal, pool
from rule_validation import validate_rules

from meshwright._jax.hlo import read_compiled
from meshwright._jax.jaxpr import Equation
from meshwright.program.halo import halo_bytes
from meshwright.program.local import evaluate_local
from meshwright.program.rules import Rules
from meshwright.program.split import Split
from meshwright.sharding import algorithm_of

# Eight blocks of two elements: five taps reach the next block's far end, seven the block after it.
CASES: dict[str, Case] = {
    **{
        f"conv {taps} x {taps}, stride {stride}": (
            partial(conv, strides=(stride, stride)),
            (normal(2, 16, 8, 2), normal(taps, taps, 2, 4)),
        )
        for taps in (1, 3, 5, 7)
        for stride in (1, 2)
    },
    "conv of patches": (partial(conv, strides=(2, 2), padding="VALID"), (normal(2, 16, 8, 2), normal(2, 2, 2, 4))),
    "conv, more padding than is read": (
        partial(conv, strides=(2, 2), padding=((1, 1), (1, 1))),
        (normal(2, 16, 8, 2), normal(3, 3, 2, 4)),
    ),
    "conv, dilated kernel": (partial(conv, rhs_dilation=(2, 2)), (normal(2, 16, 8, 2), normal(3, 3, 2, 4))),
    "conv in groups": (partial(conv, feature_group_count=2), (normal(2, 16, 8, 4), normal(3, 3, 2, 4))),
    "conv, causal": (
        lambda x, w: lax.conv_general_dilated(x, w, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC")),
        (normal(2, 16, 2), normal(3, 2, 4)),
    ),
    "max pool": (partial(pool, lax.max, -jnp.inf, 2, 2, "VALID"), (normal(2, 16, 8, 2),)),
    "max pool, overlapping": (partial(pool, lax.max, -jnp.inf, 3, 2, "SAME"), (normal(2, 16, 8, 2),)),
    "min pool, overlapping": (partial(pool, lax.min, jnp.inf, 5, 1, "SAME"), (normal(2, 16, 8, 2) + 9,)),
    "mean pool, overlapping": (partial(pool, lax.add, 0.0, 3, 1, "SAME"), (normal(2, 16, 8, 2),)),
    "max pool of integers": (
        partial(pool, lax.max, jnp.iinfo(jnp.int32).min, 3, 1, "SAME"),
        (integers(-1, 2, 16, 8, 2, low=-9),),
    ),
}


def windowed(name: str) -> tuple[Equation, list[Any]]:
    function, args = CASES[name]
    program = jax.make_jaxpr(function)(*args)
    (equation,) = program.jaxpr.eqns
    return equation, [np.asarray(x) for x in args]


def rule_of(equation: Equation) -> Any:
    rules = Rules()
    rules.prepare([(equation, False)])
    return rules.rule(equation, differentiated=False)


@pytest.mark.parametrize("blocks", [*(pytest.param(blocks, marks=pytest.mark.slow) for blocks in (2, 4)), 8])
def test_results_and_gradients_are_those_of_one_device(blocks: int) -> None:
    equations = [windowed(name) for name in CASES]
    spatial = [[f for f in rule_of(e).factors if f.kind == "spatial" and f.size % blocks == 0] for e, _ in equations]
    assert all(spatial), [name for name, found in zip(CASES, spatial, strict=True) if not found]
    violations = validate_rules(equations, blocks=blocks)
    assert not violations, [(v.primitive, v.problem, v.detail) for v in violations]


@pytest.mark.parametrize(
    ("name", "halo"),
    [
        ("conv 1 x 1, stride 1", (0, 0)),
        ("conv 3 x 3, stride 1", (1, 1)),
        ("conv 3 x 3, stride 2", (0, 1)),
        ("conv 7 x 7, stride 2", (2, 3)),
        ("conv of patches", (0, 0)),
        ("conv, more padding than is read", (1, 0)),
        ("conv, dilated kernel", (2, 2)),
        ("conv, causal", (2, 0)),
        ("max pool, overlapping", (0, 1)),
    ],
)
def test_halos_are_what_the_window_reads_beyond_a_block(name: str, halo: tuple[int, int]) -> None:
    rule = rule_of(windowed(name)[0])
    assert next(f.halo for f in rule.factors if f.kind == "spatial") == halo


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("conv 3 x 3, stride 1", {1: ("x",)}),
        ("conv 3 x 3, stride 1", {1: ("x",), 2: ("y",)}),
        ("conv 7 x 7, stride 1", {1: ("x", "y")}),
        ("conv 7 x 7, stride 1", {1: ("x", "z", "y")}),
        ("conv 7 x 7, stride 2", {1: ("y", "x"), 0: ("z",)}),
        ("max pool, overlapping", {1: ("x",), 2: ("z",)}),
        ("conv in groups", {2: ("x", "y"), 0: ("z",)}),
    ],
    ids=str,
)
def test_predicted_bytes_are_those_of_the_compiled_program(name: str, dims: dict[int, tuple[str, ...]]) -> None:
    equation, operands = windowed(name)
    rule, sizes = rule_of(equation), {"x": 2, "y": 2, "z": 2}
    axes = [()] * len(rule.factors)
    for d, split in dims.items():
        axes[rule.operands[0][d][0]] = split
    algorithm = algorithm_of(rule, tuple(axes), [False] * len(operands))

    def local(*shards: Any) -> Sequence[Any]:
        return list(evaluate_local(equation, Split(rule, algorithm.axes, sizes), shards))

    specs = [
        [PartitionSpec(*(a or None for a in s.dims)) for s in part] for part in (algorithm.operands, algorithm.results)
    ]
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple(sizes))
    step = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs[0]), out_specs=list(specs[1]), check_vma=False)
    compiled = jax.jit(step).lower(*operands).compile()
    (found,) = compiled(*operands)
    np.testing.assert_allclose(found, CASES[name][0](*CASES[name][1]), rtol=1e-4, atol=1e-4)
    predicted = halo_bytes(rule, axes, operands[0].shape, operands[0].itemsize, sizes)
    collectives = read_compiled(compiled).collectives
    assert {c.kind for c in collectives} == {"permute"}
    assert sorted(c.bytes for c in collectives) == sorted(move.size_bytes for move in predicted)

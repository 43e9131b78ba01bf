"""The reader of compiled programs against programs whose collectives and FLOPs are known by construction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from meshwright._jax.hlo import CompiledFacts, read_compiled, read_text
from meshwright._jax.hlo_parse import parse_groups, parse_module
from meshwright._jax.jaxpr import open_jaxpr
from meshwright.program.flops import equation_flops

pytestmark = pytest.mark.compiled

ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))  # groups along "y" of a 2 x 4 mesh
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))  # groups along "x"


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))


def facts(function: Callable[..., object], *arguments: jax.Array, **jit: Any) -> CompiledFacts:
    return read_compiled(jax.jit(function, **jit).lower(*arguments).compile())


def local(mesh: Mesh, function: Callable[..., object], *arguments: jax.Array) -> CompiledFacts:
    """Facts of `function` run on the local shards of arguments that are replicated outside."""
    wrapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return facts(wrapped, *arguments)


X = np.zeros((32, 16), np.float32)


@pytest.mark.parametrize(
    ("function", "kind", "bytes_", "groups"),
    [
        (lambda a: lax.psum(a, "y"), "all_reduce", 32 * 16 * 4, ROWS),
        (lambda a: lax.psum(a, "x"), "all_reduce", 32 * 16 * 4, COLUMNS),
        (lambda a: lax.psum(a, ("x", "y")), "all_reduce", 32 * 16 * 4, (tuple(range(8)),)),
        (lambda a: lax.all_gather(a, "y", axis=1, tiled=True), "all_gather", 4 * 32 * 16 * 4, ROWS),
        (lambda a: lax.all_gather(a, "x", axis=0), "all_gather", 2 * 32 * 16 * 4, COLUMNS),
        (lambda a: lax.psum_scatter(a, "y", scatter_dimension=0, tiled=True), "reduce_scatter", 32 * 16 * 4, ROWS),
        (lambda a: lax.all_to_all(a, "y", 0, 1, tiled=True), "all_to_all", 32 * 16 * 4, ROWS),
        (lambda a: lax.all_to_all(a, "x", 1, 0, tiled=True), "all_to_all", 32 * 16 * 4, COLUMNS),
    ],
)
def test_one_collective(
    mesh: Mesh, function: Callable[..., object], kind: str, bytes_: int, groups: tuple[tuple[int, ...], ...]
) -> None:
    read = local(mesh, function, X)
    assert [(c.kind, c.bytes, c.groups, c.group_size, c.count) for c in read.collectives] == [
        (kind, bytes_, groups, len(groups[0]), 1)
    ]
    assert set(read.collectives[0].dtypes) == {"f32"}


def test_permute_has_pairs(mesh: Mesh) -> None:
    read = local(mesh, lambda a: lax.ppermute(a, "y", [(0, 1), (1, 2)]), X)
    (only,) = read.collectives
    assert (only.kind, only.bytes, only.group_size) == ("permute", 32 * 16 * 4, 2)
    assert set(only.groups) == {(0, 1), (1, 2), (4, 5), (5, 6)}


def test_several_arrays_in_one_collective(mesh: Mesh) -> None:
    read = local(mesh, lambda a: lax.psum((a, a[:4] * 2, a.sum()), "y"), X)
    assert sum(c.bytes for c in read.collectives) == 32 * 16 * 4 + 4 * 16 * 4 + 4
    assert sum(c.operands for c in read.collectives) == 3


def test_collectives_in_scans_count_once_a_trip(mesh: Mesh) -> None:
    def outer(carry: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        def inner(value: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return lax.psum(jnp.tanh(value @ weight), "y"), None

        return lax.all_gather(lax.scan(inner, carry, weights)[0], "x")[0], None

    weights = np.zeros((3, 5, 16, 16), np.float32)
    read = local(mesh, lambda a, w: lax.scan(outer, a, w)[0], X, weights)
    assert {(c.kind, c.count) for c in read.collectives} == {("all_reduce", 15), ("all_gather", 3)}
    assert read.flops == 15 * 2 * 32 * 16 * 16
    assert read.unknown_loops == 0


def test_a_loop_that_depends_on_data_is_said_to_be_unknown() -> None:
    def run(x: jax.Array, n: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ x), (0, x))[1]

    read = facts(run, np.zeros((16, 16), np.float32), np.int32(3))
    assert (read.unknown_loops, read.flops) == (1, 2 * 16**3)


def test_a_conditional_costs_its_dearest_branch() -> None:
    def run(x: jax.Array, n: jax.Array) -> jax.Array:
        return lax.cond(n > 1, lambda y: y @ y @ y, lambda y: y @ y, x)

    assert facts(run, np.zeros((16, 16), np.float32), np.int32(3)).flops == 2 * 2 * 16**3


@pytest.mark.parametrize(
    ("spec", "left", "right", "flops"),
    [
        ("ij,jk->ik", (8, 16), (16, 32), 2 * 8 * 16 * 32),
        ("bij,bkj->bik", (4, 8, 16), (4, 32, 16), 2 * 4 * 8 * 16 * 32),
        ("bsh,hnd->bnsd", (2, 8, 16), (16, 4, 8), 2 * 2 * 8 * 16 * 32),
        ("bnsd,bntd->bnst", (2, 4, 8, 16), (2, 4, 8, 16), 2 * 2 * 4 * 8 * 8 * 16),
        ("ij,j->i", (8, 16), (16,), 2 * 8 * 16),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dot_flops(spec: str, left: tuple[int, ...], right: tuple[int, ...], flops: int, dtype: type) -> None:
    assert facts(partial(jnp.einsum, spec), jnp.zeros(left, dtype), jnp.zeros(right, dtype)).flops == flops


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 8])
def test_convolution_flops_forward_and_backward(stride: int, groups: int) -> None:
    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )
        return jnp.sum(y**3)

    x, kernel = np.zeros((2, 16, 16, 8), np.float32), np.zeros((3, 3, 8 // groups, 16), np.float32)
    forward = 2 * (2 * (16 // stride) ** 2 * 16) * 9 * (8 // groups)
    assert facts(loss, x, kernel).flops == forward
    # The backward pass is one convolution for each of the two arguments, and as dear as the forward for each.
    assert facts(jax.grad(loss, argnums=(0, 1)), x, kernel).flops == 3 * forward


@pytest.mark.parametrize(
    ("size", "window", "stride", "padding", "holes", "taps", "groups"),
    [
        (7, 3, 2, "SAME", 1, 1, 1),  # a stride that does not divide the image
        (8, 3, 2, "VALID", 1, 1, 1),  # whose last column nothing reads
        (6, 3, 3, [(2, 2), (2, 2)], 1, 1, 2),  # more border than window
        (5, 2, 3, [(1, 1), (1, 1)], 2, 1, 1),  # a transposed convolution
        (7, 4, 2, [(3, 3), (3, 3)], 1, 2, 4),  # dilated taps, groups that XLA makes a dim of space
        (2, 3, 1, "SAME", 1, 1, 1),  # a window larger than the image
    ],
)
def test_gradients_of_convolutions_cost_what_the_forward_pass_does(
    size: int, window: int, stride: int, padding: Any, holes: int, taps: int, groups: int
) -> None:
    """Counted from the equation alone, and from what XLA makes of both gradients."""

    def convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, kernel, (stride,) * 2, padding, lhs_dilation=(holes,) * 2, rhs_dilation=(taps,) * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
        )  # fmt: skip

    x, kernel = np.zeros((2, size, size, 4), np.float32), np.zeros((window, window, 4 // groups, 8), np.float32)
    (equation,) = open_jaxpr(jax.make_jaxpr(convolution)(x, kernel)).eqns
    forward, _ = equation_flops(equation)
    gradients = jax.grad(lambda x, kernel: jnp.sum(convolution(x, kernel) ** 3), argnums=(0, 1))
    assert facts(gradients, x, kernel).flops == 3 * forward


def test_zeros_that_are_appended_are_no_flops() -> None:
    def padded(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x, kernel = (lax.pad(a, 0.0, [(0, int(n == 3), 0) for n in a.shape]) for a in (x, kernel))
        return lax.conv_general_dilated(
            lax.optimization_barrier(x), lax.optimization_barrier(kernel), (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    x, kernel = np.zeros((2, 8, 8, 3), np.float32), np.zeros((5, 5, 3, 16), np.float32)
    assert facts(padded, x, kernel).flops == 2 * 2 * 64 * 25 * 3 * 16
    a, b = np.zeros((8, 3), np.float32), np.zeros((3, 16), np.float32)
    product = lambda a, b: jnp.pad(a, ((0, 0), (0, 5))) @ jnp.pad(b, ((0, 5), (0, 0)))  # noqa: E731
    assert facts(product, a, b).flops == 2 * 8 * 3 * 16
    # What is appended is no zero: it is summed.
    ones = lambda a, b: jnp.pad(a, ((0, 0), (0, 5)), constant_values=1.0) @ b  # noqa: E731
    assert facts(ones, a, np.zeros((8, 16), np.float32)).flops == 2 * 8 * 8 * 16


def test_flops_of_a_partitioned_program_are_per_device(mesh: Mesh) -> None:
    split = NamedSharding(mesh, P("x", "y"))
    a = jax.device_put(np.zeros((64, 64), np.float32), split)
    read = facts(lambda u, v: u @ v, a, a, out_shardings=split)
    assert read.flops == 2 * 64**3 / 8
    assert {c.kind for c in read.collectives} >= {"all_gather"}


def test_memory_of_a_donated_argument() -> None:
    x = np.zeros((64, 64), np.float32)
    read = facts(lambda a: a + 1, x, donate_argnums=0)
    assert (read.argument_bytes, read.output_bytes, read.alias_bytes) == (x.nbytes, x.nbytes, x.nbytes)
    assert read.peak_bytes == x.nbytes + read.temp_bytes


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ROWS),
        ("[2,4]<=[8]", ROWS),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("mesh['x'=2,'y'=4] {'y'}", ROWS),
        ("mesh['x'=2,'y'=4] {'x'}", COLUMNS),
        ("mesh['x'=2,'y'=4] {'x','y'}", (tuple(range(8)),)),
        ("mesh['x'=2,'y'=4] {'y','x'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=2], device_ids=([4]<=[2,2]T(1,0)) {'y'}", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=1,'z'=4], device_ids=([4,2]T(1,0)) {'x'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("{}", (tuple(range(8)),)),
    ],
)
def test_every_printed_form_of_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(text, 8) == groups


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="refused to read replica groups"):
        parse_groups("ring(8)", 8)
    with pytest.raises(ValueError, match="without an ENTRY computation"):
        parse_module("HloModule empty")


# What a GPU's compiler prints: asynchronous pairs, wrapped computations, and library calls for products.
GPU = """HloModule step, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%wrapped (p: f32[8,16]) -> f32[2,16] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %rs = f32[2,16]{1,0} reduce-scatter(f32[8,16]{1,0} %p), replica_groups={}, dimensions={0}, to_apply=%add
}, execution_thread="main"

%body (b: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %b = (s32[], f32[8,16]{1,0}) parameter(0)
  %one = s32[] constant(2)
  %i = s32[] get-tuple-element(%b), index=0
  %v = f32[8,16]{1,0} get-tuple-element(%b), index=1
  %next = s32[] add(%i, %one)
  %start = f32[8,16]{1,0} all-reduce-start(%v), channel_id=3, replica_groups=[2,2]<=[4], to_apply=%add
  %done = f32[8,16]{1,0} all-reduce-done(%start)
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%next, %done)
}

%cond (c: (s32[], f32[8,16])) -> pred[] {
  %c = (s32[], f32[8,16]{1,0}) parameter(0)
  %limit = s32[] constant(10)
  %j = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}

ENTRY %main (a: f32[8,16], w: f32[16,32]) -> (f32[8,32], f32[2,16]) {
  %a = f32[8,16]{1,0} parameter(0)
  %w = f32[16,32]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8,16]{1,0}) tuple(%zero, %a)
  %loop = (s32[], /*index=1*/f32[8,16]{1,0}) while(%init), condition=%cond, body=%body
  %h = f32[8,16]{1,0} get-tuple-element(%loop), index=1
  %ag = (f32[8,16]{1,0}, f32[16,16]{1,0}) all-gather-start(%h), replica_groups={{0,2},{1,3}}, dimensions={0}
  %agd = f32[16,16]{1,0} all-gather-done(%ag)
  %rss = ((f32[8,16]{1,0}), f32[2,16]{1,0}) async-start(%h), calls=%wrapped
  %rsd = f32[2,16]{1,0} async-done(%rss), calls=%wrapped
  %gemm = (f32[8,32]{1,0}, s8[1024]{0}) custom-call(%h, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"note":"),{"}}}
  %y = f32[8,32]{1,0} get-tuple-element(%gemm), index=0
  ROOT %out = (f32[8,32]{1,0}, f32[2,16]{1,0}) tuple(%y, %rsd)
}
"""  # noqa: E501


def test_asynchronous_pairs_count_once_and_library_products_count() -> None:
    collectives, flops, unknown_loops = read_text(GPU)
    assert [(c.kind, c.bytes, c.group_size, c.count) for c in collectives] == [
        ("all_reduce", 8 * 16 * 4, 2, 5),  # 0, 2, 4, 6, 8: the trip count is not stated but follows from the counter
        ("all_gather", 2 * 8 * 16 * 4, 2, 1),
        ("reduce_scatter", 8 * 16 * 4, 4, 1),
    ]
    assert (flops, unknown_loops) == (2 * 8 * 16 * 32, 0)


def test_rematerialised_instructions_are_known_by_name() -> None:
    """JAX's own rematerialisation is in the names of operations, not of instructions."""
    text = """HloModule m

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %exp.1 = f32[4]{0} exponential(%a), metadata={op_name="jit(f)/checkpoint/rematted_computation/exp"}
  %fusion.7.remat = f32[4]{0} exponential(%a)
  %fusion.7.remat2.1 = f32[4]{0} exponential(%fusion.7.remat)
  ROOT %sum.remat = f32[4]{0} add(%exp.1, %fusion.7.remat2.1)
}
"""
    sizes = {f"{kind}_size_in_bytes": 0 for kind in ("argument", "output", "alias", "temp", "generated_code")}
    compiled = SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: SimpleNamespace(**sizes))
    assert read_compiled(cast(jax.stages.Compiled, compiled)).rematerialised == 3

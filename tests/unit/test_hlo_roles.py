"""Collectives that a compiler writes as others, or in another type, count as what the program asks for."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright._jax.ahead import has_tpu_compiler, tpu_devices
from meshwright._jax.hlo import CompiledFacts, read_compiled, read_text
from meshwright._jax.hlo_roles import program_types

# As the TPU compiler writes a gather of [2], a sum of [8] that each device reads its part of, and one that it reads.
JOINED = """
HloModule joined, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

%place (zeros: f32[8], own: f32[2], at: s32[]) -> (f32[8], f32[2]) {
  %zeros = f32[8] parameter(0)
  %own = f32[2] parameter(1)
  %at = s32[] parameter(2)
  %placed = f32[8] dynamic-update-slice(%zeros, %own, %at)
  %twice = f32[2] add(%own, %own)
  ROOT %both = (f32[8], f32[2]) tuple(%placed, %twice)
}

%part (all: f32[8], at: s32[]) -> f32[2] {
  %all = f32[8] parameter(0)
  %at = s32[] parameter(1)
  %mine = f32[2] dynamic-slice(%all, %at), dynamic_slice_sizes={2}
  ROOT %twice = f32[2] add(%mine, %mine)
}

ENTRY %main (own: f32[2], whole: f32[8], other: f32[8]) -> (f32[8], f32[2], f32[8]) {
  %own = f32[2] parameter(0)
  %whole = f32[8] parameter(1)
  %other = f32[8] parameter(2)
  %nothing = f32[] constant(0)
  %device = u32[] partition-id()
  %at = s32[] convert(%device)
  %zeros = f32[8] broadcast(%nothing), dimensions={}
  %made = (f32[8], f32[2]) fusion(%zeros, %own, %at), kind=kLoop, calls=%place
  %padded = f32[8] get-tuple-element(%made), index=0
  %sums = (f32[8], f32[8], f32[8]) all-reduce(%padded, %whole, %other), replica_groups={{0,1,2,3}}, to_apply=%add
  %gathered = f32[8] get-tuple-element(%sums), index=0
  %scattered = f32[8] get-tuple-element(%sums), index=1
  %summed = f32[8] get-tuple-element(%sums), index=2
  %renamed = f32[8] bitcast(%scattered)
  %mine = f32[2] fusion(%renamed, %at), kind=kLoop, calls=%part
  ROOT %results = (f32[8], f32[2], f32[8]) tuple(%gathered, %mine, %summed)
}
"""


def traffic(facts: CompiledFacts) -> dict[str, int]:
    """Bytes by kind, in the types that the program sends."""
    total: dict[str, int] = {}
    for one in facts.collectives:
        total[one.kind] = total.get(one.kind, 0) + one.count * sum(one.sent_bytes)
    return total


def test_an_all_reduce_is_read_as_what_it_was_joined_from() -> None:
    collectives, _, _ = read_text(JOINED, rewritten=True)
    found = [(one.kind, one.operands, one.bytes, one.sent_bytes) for one in collectives]
    assert found == [(kind, 1, 32, (32,)) for kind in ("all_gather", "reduce_scatter", "all_reduce")]


def test_of_other_compilers_a_sum_that_is_cut_is_what_the_program_asks_for() -> None:
    assert [one.kind for one in read_text(JOINED)[0]] == ["all_reduce"]


def test_a_sum_that_is_also_read_whole_is_a_sum() -> None:
    also = JOINED.replace("tuple(%gathered, %mine, %summed)", "tuple(%gathered, %mine, %scattered)")
    assert [one.kind for one in read_text(also, rewritten=True)[0]] == ["all_gather", "all_reduce"]
    other = JOINED.replace("constant(0)", "constant(1)")  # a sum of what is not zeros is no gather
    assert [one.kind for one in read_text(other, rewritten=True)[0]] == ["all_reduce", "reduce_scatter"]


def test_rows_that_the_compiler_moves_itself_are_no_permute() -> None:
    moved = "%renamed = f32[8] collective-permute(%scattered), source_target_pairs={{0,1},{1,2}}"
    text = JOINED.replace("%renamed = f32[8] bitcast(%scattered)", moved)
    of_unnamed = read_text(text, rewritten=True)[0]  # of a compiler that names no sources
    assert [one.kind for one in of_unnamed][-1] == "permute"
    named = text.replace("to_apply=%add", 'to_apply=%add, metadata={op_name="jit(f)/psum"}')
    assert "permute" not in [one.kind for one in read_text(named, rewritten=True)[0]]
    own = named.replace(moved, moved + ', metadata={op_name="jit(f)/ppermute"}')
    assert [one.kind for one in read_text(own, rewritten=True)[0]][-1] == "permute"


def test_the_types_of_a_program_are_read() -> None:
    text = '%1 = "stablehlo.all_gather"(%0) <{all_gather_dim = 0 : i64}> : (tensor<2x4xbf16>) -> tensor<8x4xbf16>'
    assert program_types(text) == {("all_gather", 32): {16}}


@pytest.mark.compilers
@pytest.mark.skipif(not has_tpu_compiler(), reason="needs libtpu: make test-compilers")
@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v4"])
def test_what_the_tpu_compiler_joins_and_rounds_counts_as_it_was_written(kind: str) -> None:
    torus = (2, 2) if kind == "TPU v5 lite" else (2, 2, 1)
    mesh = jax.sharding.Mesh(np.array(tpu_devices(kind, torus, (False,) * len(torus), 1)), ("x",))

    def local(weight: jax.Array, data: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
        whole = jax.lax.all_gather(weight, "x", tiled=True)  # read by a product alone: sent in 16 bits
        made = data @ whole + jax.lax.all_gather(bias, "x", tiled=True)
        gradient = jax.lax.psum_scatter(data.T @ made, "x", tiled=True)
        return jax.lax.psum_scatter(made.sum(0), "x", tiled=True), gradient, jax.lax.psum(made.sum(1), "x")

    split, whole = PartitionSpec("x"), PartitionSpec()
    step = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(split, split, split), out_specs=(split, split, whole))
    )  # fmt: skip
    shapes = [(256, 256), (1024, 256), (256,)]
    avals = [jax.ShapeDtypeStruct(one, "float32", sharding=NamedSharding(mesh, split)) for one in shapes]
    lowered = step.lower(*avals)
    facts = read_compiled(lowered.compile(), lowered.as_text())
    matrix, vector = 4 * 256 * 256, 4 * 256
    expected = {"all_gather": matrix + vector, "reduce_scatter": matrix + vector, "all_reduce": vector}
    assert traffic(facts) == expected

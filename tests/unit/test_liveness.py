"""The memory model: each of its rules on a few operations, and whole steps against the compiler's own analysis."""

from __future__ import annotations

import doctest
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import meshwright.memory.liveness
from meshwright._jax.dataflow import Kind, Operation, Program, Value
from meshwright._jax.hlo import read_compiled
from meshwright._jax.liveness_adapter import dataflow_of
from meshwright.memory.fusion import Fusion
from meshwright.memory.kernel_order import copied_arguments, depth_first, greedy, heaviest_first, without_dead_code
from meshwright.memory.liveness import PredictedMemory, predict

pytestmark = pytest.mark.compiled

N = 10_000  # elements of every array in the small programs
BYTES = 4 * N


def operation(kind: Kind, reads: tuple[int, ...], write: int, **rest: Any) -> Operation:
    return Operation(kind=kind, name=kind.value, reads=reads, writes=(write,), **rest)


def program(operations: list[Operation], outputs: tuple[int, ...], arguments: int = 1, **rest: Any) -> Program:
    count = 1 + max(value for op in operations for value in (*op.reads, *op.writes))
    return Program(
        values=(Value(size_bytes=BYTES, elements=N, rank=1),) * count,
        operations=tuple(operations),
        arguments=tuple(range(arguments)),
        outputs=outputs,
        **rest,
    )


def kernels(operations: list[Operation], outputs: tuple[int, ...], arguments: int = 1) -> list[tuple[int, ...]]:
    return [kernel.writes for kernel in Fusion(program(operations, outputs, arguments)).run()]


E, K, R = Kind.ELEMENTWISE, Kind.OPAQUE, Kind.REDUCE  # K: a kernel of its own


def test_a_chain_is_one_kernel() -> None:
    assert kernels([operation(E, (0,), 1), operation(E, (1,), 2, expensive=True), operation(E, (2,), 3)], (3,)) == [
        (3,)
    ]


def test_a_cheap_value_of_one_source_is_computed_again_and_a_dear_one_stored() -> None:
    uses = [operation(K, (1,), 2), operation(E, (1,), 3), operation(K, (3,), 4)]
    assert kernels([operation(E, (0,), 1), *uses], (2, 4)) == [(1,), (2,), (3,), (4,)]
    twice = [operation(E, (1,), 2), operation(E, (1,), 3)]
    assert kernels([operation(E, (0,), 1), *twice], (2, 3)) == [(2,), (3,)]
    assert kernels([operation(E, (0,), 1, expensive=True), *twice], (2, 3)) == [(1,), (2,), (3,)]


def test_a_value_of_two_sources_is_stored_unless_every_use_can_take_it_in() -> None:
    total = operation(E, (0, 1), 2)
    assert kernels([total, operation(E, (2,), 3), operation(E, (2,), 4)], (3, 4), 2) == [(3,), (4,)]
    assert kernels([total, operation(E, (2,), 3), operation(K, (2,), 4)], (3, 4), 2) == [(2,), (3,), (4,)]


def test_the_library_takes_arithmetic_around_a_large_reduction() -> None:
    square = operation(E, (0,), 1, library=True)
    assert kernels([square, operation(R, (1,), 2)], (2,)) == [(2,)]
    assert kernels([square, operation(R, (1,), 2)], (1, 2)) == [(1,), (2,)]


def test_a_dying_operand_lends_its_buffer() -> None:
    def needed(middle: Kind) -> int:
        chain = program([operation(K, (0,), 1), operation(middle, (1,), 2), operation(K, (2,), 3)], (3,))
        # A small output, whose buffer can hold none of the others.
        small = replace(chain.values[3], size_bytes=4, elements=1)
        return predict(replace(chain, values=(*chain.values[:3], small))).temp_bytes

    assert (needed(E), needed(K)) == (BYTES, 2 * BYTES)


def test_a_free_output_buffer_holds_other_values() -> None:
    steps = [operation(K, (0,), 1), operation(K, (1,), 2), operation(K, (2,), 3), operation(K, (3,), 4)]
    # Three values between argument and output, two alive at a time; the first can lie in the output's buffer.
    assert predict(program(steps, (4,))).temp_bytes == 2 * BYTES


def test_donation_saves_the_output_and_copies_an_argument_that_is_read_later() -> None:
    read_once = program([operation(E, (0,), 1)], (1,), kept=((0, 0),))
    assert predict(read_once).temp_bytes == 0
    assert predict(read_once).peak_bytes == BYTES
    # The second reader is not ordered before the kernel that overwrites the argument; in a chain it is.
    unordered = program([operation(E, (0,), 1), operation(K, (0,), 2)], (1, 2), kept=((0, 0),))
    assert copied_arguments(unordered, Fusion(unordered).run()) == {0}
    ordered = program([operation(K, (0,), 1), operation(E, (0, 1), 2)], (2,), kept=((0, 0),))
    assert copied_arguments(ordered, Fusion(ordered).run()) == set()


def test_the_buffer_of_a_donated_argument_is_free_between_its_last_reader_and_the_output() -> None:
    """Temporaries are 1 to 3, each there with the one before it."""

    def needed(also_read_by: int) -> int:
        reads = [(0,), (1,), (2,), (3,)]
        reads[also_read_by] = tuple({0, *reads[also_read_by]})
        steps = [operation(K, read, made) for made, read in enumerate(reads, start=1)]
        return predict(program(steps, (4,), kept=((0, 0),))).temp_bytes

    # The second lies there if the argument is not read after the first kernel.
    assert [needed(position) for position in (0, 1, 2)] == [BYTES, 2 * BYTES, 2 * BYTES]


def test_values_of_no_bytes_take_no_room() -> None:
    steps = [operation(K, (0,), 1), operation(K, (0, 1), 2), operation(K, (2,), 3), operation(K, (3,), 4)]
    whole = program(steps, (4,))
    nothing = Value(size_bytes=0, elements=0, rank=1)
    without = program([operation(K, (0,), 2), *steps[2:]], (4,))
    assert predict(replace(whole, values=(whole.values[0], nothing, *whole.values[2:]))) == predict(without)


def test_a_body_is_looked_at_once_for_all_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[Program] = []

    def fusing(one: Program) -> Fusion:
        fused.append(one)
        return Fusion(one)

    monkeypatch.setattr(meshwright.memory.liveness, "Fusion", fusing)
    body = program([operation(K, (0,), 1), operation(K, (1,), 2)], (2,), kept=((0, 0),), platform="gpu")
    loop = operation(Kind.LOOP, (0,), 1, kept=((0, 0),), bodies=(body,))
    predict(program([loop], (1,), platform="gpu"))
    assert len(fused) == 2


def test_a_loop_needs_its_body_once() -> None:
    body = program([operation(K, (0,), 1), operation(K, (1,), 2)], (2,), kept=((0, 0),))
    step = program([operation(Kind.LOOP, (0,), 1, kept=((0, 0),), bodies=(body,))], (1,))
    alone = predict(body).temp_bytes
    assert alone == BYTES
    assert predict(step).temp_bytes == alone


def test_a_barrier_delays_what_comes_after_it() -> None:
    def steps(kind: Kind) -> list[Operation]:
        first, again = operation(K, (0,), 1), operation(K, (4,), 5)
        through = Operation(kind=kind, name="barrier", reads=(0, 3), writes=(4, 6)) if kind is Kind.BARRIER else None
        gate = through or operation(Kind.VIEW, (0,), 4)
        return [first, operation(K, (1,), 2), operation(K, (2,), 3), gate, again, operation(K, (3, 5), 7)]

    held = predict(program(steps(Kind.BARRIER), (7,))).temp_bytes
    early = predict(program(steps(Kind.VIEW), (7,))).temp_bytes
    assert held < early


def order_of(order: Any, program: Program) -> list[int]:
    """The results in the order in which they are made."""
    return [kernel.writes[0] for kernel in order(program, Fusion(program).run(), set())]


def test_what_is_soon_made_again_is_made_where_it_is_read() -> None:
    """A chain 4, 5, 6 each link of which reads something made of the argument: 1, 2, 3."""
    again = [operation(K, (0,), value) for value in (1, 2, 3)]
    chain = program([*again, *(operation(K, (v, v + 3 if v > 1 else 0), v + 4) for v in (1, 2, 3))], (7,))
    assert order_of(depth_first, chain) == [3, 2, 1, 5, 6, 7]
    assert order_of(heaviest_first, chain) == [1, 5, 2, 6, 3, 7]
    assert predict(replace(chain, platform="gpu")).temp_bytes == 2 * BYTES
    assert predict(chain).temp_bytes == 3 * BYTES


def test_an_operand_with_more_readers_behind_it_is_made_first() -> None:
    """Both operands of 4 take one kernel, but what makes 2 is read twice more."""
    steps = [operation(K, (0,), 1), operation(K, (0,), 2), operation(K, (2,), 3), operation(K, (1, 2), 4)]
    assert order_of(heaviest_first, program(steps, (4, 3)))[:3] == [2, 1, 4]


def test_greed_frees_what_it_can_at_once() -> None:
    """3 frees two and makes one: it comes before 4, which frees nothing. Of 1, 2 and 4 those that were ready last."""
    steps = [operation(K, (0,), 4), operation(K, (0,), 1), operation(K, (0,), 2), operation(K, (1, 2), 3)]
    assert order_of(greedy, program(steps, (3, 4))) == [2, 1, 3, 4]


def test_greed_sees_what_the_last_reader_frees() -> None:
    """Once 2 has read 1, whoever reads it next frees it: 4, although 3 was ready last."""
    sizes = {2: 1, 3: 2, 4: 2}
    steps = [operation(K, (0,), 1), operation(K, (1,), 2), operation(K, (0,), 3), operation(K, (1,), 4)]
    made = program(steps, (2, 3, 4))
    values = tuple(replace(one, size_bytes=BYTES * sizes.get(n, 4)) for n, one in enumerate(made.values))
    assert order_of(greedy, replace(made, values=values)) == [3, 1, 2, 4]


def test_dead_operations_and_unread_arguments_take_nothing() -> None:
    memory = predict(program([operation(K, (0,), 2), operation(K, (1,), 3), operation(K, (3,), 4)], (2,), arguments=2))
    assert (memory.temp_bytes, memory.argument_bytes, memory.output_bytes) == (0, BYTES, BYTES)


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(meshwright.memory.liveness).failed == 0


# Whole training steps, compiled: the truth is the compiler's own analysis.


def _suite() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    spec = importlib.util.spec_from_file_location("memory_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def suite() -> dict[str, Any]:
    return _suite().suite()


@pytest.mark.parametrize(
    "name",
    [
        "mlp_wide_batch",
        "mlp_adam",
        "gpt2_short",
        "llama_scan8_remat",
        "resnet_bn",
        pytest.param("unet", marks=pytest.mark.slow),
        "mlp_data_parallel",
        "mlp_zero3",
    ],
)
def test_peak_is_within_seven_per_cent_of_the_compiled_program(name: str, suite: dict[str, Any]) -> None:
    step = suite[name]()
    predicted = predict(dataflow_of(step.step, *step.arguments, donate_argnums=step.donated))
    compiled = read_compiled(jax.jit(step.step, donate_argnums=step.donated).lower(*step.arguments).compile())
    assert predicted.argument_bytes == compiled.argument_bytes
    assert predicted.alias_bytes == compiled.alias_bytes
    assert predicted.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.07)


def both(function: Any, *arguments: Any, donate: tuple[int, ...] = ()) -> tuple[PredictedMemory, Any]:
    compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    return predict(dataflow_of(function, *arguments, donate_argnums=donate)), read_compiled(compiled)


def test_accumulating_over_microbatches_is_predicted() -> None:
    def loss(w: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in w:
            x = jnp.tanh(x @ weight)
        return jnp.sum(x**2)

    def step(w: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def one(total: list[jax.Array], part: jax.Array) -> tuple[list[jax.Array], None]:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, part)), None

        grads, _ = lax.scan(one, jax.tree.map(jnp.zeros_like, w), x)
        return jax.tree.map(lambda p, g: p - g, w, grads)

    w = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 3
    predicted, compiled = both(step, w, jax.ShapeDtypeStruct((4, 512, 256), jnp.float32), donate=(0,))
    assert predicted.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.05)


def test_conditionals_and_while_loops_are_followed() -> None:
    def run(x: jax.Array, n: jax.Array) -> jax.Array:
        y = lax.cond(n > 3, lambda a: jnp.sort(jnp.sort(a, 0) @ a, 1), lambda a: a, x)
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ x @ x), (0, y))[1]

    predicted, compiled = both(run, np.zeros((256, 256), np.float32), np.int32(3))
    assert predicted.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.05)


def test_a_primitive_not_known_here_is_still_arithmetic() -> None:
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    chain = dataflow_of(lambda a: jnp.nextafter(lax.bessel_i0e(a), a) @ a, x)
    assert [op.kind for op in chain.operations][:2] == [Kind.ELEMENTWISE, Kind.ELEMENTWISE]


def test_a_shard_map_beside_other_operations_is_refused() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    inner = jax.shard_map(lambda a: lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match=r"refused to predict memory.*beside other operations.*test_liveness"):
        dataflow_of(lambda a: inner(a) + 1, jax.ShapeDtypeStruct((8, 8), jnp.float32))


def _constant(value: float = 2.0) -> jax.Array:
    return lax.broadcast_in_dim(lax.reshape(value, (1, 1)), (4, 4), (0, 1))


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x * _constant(),
        lambda x: x * lax.squeeze(lax.reshape(lax.expand_dims(2.0, (0,)), (1, 1)), (0, 1)),
        lambda x: x @ lax.transpose(_constant(), (1, 0)) / _constant(),
        lambda x: jnp.zeros(()).at[()].add(2.0) + jnp.zeros(()).at[()].add(x[0, 0]),
        lambda x: lax.scan(lambda c, _: (c * _constant(), lax.reshape(lax.reshape(3.0, (1,)), (1, 1))), x, length=3),
        lambda x: lax.cond(x[0, 0] > 0, lambda x: x * _constant(), lambda x: _constant(3.0), x),
        jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x * _constant())))),
        lambda x: jax.jit(lambda x: x + jax.jit(lambda: lax.reshape(lax.reshape(2.0, (1,)), (1, 1)))())(x),
    ],
)
def test_what_is_made_of_literals_alone_is_a_constant(made: Any) -> None:
    x = jnp.ones((4, 4))
    assert predict(dataflow_of(made, x)).argument_bytes == x.nbytes
    assert predict(dataflow_of(made, x, platform="gpu")).argument_bytes == x.nbytes


def names(flow: Program) -> list[str]:
    return [kernel.operation.name for kernel in Fusion(without_dead_code(flow)).run()]


def test_a_sum_with_what_is_scattered_onto_zeros_scatters_onto_the_other_term() -> None:
    def scattered(x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.sin(x) + jnp.zeros_like(x).at[index].add(1.0)

    def twice(x: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        spread = jnp.zeros_like(x).at[index].add(1.0)
        return jnp.sin(x) + spread, jnp.cumsum(spread)

    arguments = jax.ShapeDtypeStruct((N,), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    assert names(dataflow_of(scattered, *arguments))[-1] == "scatter-add"
    assert "add" in names(dataflow_of(twice, *arguments))


def test_a_gathered_dim_that_is_not_the_major_one_is_moved_there_and_back() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def gathered(dim: int) -> list[str]:
        def body(x: jax.Array) -> jax.Array:
            return lax.all_gather(x, "x", axis=dim, tiled=True)

        step = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return [op.name for op in dataflow_of(step, jax.ShapeDtypeStruct((64, 64), jnp.float32)).operations]

    assert gathered(0) == ["all_gather"]
    assert gathered(1) == ["transpose", "all_gather", "transpose"]


def test_kernels_that_repeat_another_behind_a_forgotten_barrier_are_merged() -> None:
    operations = [operation(K, (0,), 1), operation(K, (0,), 2), operation(K, (1, 2), 3)]
    flow = program(operations, (3,))
    assert predict(replace(flow, alike=(0, 1, 2, 3))).temp_bytes == 2 * BYTES
    assert predict(replace(flow, alike=(0, 1, 1, 3))).temp_bytes == BYTES

"""How programs of GPUs since Ampere are ordered: XLA's latency-hiding scheduler, and the kernels of
several results that it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P

from meshwright._jax.dataflow import WIDE, WIDEST, Kind, Operation, Program, Spread, Use, Value
from meshwright._jax.liveness_adapter import dataflow_of
from meshwright.memory.fusion import Fusion, Kernel
from meshwright.memory.kernel_order import depth_first
from meshwright.memory.latency_hiding import latency_hiding
from meshwright.memory.liveness import predict
from meshwright.memory.multi_output import with_several_results

E, C, K, R = Kind.ELEMENTWISE, Kind.CONTRACT, Kind.OPAQUE, Kind.REDUCE
SMALL, LARGE = 400, 100_000_000


def operation(kind: Kind, reads: Sequence[int], *writes: int, name: str = "", **rest: Any) -> Operation:
    return Operation(kind=kind, name=name or kind.value, reads=tuple(reads), writes=writes, **rest)


def program(operations: list[Operation], outputs: Sequence[int], sizes: dict[int, int] | None = None) -> Program:
    """A program of one argument, value 0; values are small but for those of `sizes`, in bytes."""
    count = 1 + max(value for op in operations for value in (*op.reads, *op.writes))
    bytes_of = dict.fromkeys(range(count), SMALL) | (sizes or {})
    values = (Value(size_bytes=bytes_of[value], elements=bytes_of[value] // 4, rank=2) for value in range(count))
    return Program(
        values=tuple(values),
        operations=tuple(operations), arguments=(0,), outputs=tuple(outputs), platform="gpu",
    )  # fmt: skip


def ordered(one: Program) -> list[str]:
    """The steps of a program: what each writes, or of what a collective it is the end."""
    memory_order = depth_first(one, Fusion(one).run(), set())
    steps = [step for step in latency_hiding(one, memory_order) if isinstance(step, Kernel)]
    return [str(step.writes[0]) if step.writes else f"end {step.operation.writes[0]}" for step in steps]


def test_kernels_run_beside_a_collective_and_one_collective_is_in_flight_at_a_time() -> None:
    sums = [operation(K, (0,), 1), operation(K, (1,), 2, name="psum"), operation(K, (1,), 3, name="psum")]
    chain = [operation(K, (0,), 4), operation(K, (4,), 5)]
    found = ordered(program([*sums, *chain], (2, 3, 5)))
    assert sorted(found) == sorted(["1", "2", "end 2", "3", "end 3", "4", "5"])
    spans = sorted((found.index(str(value)), found.index(f"end {value}")) for value in (2, 3))
    assert spans[0][1] < spans[1][0]
    assert any(start < found.index("5") < end for start, end in spans)


@pytest.mark.parametrize(
    ("spread", "beside"),
    [(None, "6"), (Spread(8, 1, 8), "5"), (Spread(16, 1, 8), "6"), (Spread(16, 2, 4), "7"), (Spread(2, 16, 1), "8")],
)
def test_what_takes_as_long_as_the_collective_runs_beside_it(spread: Spread | None, beside: str) -> None:
    """A sum of little is in flight for 30 us within a host by XLA's numbers, for 0.18 ms between two hosts, for 1.2 ms
    where two groups share the hosts, and for 5 ms where so many groups do that it does not tell. 300 MB are read and
    written in 0.09 ms, 3 GB in 0.9, and 15 GB in 4.5."""
    steps = [operation(K, (0,), 1, name="psum", spread=spread)]
    steps += [operation(K, (read,), write) for read, write in ((2, 5), (3, 6), (4, 7), (9, 8))]
    made = [operation(K, (0,), value) for value in (2, 3, 4, 9)]
    sizes = {5: SMALL, 6: 300_000_000, 7: 3_000_000_000, 8: 15_000_000_000}
    found = ordered(program([*made, *steps], (1, 5, 6, 7, 8), sizes))
    assert found[-2:] == [beside, "end 1"]


@pytest.mark.parametrize("name", ["psum", "all_gather", "all_to_all"])
@pytest.mark.parametrize("spread", [Spread(12, 8, 8), Spread(2, 8, 1), Spread(16, 6, 8), Spread(3, 1, 3)])
def test_any_groups_have_an_order(name: str, spread: Spread) -> None:
    """Of 96 devices, eight groups of a host and a half have as many devices on their first host as a whole host."""
    steps = [operation(K, (0,), 1, name=name, spread=spread), operation(K, (0,), 2)]
    assert sorted(ordered(program(steps, (1, 2)))) == ["1", "2", "end 1"]


def test_the_devices_of_a_collective_are_those_along_its_axes() -> None:
    mesh = AbstractMesh((4, 8), ("x", "y"))

    def summed(x: Any) -> Any:
        return jax.lax.psum(x, "x"), jax.lax.psum(x, "y"), jax.lax.psum(x, ("x", "y"))

    step = jax.shard_map(summed, mesh=mesh, in_specs=(P("x", "y"),), out_specs=(P(None, "y"), P("x"), P()))
    made = dataflow_of(step, jax.ShapeDtypeStruct((64, 64), jnp.float32), platform="gpu")
    assert [one.spread for one in made.operations if "psum" in one.name] == [(4, 8, 1), (8, 4, 8), (32, 1, 8)]


def test_what_follows_a_collective_comes_after_what_does_not() -> None:
    gathered = [operation(K, (0,), 1, name="all_gather"), operation(K, (1,), 2)]
    found = ordered(program([*gathered, operation(K, (0,), 3), operation(K, (3,), 4)], (2, 4)))
    assert found.index("4") < found.index("2")


def test_a_loop_with_collectives_runs_beside_none() -> None:
    body = program([operation(K, (0,), 1, name="psum")], (1,))
    loop = operation(Kind.LOOP, (0,), 2, kept=((0, 0),), bodies=(replace(body, kept=((0, 0),)),))
    found = ordered(program([operation(K, (0,), 1, name="psum"), loop], (1, 2)))
    assert not found.index("1") < found.index("2") < found.index("end 1")


def test_programs_without_collectives_stay_in_the_order_for_little_memory() -> None:
    steps = [operation(K, (0,), 1), operation(K, (1,), 2), operation(K, (1,), 3), operation(K, (2, 3), 4)]
    one = program(steps, (4,), {1: LARGE, 2: LARGE})
    assert predict(one) == predict(replace(one, platform=WIDE))


def test_what_gradients_of_weights_are_made_of_stays_until_they_are_made() -> None:
    """Four layers of two weights, one of which takes longer to update than a sum is in flight: XLA sums and updates
    those of all layers last, beside each other, so that all cotangents stay; an order for little memory makes both
    gradients of a layer as soon as it can."""
    steps: list[Operation] = []
    sizes: dict[int, int] = {}
    outputs: list[int] = []
    last = 0
    for cotangent in range(1, 29, 7):
        steps.append(operation(C, (last,), cotangent))
        sizes[cotangent] = LARGE
        for gradient, flops in ((cotangent + 1, 0.0), (cotangent + 4, 2e11)):
            steps.append(operation(C, (cotangent,), gradient))
            steps.append(operation(K, (gradient,), gradient + 1, name="psum"))
            steps.append(operation(K, (gradient + 1,), gradient + 2, flops=flops))
            outputs.append(gradient + 2)
        last = cotangent
    one = program(steps, outputs, sizes)
    assert predict(replace(one, platform=WIDEST)).temp_bytes < 2.5 * LARGE
    assert predict(one).temp_bytes > 3.5 * LARGE


def kernels_of(one: Program) -> list[tuple[int, ...]]:
    return [kernel.writes for kernel in with_several_results(one, Fusion(one).run())]


def test_arithmetic_that_reads_one_array_is_one_kernel() -> None:
    made = operation(C, (0,), 1)
    steps = [made, operation(E, (1,), 2), operation(R, (1,), 3), operation(K, (2,), 4), operation(K, (3,), 5)]
    assert (2, 3) in kernels_of(program(steps, (4, 5), {1: LARGE, 2: LARGE}))
    # Not where one is needed to make what the other reads, nor what runs over other numbers of elements.
    needed = [*steps[:3], operation(C, (3,), 6), operation(E, (1, 6), 7), operation(K, (7,), 8)]
    assert all(
        len(writes) == 1 or 7 not in writes for writes in kernels_of(program(needed, (2, 8), {1: LARGE, 7: LARGE}))
    )
    assert (2,) in kernels_of(program(steps, (4, 5), {1: LARGE, 2: SMALL}))
    # Nor what reads an array of no elements.
    empty = [made, operation(K, (1,), 2), operation(K, (1,), 3)]
    assert kernels_of(program(empty, (2, 3), {1: 0})) == [(1,), (2,), (3,)]


def test_arithmetic_and_what_sums_its_result_are_one_kernel() -> None:
    steps = [operation(C, (0,), 1), operation(E, (1,), 2, expensive=True), operation(R, (2,), 3), operation(K, (2,), 4)]
    assert (2, 3) in kernels_of(program(steps, (3, 4), {1: LARGE, 2: LARGE, 4: LARGE}))


def test_kernels_come_after_what_they_need_once_joined() -> None:
    steps = [
        operation(C, (0,), 1), operation(E, (1,), 2), operation(K, (2,), 3), operation(C, (0,), 4),
        operation(E, (1, 4), 5), operation(K, (5,), 6),
    ]  # fmt: skip
    one = program(steps, (3, 6), dict.fromkeys((1, 2, 4, 5), LARGE))
    seen = {0}
    for kernel in with_several_results(one, Fusion(one).run()):
        assert seen.issuperset(kernel.uses)
        seen.update(kernel.writes)
    assert (2, 5) in kernels_of(one)


@pytest.mark.parametrize(("elements", "use"), [(SMALL, Use.REPEATED), (LARGE, Use.SAME)])
def test_a_softmax_does_not_write_over_the_scores_that_it_reads_by_rows(elements: int, use: Use) -> None:
    steps = [operation(C, (0,), 1), operation(R, (1,), 2), operation(E, (1, 2), 3), operation(K, (3,), 4)]
    if use is Use.SAME:  # a sum of something else
        steps[1] = operation(K, (1,), 2)
    one = program(steps, (4,), {1: LARGE, 2: elements, 3: LARGE})
    (softmax,) = (kernel for kernel in with_several_results(one, Fusion(one).run()) if 3 in kernel.writes)
    assert softmax.uses[1] is use


def test_collectives_of_one_group_are_one_up_to_thirty_mebibytes() -> None:
    def sums(groups: Sequence[str]) -> list[Operation]:
        return [operation(K, (0,), 1 + at, name="psum", group=group) for at, group in enumerate(groups)]

    sizes = {1: 4_000_000, 2: 20_000_000, 3: 20_000_000, 4: 10_000_000}
    assert kernels_of(program(sums("aaaa"), (1, 2, 3, 4), sizes)) == [(1, 2), (3, 4)]
    assert kernels_of(program(sums("abab"), (1, 2, 3, 4), sizes)) == [(1, 3), (2, 4)]
    after = [*sums("a"), operation(K, (1,), 2), operation(K, (2,), 3, name="psum", group="a")]
    assert kernels_of(program(after, (3,))) == [(1,), (2,), (3,)]

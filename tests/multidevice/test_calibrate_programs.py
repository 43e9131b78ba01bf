"""Programs that measure: each case runs on the devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.calibrate.case import Case, Chain, Collective, Convolution, Product, Starts
from meshwright.calibrate.programs import Repeated, _filled, _repeat, _work_of
from meshwright.calibrate.traced_kernels import chain_kernels, convolution_kernels
from meshwright.cost.collective import KINDS

SIZE = 1 << 12
# Rows do not meet, so that as few do as many.
SHAPES = ((64, 64, 64), (96, 32, 64), (32, 512, 512))
CASES: list[Case] = [
    Product(dtype="float32", m=8, k=16, n=4),
    Convolution(batch=2, edge=4, channels=4, features=2, kernels=convolution_kernels(2, 4, 4, 2)),
    Starts(kernels=2),
    *(Chain(name=name, size_bytes=SIZE, kernels=chain_kernels(name, SIZE)) for name in ("add", "softmax")),
    *(Collective(kind=kind, size_bytes=SIZE, shape=(2, 4), axis=1) for kind in KINDS),
    Collective(kind="all_gather", size_bytes=SIZE, shape=(2, 4), axis=0, together=3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: getattr(case, "kind", None) or type(case).__name__)
def test_a_case_runs_as_often_as_asked(case: Case) -> None:
    program = Repeated(case, jax.devices())
    for times in (1, 3):
        assert program.seconds(times) > 0
        assert program.without(times) > 0


@pytest.mark.parametrize("in_a_row", [1, 4])
@pytest.mark.parametrize("times", [0, 1, 4, 11])
def test_repetitions_in_a_row_are_as_many(times: int, in_a_row: int) -> None:
    run = jax.jit(lambda times, start: _repeat(lambda x: 2 * x + 1, times, start, in_a_row=in_a_row))
    assert run(np.int32(times), jnp.int32(0)) == 2**times - 1


@pytest.mark.parametrize(
    "case",
    [
        Starts(kernels=2),
        *(Product(dtype=dtype, m=m, k=k, n=n) for dtype in ("float32", "bfloat16", "float16") for m, k, n in SHAPES),
    ],
    ids=str,
)
def test_values_neither_grow_nor_vanish(case: Case) -> None:
    work, shapes, dtype = _work_of(case, ("axis0",))
    mesh = Mesh(np.array(jax.devices()[:1], dtype=object), ("axis0",))
    begin = [_filled(shape, dtype, NamedSharding(mesh, PartitionSpec())) for shape in shapes]
    end = jax.jit(lambda arrays: _repeat(lambda x: work(*x), np.int32(500), tuple(arrays), in_a_row=1))(begin)
    for before, after in zip(begin, end, strict=True):
        largest = np.abs(np.asarray(after, np.float64)).max() / np.abs(np.asarray(before, np.float64)).max()
        assert 0.05 < largest < 20


@pytest.mark.parametrize("shape", [(1 << 14,), (64, 64), (2, 4, 4, 8)])
def test_arrays_are_filled_with_numbers_that_differ_in_sign_and_size(shape: tuple[int, ...]) -> None:
    mesh = Mesh(np.array(jax.devices()[:1], dtype=object), ("axis0",))
    array = np.asarray(_filled(shape, jnp.dtype("float32"), NamedSharding(mesh, PartitionSpec())))
    assert len(np.unique(np.abs(array))) > array.size // 4
    assert 0.2 < (array > 0).mean() < 0.8

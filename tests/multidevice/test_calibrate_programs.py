"""Programs that measure: each case runs on the devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.calibrate.case import Case, Chain, Collective, Convolution, Product, Starts
from meshwright.calibrate.programs import Repeated, _direction, _repeat
from meshwright.calibrate.traced_kernels import chain_kernels, convolution_kernels
from meshwright.cost.collective import KINDS

SIZE = 1 << 12
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


def test_products_of_what_arrays_are_filled_with_stay_as_they_are() -> None:
    u, v, w = map(_direction, (6, 16, 40))
    left, right = np.outer(u, v), np.outer(v, w)
    np.testing.assert_allclose(left @ right @ right.T, left, atol=1e-12)
    assert len({abs(number) for number in left.flat}) == left.size  # no two alike, as in data

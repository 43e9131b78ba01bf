"""Programs that measure: each case runs on the devices."""

from __future__ import annotations

import jax
import pytest

from meshwright.calibrate.case import Case, Chain, Collective, Convolution, Product, Starts
from meshwright.calibrate.programs import Repeated
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

"""Simulated steps against the formulas of the literature, exactly: the times are whole numbers or halves of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.schedule import (
    Schedule,
    adaptive,
    adaptive_warm_up,
    eager_one_f_one_b,
    gpipe,
    inference,
    interleaved_one_f_one_b,
    one_f_one_b,
    pipedream,
    zero_bubble,
)
from meshwright.simulate import Timing, simulate, steady_period_seconds

FEW = [(n, B) for n in (1, 2, 3, 4, 7, 16) for B in (1, 2, 3, 5, 15, 16, 17, 64)]
ALL = [(n, B) for n in range(1, 17) for B in range(1, 65)]
SIZES = [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.slow)]


def equal(stages: int, *, transfer_seconds: float | list[float] = 0.0) -> Timing:
    """Equal stages: a forward 1 s, a backward 2 s, half of it the weight gradient."""
    return Timing.uniform(
        stages=stages, forward_seconds=1.0, backward_seconds=2.0, weight_seconds=1.0, transfer_seconds=transfer_seconds
    )


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, eager_one_f_one_b, pipedream])
@pytest.mark.parametrize("sizes", SIZES)
def test_bubble_of_a_flushed_pipeline(make: Callable[[int, int], Schedule], sizes: list[tuple[int, int]]) -> None:
    for n, B in sizes:
        timeline = simulate(make(n, B), equal(n))
        assert timeline.step_seconds == 3 * (B + n - 1), (n, B)
        assert timeline.bubble_fraction == pytest.approx((n - 1) / (B + n - 1), abs=1e-15), (n, B)


@pytest.mark.parametrize("sizes", SIZES)
def test_interleaving_divides_the_bubble_by_the_chunks(sizes: list[tuple[int, int]]) -> None:
    for n, B in sizes:
        for chunks in (1, 2, 4):
            if B % n == 0:
                # The model of n stages cut finer: each stage takes 1/chunks of the time.
                fine = Timing.uniform(
                    stages=n * chunks, forward_seconds=1.0 / chunks, backward_seconds=2.0 / chunks, transfer_seconds=0.0
                )
                timeline = simulate(interleaved_one_f_one_b(n * chunks, B, chunks=chunks), fine)
                assert timeline.step_seconds - 3 * B == 3 * (n - 1) / chunks, (n, B, chunks)


@pytest.mark.parametrize("sizes", SIZES)
def test_zero_bubble_has_a_third_of_the_bubble(sizes: list[tuple[int, int]]) -> None:
    for n, B in sizes:
        step = simulate(zero_bubble(n, B), equal(n)).step_seconds
        if n <= B:
            assert 3 * (step - 3 * B) == simulate(one_f_one_b(n, B), equal(n)).step_seconds - 3 * B, (n, B)
        else:
            # Too few microbatches to fill the way there and back: forwards of all stages, input gradients of all but
            # the first, then both gradients of each microbatch on the first. No order on it can be shorter.
            assert step == n + (n - 1) + 2 * B, (n, B)


@pytest.mark.parametrize("sizes", SIZES)
def test_inference(sizes: list[tuple[int, int]]) -> None:
    for n, B in sizes:
        assert simulate(inference(n, B), equal(n, transfer_seconds=0.5)).step_seconds == B + n - 1 + 0.5 * (n - 1)


def test_transfers_stretch_one_f_one_b_and_hide_behind_eager() -> None:
    timing = equal(4, transfer_seconds=0.5)
    assert simulate(one_f_one_b(4, 64), timing).step_seconds == 251.0
    assert simulate(pipedream(4, 64), timing).step_seconds == 251.0
    assert simulate(eager_one_f_one_b(4, 64), timing).step_seconds == 204.0


def test_unequal_transfers_want_an_adaptive_warm_up() -> None:
    transfers = [0.2, 2.0, 0.0]
    timing = equal(4, transfer_seconds=transfers)
    warm_up = adaptive_warm_up(transfers, period_seconds=3.0)
    assert warm_up == (2, 3, 1)
    steps = [
        simulate(schedule, timing).step_seconds
        for schedule in (one_f_one_b(4, 64), eager_one_f_one_b(4, 64), adaptive(4, 64, warm_up=warm_up))
    ]
    # 0.2 is not a binary fraction: sums of it carry their last bits.
    assert steps == pytest.approx([329.4, 224.4, 205.4], rel=1e-13)


def test_adaptive_with_delayed_weight_gradients_needs_less_warm_up() -> None:
    # Cotangents leave 1 s early, so that d = 1 + ceil((2 * 1.5 - 1) / 3) = 2 hides 1.5 s and d = 1 hides 0.5 s.
    for transfer, needed in ((0.5, 1), (1.5, 2), (2.0, 2), (2.5, 3)):
        warm_up = adaptive_warm_up([transfer] * 3, period_seconds=3.0, weight_gradient_seconds=1.0)
        assert warm_up == (needed,) * 3
        timing = equal(4, transfer_seconds=transfer)
        fits = adaptive(4, 64, warm_up=warm_up, split_backward=True)
        assert steady_period_seconds(fits, timing) == 3.0
        # A step is the steady state and the way there and back, once.
        assert simulate(fits, timing).step_seconds <= 3.0 * 64 + 3 * (3.0 + 2 * transfer)
        if needed > 1:
            fewer = adaptive(4, 64, warm_up=[d - 1 for d in warm_up], split_backward=True)
            assert steady_period_seconds(fewer, timing) > 3.0
            assert simulate(fewer, timing).step_seconds > simulate(fits, timing).step_seconds

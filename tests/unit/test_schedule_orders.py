"""Each schedule is the one of its paper, holds what it promises, and refuses what it cannot do."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from meshwright.errors import PlanError
from meshwright.schedule import (
    SCHEDULES,
    Edge,
    Mode,
    Schedule,
    ScheduleError,
    adaptive,
    adaptive_warm_up,
    eager_one_f_one_b,
    filling_warm_up,
    gpipe,
    inference,
    interleaved_one_f_one_b,
    make_schedule,
    one_f_one_b,
    pipedream,
    zero_bubble,
)

LETTERS = {"forward": "f", "backward": "b", "backward_input": "i", "backward_weight": "w", "update": "u"}


def written(schedule: Schedule, rank: int) -> str:
    """A rank's program in short: f0 b0 u; with the stage in front where a rank has several: 2:f0."""
    several = len(set(schedule.stage_ranks)) < schedule.stages
    return " ".join(
        (f"{one.stage}:" if several else "")
        + LETTERS[one.kind]
        + ("" if one.microbatch is None else str(one.microbatch))
        for one in schedule.ranks[rank]
    )


@pytest.mark.parametrize(
    ("schedule", "programs"),
    [
        (gpipe(2, 3), ["f0 f1 f2 b2 b1 b0 u", "f0 f1 f2 b2 b1 b0 u"]),
        (one_f_one_b(3, 4), ["f0 f1 f2 b0 f3 b1 b2 b3 u", "f0 f1 b0 f2 b1 f3 b2 b3 u", "f0 b0 f1 b1 f2 b2 f3 b3 u"]),
        (one_f_one_b(2, 2, split_backward=True), ["f0 f1 i0 w0 i1 w1 u", "f0 i0 w0 f1 i1 w1 u"]),
        (eager_one_f_one_b(2, 4), ["f0 f1 f2 b0 f3 b1 b2 b3 u", "f0 b0 f1 b1 f2 b2 f3 b3 u"]),
        (adaptive(2, 4, warm_up=[3]), ["f0 f1 f2 f3 b0 b1 b2 b3 u", "f0 b0 f1 b1 f2 b2 f3 b3 u"]),
        (pipedream(2, 3), ["f0 f1 b0 u0 f2 b1 u1 b2 u2", "f0 b0 u0 f1 b1 u1 f2 b2 u2"]),
        (inference(2, 3), ["f0 f1 f2", "f0 f1 f2"]),
        (
            zero_bubble(3, 4),
            [
                "f0 f1 f2 i0 w0 f3 i1 w1 i2 w2 i3 w3 u",
                "f0 f1 i0 f2 i1 w0 f3 i2 w1 i3 w2 w3 u",
                "f0 i0 f1 i1 f2 i2 w0 f3 i3 w1 w2 w3 u",
            ],
        ),
        (
            interleaved_one_f_one_b(4, 4, chunks=2),
            [
                "0:f0 0:f1 2:f0 2:f1 0:f2 2:b0 0:f3 2:b1 2:f2 0:b0 2:f3 0:b1 2:b2 2:b3 0:b2 0:b3 0:u 2:u",
                "1:f0 1:f1 3:f0 3:b0 3:f1 3:b1 1:f2 1:b0 1:f3 1:b1 3:f2 3:b2 3:f3 3:b3 1:b2 1:b3 1:u 3:u",
            ],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_orders(schedule: Schedule, programs: list[str]) -> None:
    assert [written(schedule, rank) for rank in range(len(schedule.ranks))] == programs


def test_interleaving_with_one_chunk_is_one_f_one_b() -> None:
    for stages, microbatches in ((1, 1), (3, 4), (4, 2)):
        assert interleaved_one_f_one_b(stages, microbatches, chunks=1).ranks == one_f_one_b(stages, microbatches).ranks


def test_eager_is_adaptive_with_two_on_each_edge() -> None:
    assert adaptive(5, 12, warm_up=[2] * 4).ranks == eager_one_f_one_b(5, 12).ranks
    assert adaptive(5, 12, warm_up=[1] * 4).ranks == one_f_one_b(5, 12).ranks


def test_modes() -> None:
    assert {name: make_schedule(name, 2, 2, **options(name)).mode for name in SCHEDULES} == {
        "gpipe": Mode.SYNCHRONOUS,
        "one_f_one_b": Mode.SYNCHRONOUS,
        "pipedream": Mode.ASYNCHRONOUS,
        "eager_one_f_one_b": Mode.SYNCHRONOUS,
        "adaptive": Mode.SYNCHRONOUS,
        "interleaved_one_f_one_b": Mode.SYNCHRONOUS,
        "zero_bubble": Mode.SYNCHRONOUS,
        "inference": Mode.INFERENCE,
        "replicas": Mode.SYNCHRONOUS,
    }


def options(name: str) -> dict[str, object]:
    return {"adaptive": {"warm_up": [2]}, "interleaved_one_f_one_b": {"chunks": 2}, "replicas": {"shares": [1, 1]}}.get(
        name, {}
    )


def test_weight_versions() -> None:
    assert pipedream(4, 64).weight_versions == (4, 3, 2, 1)
    # Two forwards with the first weights, then their two backwards: the first weights and those just made.
    assert pipedream(2, 2).weight_versions == (2, 1)
    assert one_f_one_b(4, 64).weight_versions == (1, 1, 1, 1)
    assert inference(2, 4).weight_versions == (1, 1)


def test_weight_gradients_that_are_put_off() -> None:
    """Those of stage i start i microbatches late: by then one more has its input gradient."""
    assert zero_bubble(4, 8).delayed == (1, 2, 3, 4)
    assert zero_bubble(4, 2).delayed == (1, 2, 2, 2)
    assert one_f_one_b(4, 8).delayed == (0, 0, 0, 0)


def test_an_adaptive_stage_runs_as_far_ahead_as_its_neediest_edge_asks() -> None:
    edges = [Edge(0, 1), Edge(1, 2), Edge(2, 3), Edge(0, 3)]
    assert adaptive(4, 16, edges=edges, warm_up=[1, 1, 1, 2]).in_flight == (4, 3, 2, 1)
    assert adaptive(4, 16, edges=edges, warm_up=[1, 1, 1, 6]).in_flight == (7, 3, 2, 1)
    # The warm-ups belong to the edges in the order they are given in.
    assert adaptive(4, 16, edges=edges[::-1], warm_up=[6, 1, 1, 1]).in_flight == (7, 3, 2, 1)


def test_adaptive_warm_up() -> None:
    assert adaptive_warm_up([0.0, 0.5, 1.5, 1.6, 3.0, 3.1], period_seconds=3.0) == (1, 2, 2, 3, 3, 4)
    assert adaptive_warm_up([0.5, 1.5, 2.0], period_seconds=3.0, weight_gradient_seconds=1.0) == (1, 2, 2)
    # 2 * 0.3 / 0.2 is 2.9999999999999996 or 3.0000000000000004 depending on how it is computed; both mean 3.
    assert adaptive_warm_up([0.1 * 3], period_seconds=0.2) == adaptive_warm_up([0.3], period_seconds=0.2) == (4,)


def test_a_filling_warm_up_has_no_more_in_flight_than_there_is_room_for() -> None:
    generator = np.random.default_rng(0)
    longer = 0
    for _ in range(200):
        stages = int(generator.integers(2, 7))
        edges = [Edge(i, i + 1) for i in range(stages - 1)]
        edges += [Edge(i, i + 2) for i in range(stages - 2) if generator.random() < 0.3]
        least = generator.integers(1, 4, len(edges)).tolist()
        held = adaptive(stages, 64, edges=edges, warm_up=least).in_flight
        most = [min(one + int(more), 64) for one, more in zip(held, generator.integers(0, 9, stages), strict=True)]
        f, b, c = generator.random(stages), 2 * generator.random(stages), generator.random(len(edges))
        filling = filling_warm_up(
            least, edges=edges, forward_seconds=f.tolist(), backward_seconds=b.tolist(), transfer_seconds=c.tolist(),
            least_in_flight=held, most_in_flight=most,
        )  # fmt: skip
        assert all(more >= few for more, few in zip(filling, least, strict=True))
        filled = adaptive(stages, 64, edges=edges, warm_up=filling).in_flight
        assert all(low <= one <= high for low, one, high in zip(held, filled, most, strict=True))
        longer += filled != held
    assert longer > 50


def test_a_schedule_is_a_value() -> None:
    assert one_f_one_b(3, 4) == one_f_one_b(3, np.int64(4))
    assert hash(one_f_one_b(3, 4)) == hash(one_f_one_b(3, 4))
    assert one_f_one_b(3, 4) != one_f_one_b(3, 5)
    assert str(one_f_one_b(3, 4)) == "one_f_one_b (synchronous): 3 stages on 3 ranks, 4 microbatches"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(0, 2), (2, 0), (-1, 2), (2, 1.5), (2, True), (2, "4")])
def test_counts_are_refused(name: str, stages: int, microbatches: int) -> None:
    with pytest.raises(ScheduleError, match=r"got .* (stages|microbatches); needed a whole number of at least 1"):
        make_schedule(name, stages, microbatches, **options(name))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: interleaved_one_f_one_b(6, 4, chunks=4),
            r"6 stages in 4 chunks; needed a multiple of 4 stages.*chunks=3",
        ),
        (
            lambda: interleaved_one_f_one_b(8, 6, chunks=2),
            r"6 microbatches on 4 ranks; needed a multiple of 4.*try 8 mic",
        ),
        (lambda: interleaved_one_f_one_b(8, 8, chunks=0), "got 0 chunks"),
        (lambda: adaptive(4, 8, warm_up=[1, 1]), "2 warm-ups; needed 3, one for each edge"),
        (lambda: adaptive(2, 8, warm_up=[0]), "got 0 warm_up"),
        (lambda: adaptive_warm_up([-1.0], period_seconds=1.0), r"got -1.0 s.*where: transfer_seconds\[0\]"),
        (lambda: adaptive_warm_up([math.nan], period_seconds=1.0), "got nan s"),
        (lambda: adaptive_warm_up([1.0], period_seconds=0.0), "got 0.0 s; needed finite seconds > 0"),
        (lambda: adaptive_warm_up([1.0], period_seconds=math.inf), "got inf s"),
        (lambda: adaptive_warm_up([1.0], period_seconds=1.0, weight_gradient_seconds=math.inf), "got inf s"),
        (lambda: gpipe(3, 2, edges=[Edge(1, 0)]), "got the edge 1->0; needed source < target"),
        (lambda: gpipe(3, 2, edges=[Edge(1, 3)]), "got the edge 1->3"),
        (lambda: gpipe(3, 2, edges=[Edge(0, 1), Edge(0, 1)]), "an edge twice"),
        (lambda: make_schedule("1f1b", 2, 2), "needed one of gpipe, one_f_one_b.*try 'one_f_one_b'"),
        (lambda: make_schedule("zerobubble", 2, 2), "try 'zero_bubble'"),
        (
            lambda: make_schedule("gpipe", 2, 2, chunks=2),
            "unexpected keyword argument 'chunks'; needed of the options edges",
        ),
        (lambda: make_schedule("interleaved_one_f_one_b", 2, 2), "missing a required .*argument: 'chunks'"),
    ],
)
def test_refusals(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        build()
    assert isinstance(caught.value, PlanError)
    assert caught.value.try_


def test_schedules_that_are_remembered_are_refused_all_the_same() -> None:
    """1 and True, 4 and 4.0 are equal keys, and not the same arguments; what has no hash the function refuses."""
    known = make_schedule("interleaved_one_f_one_b", 4, 4, chunks=1)
    assert make_schedule("interleaved_one_f_one_b", 4, 4, chunks=1) is known
    for microbatches, chunks in ((4.0, 1), (4, True), ([4], 1), (4, {})):
        with pytest.raises(ScheduleError):
            make_schedule("interleaved_one_f_one_b", 4, microbatches, chunks=chunks)

"""The checker finds nothing in any schedule over its whole range, and everything in one that was tampered with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.schedule import (
    Edge,
    Instruction,
    Kind,
    Schedule,
    ScheduleError,
    adaptive,
    check_schedule,
    eager_one_f_one_b,
    gpipe,
    inference,
    interleaved_one_f_one_b,
    one_f_one_b,
    pipedream,
    zero_bubble,
)

# In flight on stage i of n with B microbatches, as each schedule promises.
LIMITS: dict[str, tuple[Callable[[int, int], Schedule], Callable[[int, int, int], int]]] = {
    "gpipe": (gpipe, lambda i, n, B: B),
    "one_f_one_b": (one_f_one_b, lambda i, n, B: min(B, n - i)),
    "pipedream": (pipedream, lambda i, n, B: min(B, n - i)),
    "eager_one_f_one_b": (eager_one_f_one_b, lambda i, n, B: min(B, 2 * (n - i) - 1)),
    "adaptive": (
        lambda n, B: adaptive(n, B, warm_up=[1 + i % 3 for i in range(n - 1)], split_backward=True),
        lambda i, n, B: min(B, 1 + sum(1 + e % 3 for e in range(i, n - 1))),
    ),
    "zero_bubble": (zero_bubble, lambda i, n, B: min(B, n)),
    "inference": (inference, lambda i, n, B: 1),
}
FEW = [(n, B) for n in (1, 2, 3, 5, 8) for B in (1, 2, 3, 4, 7, 8, 16, 33)] + [(16, 16), (16, 64)]
ALL = [(n, B) for n in range(1, 17) for B in range(1, 65)]


def check_all(name: str, sizes: list[tuple[int, int]]) -> None:
    make, limit = LIMITS[name]
    for stages, microbatches in sizes:
        schedule = make(stages, microbatches)
        assert check_schedule(schedule) == (), (stages, microbatches)
        expected = tuple(limit(stage, stages, microbatches) for stage in range(stages))
        assert schedule.in_flight == schedule.in_flight_limit == expected, (stages, microbatches)


def check_interleaved(sizes: list[tuple[int, int]]) -> None:
    for ranks, microbatches in sizes:
        for chunks in (2, 3):
            if microbatches % ranks == 0:
                schedule = interleaved_one_f_one_b(ranks * chunks, microbatches, chunks=chunks)
                assert check_schedule(schedule) == (), (ranks, microbatches, chunks)
                ahead = tuple(
                    min(2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1, microbatches * chunks)
                    for rank in range(ranks)
                )
                assert schedule.in_flight_limit == ahead


@pytest.mark.parametrize("name", LIMITS)
def test_every_schedule_is_sound(name: str) -> None:
    check_all(name, FEW)


def test_interleaving_is_sound() -> None:
    check_interleaved(FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_every_schedule_is_sound_for_1_to_16_stages_and_1_to_64_microbatches(name: str) -> None:
    check_all(name, ALL)


@pytest.mark.slow
def test_interleaving_is_sound_for_1_to_16_ranks_and_1_to_64_microbatches() -> None:
    check_interleaved(ALL)


def skips(stages: int) -> list[Edge]:
    """The edges of a U-Net: neighbours, and from each stage to its mirror image."""
    near = [Edge(i, i + 1) for i in range(stages - 1)]
    return sorted({*near, *(Edge(i, stages - 1 - i) for i in range(stages // 2))})


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, eager_one_f_one_b, zero_bubble, pipedream, inference])
@pytest.mark.parametrize("edges", [skips, lambda n: [Edge(0, n - 1)], lambda n: []], ids=["u-net", "ends", "none"])
def test_any_stage_graph_is_sound(make: Callable[..., Schedule], edges: Callable[[int], list[Edge]]) -> None:
    for stages in (2, 5, 8):
        assert check_schedule(make(stages, 6, edges=edges(stages))) == ()


def swapped(schedule: Schedule, rank: int, first: int, second: int) -> Schedule:
    program = list(schedule.ranks[rank])
    program[first], program[second] = program[second], program[first]
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(program), *schedule.ranks[rank + 1 :]))


def with_program(schedule: Schedule, rank: int, program: tuple[Instruction, ...]) -> Schedule:
    return replace(schedule, ranks=(*schedule.ranks[:rank], program, *schedule.ranks[rank + 1 :]))


GOOD = one_f_one_b(2, 3)  # f0 f1 b0 f2 b1 b2 u | f0 b0 f1 b1 f2 b2 u
OTHER = Instruction(kind=Kind.FORWARD, stage=0, microbatch=3)


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (with_program(GOOD, 1, GOOD.ranks[1][:-1]), "stage 1: got 0 times update; needed once"),
        (with_program(GOOD, 0, GOOD.ranks[0][1:]), "stage 0, microbatch 0: got 0 times forward; needed once"),
        (
            with_program(GOOD, 0, (*GOOD.ranks[0], GOOD.ranks[0][2])),
            "stage 0, microbatch 0: got 2 times backward; needed once",
        ),
        (
            with_program(GOOD, 0, GOOD.ranks[1]),
            "rank 0: got forward of stage 1, microbatch 0; needed a stage that it holds",
        ),
        (with_program(GOOD, 0, (OTHER,)), "rank 0: got forward of stage 0, microbatch 3; needed a microbatch of 0..2"),
        (
            swapped(GOOD, 1, 0, 1),
            "rank 1: got backward of stage 1, microbatch 0 before forward of stage 1, microbatch 0; needed it after",
        ),
        (
            swapped(GOOD, 1, 5, 6),
            "rank 1: got update of stage 1 before backward of stage 1, microbatch 2; needed it after",
        ),
        (swapped(GOOD, 0, 2, 3), "rank 0: got 3 microbatches in flight; needed at most 2"),
        (replace(GOOD, in_flight_limit=(1, 1)), "rank 0: got 2 microbatches in flight; needed at most 1"),
        (replace(GOOD, in_flight_limit=(1,)), "in_flight_limit: got 1 numbers; needed 2"),
        (replace(GOOD, stage_ranks=(0, 5)), "stage 1: got rank 5; needed one of 0..1"),
        (
            replace(GOOD, edges=(Edge(1, 1),)),
            "edge 1->1: got stages out of order or range; needed source < target < 2",
        ),
        (replace(GOOD, edges=GOOD.edges * 2), "edges: got one twice; needed each once"),
        (replace(GOOD, microbatches=0), "got 2 stages and 0 microbatches; needed at least one of each"),
        (
            replace(pipedream(2, 2), mode=GOOD.mode),
            "stage 0, microbatch 0: got 1 times update; needed none",
        ),
        (
            replace(zero_bubble(1, 2), ranks=(zero_bubble(1, 2).ranks[0][:-2],)),
            "stage 0, microbatch 1: got 0 times backward_weight; needed once",
        ),
    ],
)
def test_faults_are_found(broken: Schedule, fault: str) -> None:
    assert fault in check_schedule(broken)


def test_a_deadlock_is_named() -> None:
    # Rank 0 wants the cotangent of microbatch 0 before it has sent microbatch 1, rank 1 the other way round.
    lazy, hasty = one_f_one_b(1, 2).ranks[0], one_f_one_b(2, 2).ranks[0]
    stuck = replace(
        one_f_one_b(2, 2),
        ranks=(lazy, tuple(replace(one, stage=1) for one in hasty)),
        in_flight_limit=(2, 2),
    )
    (fault,) = check_schedule(stuck)
    assert (
        "got a deadlock: rank 0 stands at backward of stage 0, microbatch 0 and waits for backward of stage 1, "
        "microbatch 0; rank 1 stands at forward of stage 1, microbatch 1 and waits for forward of stage 0, microbatch 1"
    ) in fault
    with pytest.raises(ScheduleError, match="where: ranks 0, 1"):
        stuck.walk  # noqa: B018


def test_a_missing_producer_is_named_without_the_checker() -> None:
    with pytest.raises(ScheduleError, match=r"computes what it reads of stage 0.*where: forward of stage 1, microb"):
        with_program(GOOD, 0, ()).walk  # noqa: B018

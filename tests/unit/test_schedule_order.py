"""The global order: each rank's share of it runs to the end when both ends of every transfer block."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.schedule import (
    Direction,
    Edge,
    Instruction,
    Kind,
    Schedule,
    Transfer,
    adaptive,
    eager_one_f_one_b,
    global_order,
    gpipe,
    inference,
    interleaved_one_f_one_b,
    one_f_one_b,
    pipedream,
    rank_programs,
    transfer_order,
    zero_bubble,
)

UNET = [Edge(0, 1), Edge(1, 2), Edge(2, 3), Edge(0, 3), Edge(1, 3)]
SCHEDULES = [
    gpipe(4, 5),
    gpipe(4, 5, edges=UNET),
    one_f_one_b(4, 7),
    one_f_one_b(4, 7, edges=UNET),
    one_f_one_b(5, 6, split_backward=True),
    eager_one_f_one_b(4, 9),
    eager_one_f_one_b(4, 9, edges=UNET),
    adaptive(4, 9, warm_up=[3, 1, 2]),
    pipedream(3, 5),
    zero_bubble(4, 8),
    zero_bubble(6, 3),
    interleaved_one_f_one_b(8, 8, chunks=2),
    interleaved_one_f_one_b(9, 6, chunks=3),
    interleaved_one_f_one_b(4, 2, chunks=4),
    inference(4, 4, edges=UNET),
    one_f_one_b(1, 3),
]


def rendezvous(schedule: Schedule) -> int:
    """Run all ranks' programs, a transfer only when both of its ranks stand at it; how many steps ran."""
    programs = rank_programs(schedule)
    head, ran, moved = [0] * len(programs), 0, True
    here: set[object] = set()  # what has been computed or has arrived
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while head[rank] < len(program):
                step = program[head[rank]]
                if isinstance(step, Transfer):
                    sender, receiver = schedule.stage_ranks[step.sender], schedule.stage_ranks[step.receiver]
                    other = receiver if rank == sender else sender
                    if head[other] >= len(programs[other]) or programs[other][head[other]] != step:
                        break
                    assert (step.direction, step.sender, step.microbatch) in here, f"{step} before it exists"
                    head[other] += 1
                    here.add(step)
                else:
                    for needed in reads(schedule, step):
                        assert needed in here, f"{step} before {needed}"
                    way = Direction.FORWARD if step.kind is Kind.FORWARD else Direction.BACKWARD
                    if step.kind is not Kind.BACKWARD_WEIGHT:
                        here.add((way, step.stage, step.microbatch))
                head[rank] += 1
                ran, moved = ran + 1, True
    assert head == [len(program) for program in programs], "deadlock"
    return ran


def reads(schedule: Schedule, one: Instruction) -> list[object]:
    """What an instruction needs: transfers from other ranks, values of its own."""
    if one.kind in (Kind.UPDATE, Kind.BACKWARD_WEIGHT):
        return []
    assert one.microbatch is not None
    way = Direction.FORWARD if one.kind is Kind.FORWARD else Direction.BACKWARD
    found: list[object] = [] if way is Direction.FORWARD else [(Direction.FORWARD, one.stage, one.microbatch)]
    for edge in schedule.edges:
        transfer = Transfer(edge=edge, direction=way, microbatch=one.microbatch)
        if transfer.receiver == one.stage:
            near = schedule.stage_ranks[edge.source] == schedule.stage_ranks[edge.target]
            found.append((way, transfer.sender, one.microbatch) if near else transfer)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_blocking_ranks_run_to_the_end(schedule: Schedule) -> None:
    assert rendezvous(schedule) == len(global_order(schedule))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_order_holds_everything_once_and_keeps_ranks_in_theirs(schedule: Schedule) -> None:
    order = global_order(schedule)
    assert len(set(order)) == len(order)
    for rank, program in enumerate(schedule.ranks):
        own = [one for one in order if isinstance(one, Instruction) and schedule.stage_ranks[one.stage] == rank]
        assert tuple(own) == program
    crossing = [e for e in schedule.edges if schedule.stage_ranks[e.source] != schedule.stage_ranks[e.target]]
    ways = 1 if schedule.name == "inference" else 2
    transfers = transfer_order(schedule)
    assert len(transfers) == len(crossing) * ways * schedule.microbatches
    assert transfers == tuple(step for step in order if isinstance(step, Transfer))


def test_a_value_leaves_right_after_it_exists() -> None:
    # No instruction of the sender stands between the one that computes a value and its transfer.
    for schedule in SCHEDULES:
        for program in rank_programs(schedule):
            last = None
            for step in program:
                if isinstance(step, Instruction):
                    last = step
                elif step.sender == getattr(last, "stage", None) and last is not None:
                    forward = step.direction is Direction.FORWARD
                    if schedule.stage_ranks.count(schedule.stage_ranks[step.sender]) == 1:
                        assert last.microbatch == step.microbatch
                        assert (last.kind is Kind.FORWARD) == forward


def test_the_order_is_the_same_in_every_process() -> None:
    code = (
        "import hashlib\n"
        "from meshwright.schedule import *\n"
        "order = global_order(interleaved_one_f_one_b(8, 8, chunks=2)) + global_order(zero_bubble(5, 9))\n"
        "print(hashlib.sha256('\\n'.join(map(str, order)).encode()).hexdigest())\n"
    )
    seen = set()
    for seed in ("0", "1"):
        child = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert child.returncode == 0, child.stderr
        seen.add(child.stdout)
    assert len(seen) == 1

"""Interleaved 1F1B: several smaller stages on each rank.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC 2021): with
v chunks on each of n ranks, stage s is on rank s mod n, and microbatches pass through the ranks v times, n of them at a
time. The pipeline fills v times as fast: on equal stages the bubble of 1F1B is divided by v. The price is v times the
transfers, and more in flight.

Known limit: microbatches must be a multiple of the ranks, because each group of n passes through a chunk together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from .errors import check_count, refusal
from .instruction import Edge, Instruction, Kind, for_each_microbatch
from .schedule import Mode, Schedule, check_edges


def interleaved_one_f_one_b(
    stages: int, microbatches: int, *, chunks: int, edges: Sequence[Edge] | None = None
) -> Schedule:
    """1F1B with `chunks` stages on each rank.

    >>> interleaved_one_f_one_b(4, 4, chunks=2).stage_ranks
    (0, 1, 0, 1)

    Args:
      stages: how many in all; a multiple of `chunks`.
      microbatches: how many; a multiple of the ranks, stages / chunks, unless `chunks` is 1.
      chunks: stages on each rank; 1 gives the order of `one_f_one_b`.
      edges: of the stage graph; None for a chain.

    Raises:
      ScheduleError: fewer than one stage, microbatch or chunk, numbers that do not divide, or an edge that is not of
        the stages.
    """
    name = "interleaved_one_f_one_b"
    stages = check_count(name, "stages", stages)
    microbatches = check_count(name, "microbatches", microbatches)
    chunks = check_count(name, "chunks", chunks)
    if stages % chunks:
        try_ = f"chunks={_largest_divisor(stages, chunks)}, or {stages - stages % chunks + chunks} stages"
        raise refusal(name, "stages", f"{stages} stages in {chunks} chunks", f"a multiple of {chunks} stages", try_)
    count = stages // chunks
    if chunks > 1 and microbatches % count:
        got, needed = f"{microbatches} microbatches on {count} ranks", f"a multiple of {count} microbatches"
        raise refusal(name, "microbatches", got, needed, f"{microbatches - microbatches % count + count} microbatches")
    programs, held = [], []
    for rank in range(count):
        program, most = _program(rank, count, chunks, microbatches)
        updates = (Instruction(kind=Kind.UPDATE, stage=s, microbatch=None) for s in range(rank, stages, count))
        programs.append((*program, *updates))
        held.append(most)
    return Schedule(
        name=name,
        stages=stages,
        microbatches=microbatches,
        mode=Mode.SYNCHRONOUS,
        ranks=tuple(programs),
        stage_ranks=tuple(stage % count for stage in range(stages)),
        edges=check_edges(name, stages, edges),
        in_flight_limit=tuple(held),
    )


def _program(rank: int, ranks: int, chunks: int, microbatches: int) -> tuple[list[Instruction], int]:
    """Instructions of a rank without its updates, and the most it has in flight."""
    total = microbatches * chunks
    group = ranks if chunks > 1 else 1
    mine = range(rank, ranks * chunks, ranks)
    forward = [for_each_microbatch(Kind.FORWARD, stage, microbatches) for stage in mine]
    backward = [for_each_microbatch(Kind.BACKWARD, stage, microbatches) for stage in mine]
    forwards: list[Instruction] = []
    backwards: list[Instruction] = []
    for first in range(0, microbatches, group):  # a group passes through all chunks together
        for row, back in zip(forward, reversed(backward), strict=True):
            forwards += row[first : first + group]
            backwards += back[first : first + group]
    # With one chunk a value is back after as many turns as there are ranks behind; with more, a rank passes on
    # the other chunks of the group first, and its group must wait for both ends of the pipeline.
    ahead = (ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks + 1
    ahead = min(ahead, total)
    in_turn = chain.from_iterable(zip(forwards[ahead - 1 :], backwards, strict=False))
    return [*forwards[: ahead - 1], *in_turn, *backwards[total - ahead + 1 :]], ahead


def _largest_divisor(number: int, at_most: int) -> int:
    return max(d for d in range(1, at_most + 1) if number % d == 0)

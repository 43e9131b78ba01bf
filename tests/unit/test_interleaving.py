"""Several stages a rank: they share its memory, and the one that needs more of it gets what the others leave."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.cluster import load_cluster
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.schedule import interleaved_one_f_one_b
from meshwright.search.interleaving import interleaved
from meshwright.search.memory_reserve import MemoryReserve
from meshwright.search.parameters import parameter_infos
from meshwright.search.pins import Pins
from meshwright.search.stage_costs import StageCosts
from meshwright.search.submeshes import Submeshes
from meshwright.zoo import registry

RANKS, CHUNKS, MICROBATCHES = 2, 2, 4


@cache
def costs() -> StageCosts:
    target = registry.build("gpt-tiny", global_batch=8)
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=MICROBATCHES)
    return StageCosts(
        staged_program(program, layers=8), parameters=parameter_infos(program),
        submeshes=Submeshes(load_cluster("cpu")), pins=Pins(), remat=None,
    )  # fmt: skip


def test_what_ranks_hold_fits_and_more_memory_is_never_slower() -> None:
    own = interleaved_one_f_one_b(RANKS * CHUNKS, MICROBATCHES, chunks=CHUNKS).in_flight
    usable = costs().submeshes.cluster.device.usable_memory_bytes

    def in_memory(size: float) -> tuple[float, list[float]] | None:
        """Seconds of the slowest stage, and bytes of each stage, of the first way whose ranks fit."""
        costs().reserve(MemoryReserve(usable - size, usable - size))
        for stages in interleaved(costs(), RANKS, CHUNKS):
            held = [s.option.constant_bytes + n * s.option.in_flight_bytes for s, n in zip(stages, own, strict=True)]
            if all(sum(held[rank::RANKS]) <= size * (1 + 1e-9) for rank in range(RANKS)):
                return max(s.option.seconds for s in stages), held
        return None

    free: Any = in_memory(usable)
    assert free is not None
    most = max(sum(free[1][rank::RANKS]) for rank in range(RANKS))
    found = [in_memory(share * most) for share in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    assert found[-1] is not None
    assert found[-1][0] == free[0]
    seconds = [one[0] for one in found if one is not None]
    assert len(seconds) > 2
    assert seconds == sorted(seconds, reverse=True)
    # More than its equal share.
    assert any(one is not None and max(one[1]) > share * most / CHUNKS * (1 + 1e-9)
               for one, share in zip(found, (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), strict=True))  # fmt: skip

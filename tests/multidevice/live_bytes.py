"""What the devices of a pipeline hold while it runs, beside the simulator's curve. In every process for its own."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from meshwright.runtime.pipeline.executor import Executor
from meshwright.runtime.pipeline.step import PipelinedStep
from meshwright.runtime.resharding.one_program import OneProgram
from meshwright.simulate import Timeline
from meshwright.zoo import Target


@dataclass(frozen=True)
class Held:
    """The most bytes on a device of a rank when a program runs, its operands, results and temporaries included.

    `instruction` says whether it is one of the schedule's, and not one that begins the step or moves values.
    """

    rank: int
    bytes: int
    instruction: bool


def held_bytes(device: Any) -> int:
    """Bytes of all arrays alive on a device."""
    total = 0
    for array in jax.live_arrays():
        if not array.is_deleted() and device in array.sharding.device_set:
            words = jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array
            total += int(np.prod(array.sharding.shard_shape(words.shape), dtype=np.int64)) * words.dtype.itemsize
    return total


def measured(step: PipelinedStep, target: Target) -> list[Held]:
    """What is held whenever a program of the second step is issued. What others have left is not counted."""
    gc.collect()
    here = jax.local_devices()
    mine: dict[int, list[Any]] = {}
    for rank, stage in zip(step.schedule.stage_ranks, step.stages, strict=True):
        if devices := [d for d in stage.mesh.devices.flat if d in here]:
            mine[rank] = devices
    others = {device: held_bytes(device) for device in here}
    found: list[Held] = []
    temporaries: dict[int, int] = {}
    issue, move = Executor._issue, OneProgram.__call__

    def note(rank: int, devices: Sequence[Any], more: int, *, instruction: bool) -> None:
        found.append(Held(rank, more + max(held_bytes(d) - others[d] for d in devices), instruction))

    def issued(self: Executor, stage: Any, program: Any, arguments: Any, *rest: Any) -> Any:
        made = issue(self, stage, program, list(arguments), *rest)
        if id(program) not in temporaries:
            temporaries[id(program)] = stage.lower(program).compile().memory_analysis().temp_size_in_bytes
        rank = step.schedule.stage_ranks[stage.stage.number]
        begins = program is stage.begin or program is stage.prepare
        note(rank, mine[rank], temporaries[id(program)], instruction=not begins)
        return made

    def moved(self: OneProgram, values: Any) -> Any:
        made = move(self, values)
        if id(self) not in temporaries:
            shapes = [
                jax.ShapeDtypeStruct((len(self._devices) * shape[0], *shape[1:]), v.dtype, sharding=self._sharding)
                for shape, v in zip(self._stacked, values, strict=True)
            ]
            temporaries[id(self)] = self._jitted.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        results = zip(self._results, self._arrays, strict=True)
        whole = sum(math.prod(block) * array.dtype.itemsize for block, array in results)
        receivers = {d for to in self._to for d in to}
        for rank, devices in mine.items():
            for device in set(devices) & set(self._mine):
                unread = 0 if device.id in receivers else whole
                note(rank, [device], temporaries[id(self)] + unread, instruction=False)
        return made

    # Copied, or the arrays of JAX that these would be views of would be alive too.
    batch = jax.tree.map(np.array, jax.jit(target.make_batch)(jax.random.key(1)))
    state, _ = step(step.create(target.init, jax.random.key(0)), batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "_issue", issued)
        patch.setattr(OneProgram, "__call__", moved)
        step(state, batch)
    return found


def predicted(timeline: Timeline, rank: int) -> list[float]:
    """For each instruction of a rank the most bytes while it runs."""
    found = []
    events = [e for e in timeline.events if e.rank == rank]
    for event in events:
        begins, ends = event.start_seconds, event.end_seconds
        if event.kind == "update":  # begins with the synchronisation
            begins = found.pop()[1]
        before = [held for at, held in timeline.memory[rank] if at <= begins]
        inside = [held for at, held in timeline.memory[rank] if begins < at < ends]
        found.append((max(before[-1:] + inside), begins))
    return [held for held, _ in found]


def assert_as_predicted(step: PipelinedStep, target: Target, least: float = 0.75) -> None:
    """On no device at any instruction more than 10 % above the curve, and at no other time above its peak; and the
    curve is no empty promise: at its peak the device holds at least this part of it."""
    timeline = step.local.timeline()
    found = measured(step, target)
    ranks = sorted({held.rank for held in found})
    assert ranks
    for rank in ranks:
        mine = [held for held in found if held.rank == rank]
        curve = predicted(timeline, rank)
        instructions = [held.bytes for held in mine if held.instruction]
        for position, (have, allowed) in enumerate(zip(instructions, curve, strict=False)):
            assert have <= 1.1 * allowed, (rank, position, have, allowed)
        most, peak = max(held.bytes for held in mine), timeline.peak_bytes[rank]
        assert least * peak <= most <= 1.1 * peak, (rank, most, peak)

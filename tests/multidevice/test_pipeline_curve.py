"""What the devices of a pipeline hold while it runs, beside the simulator's curve."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from pipelines import Pipeline, pipelined, staged_plan

from meshwright import zoo
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.runtime.pipeline.executor import Executor
from meshwright.runtime.pipeline.local_stages import LocalStages
from meshwright.runtime.pipeline.step import PipelinedStep
from meshwright.simulate import Timeline
from meshwright.zoo import Target


@dataclass(frozen=True)
class Held:
    """Bytes on the first device of a stage when a program of it runs, its temporaries included."""

    stage: int
    bytes: int


def held_bytes(device: Any) -> int:
    """Bytes of all arrays alive on a device."""
    total = 0
    for array in jax.live_arrays():
        if not array.is_deleted() and device in array.sharding.device_set:
            words = jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array
            total += int(np.prod(array.sharding.shard_shape(words.shape), dtype=np.int64)) * words.dtype.itemsize
    return total


def measured(step: PipelinedStep, target: Target, monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    """What is held whenever a program of a step runs: its operands, which are let go after it, and its results, and
    the temporaries that the compiler says it needs. What other tests have left is not counted."""
    gc.collect()
    others = {stage.mesh.devices.flat[0]: held_bytes(stage.mesh.devices.flat[0]) for stage in step.stages}
    found: list[Held] = []
    temporaries: dict[int, int] = {}
    issue = Executor._issue

    def watched(self: Executor, stage: Any, program: Any, arguments: Any, *rest: Any) -> Any:
        made = issue(self, stage, program, list(arguments), *rest)
        if id(program) not in temporaries:
            compiled = stage.lower(program).compile()
            temporaries[id(program)] = compiled.memory_analysis().temp_size_in_bytes
        device = stage.mesh.devices.flat[0]
        held = held_bytes(device) - others[device] + temporaries[id(program)]
        found.append(Held(stage.stage.number, held))
        return made

    # Copied, or the arrays of JAX that these would be views of would be alive too.
    batch = jax.tree.map(np.array, jax.jit(target.make_batch)(jax.random.key(1)))
    state, _ = step(step.create(target.init, jax.random.key(0)), batch)
    monkeypatch.setattr(Executor, "_issue", watched)
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


CASES = [
    ("mlp", Pipeline(submeshes=(2, 2, 4))),
    pytest.param("llama-tiny", Pipeline(submeshes=(2, 2, 4)), marks=pytest.mark.slow),
    pytest.param("mlp", Pipeline(submeshes=(2, 2, 4), schedule="gpipe"), marks=pytest.mark.slow),
    pytest.param("mlp", Pipeline(submeshes=(2, 2, 4), schedule="zero_bubble"), marks=pytest.mark.slow),
    pytest.param("mlp", Pipeline(submeshes=(2, 2, 4), schedule="pipedream", microbatches=8), marks=pytest.mark.slow),
    pytest.param("llama-tiny", Pipeline(submeshes=(2, 2, 4), schedule="gpipe"), marks=pytest.mark.slow),
    pytest.param("gpt-tiny", Pipeline(submeshes=(2, 2, 4), microbatches=4), marks=pytest.mark.slow),
    pytest.param("gpt-tiny", Pipeline(submeshes=(4, 4), schedule="zero_bubble"), marks=pytest.mark.slow),
    pytest.param("unet-tiny", Pipeline(submeshes=(2, 2, 4), microbatches=4), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "pipeline"), CASES, ids=lambda x: getattr(x, "schedule", x))
def test_no_device_holds_more_than_predicted(name: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no instruction more than 10 % above the curve; and the curve is no empty promise: at its peak the device holds
    at least three quarters of it."""
    target = zoo.mlp(width=256, layers=6, batch=256) if name == "mlp" else zoo.build(name)
    step = pipelined(target.step, (target.example_state, target.example_batch), pipeline)
    timeline = step.local.timeline()
    found = measured(step, target, monkeypatch)
    for number in range(len(step.stages)):
        mine = [held.bytes for held in found if held.stage == number][1:]  # the first sets the gradients to zero
        curve = predicted(timeline, number)
        for position, (have, allowed) in enumerate(zip(mine, curve, strict=False)):
            assert have <= 1.1 * allowed, (number, position)
        assert max(mine) >= 0.75 * timeline.peak_bytes[number]


def test_the_memory_of_a_plan_is_that_of_its_programs() -> None:
    """Traced stages say what a scan keeps, which a search can only estimate. No device is needed."""
    target = zoo.build("llama-tiny")
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=2)
    plan = staged_plan(program, staged_program(program), Pipeline(submeshes=(2, 2, 4)))
    local = LocalStages(program, plan)
    traced = local.plan_with_memory()
    for stage, memory, peak in zip(traced.stages, local.memory, local.timeline().peak_bytes, strict=True):
        assert stage.memory.total == pytest.approx(peak)
        assert stage.memory.activations == memory.in_flight_bytes * stage.in_flight
    assert tuple(stage.in_flight for stage in traced.stages) == local.schedule.in_flight
    assert replace(traced, stages=plan.stages) == plan

"""Pipelines on the eight devices of this process, beside the same step on one device.

Stages are given, their layouts solved: which stages a search would choose is not what these tests are about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import jax
import numpy as np
from one_device import assert_equal_trees, copy

from meshwright.cluster import load_cluster
from meshwright.plan import Plan
from meshwright.program.inference import trace_inference
from meshwright.program.staged import StagedProgram, staged_program
from meshwright.program.trace import Program, trace_program
from meshwright.runtime.pipeline.step import PipelinedStep
from meshwright.search.inter.problem import PlacedStage
from meshwright.search.inter.submeshes import Submesh, Submeshes
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.pipelines.assembly import assemble
from meshwright.search.pipelines.timing import best_schedule, staged_timing
from meshwright.search.restrictions.constraints import Constraints
from meshwright.search.stages.costs import StageCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How a step is cut into stages.

    Args:
      submeshes: devices of each stage; where `options` have `chunks`, of each rank, which has so many stages.
      layers: layers of each stage; None for about as many in each.
      microbatches: parts of the batch.
      schedule: by name.
      options: of the schedule.
      scan_splits: of scanned layers.
      remat: "none" or "layer".
      meshes: logical meshes to choose from, as (names, sizes), for submeshes of so many devices; none for all.
      layouts: of parameters by path, as pins.
    """

    submeshes: Sequence[int] = (4, 4)
    layers: Sequence[int] | None = None
    microbatches: int = 4
    schedule: str = "one_f_one_b"
    options: tuple[tuple[str, Any], ...] = ()
    scan_splits: Mapping[int, Sequence[int]] | None = None
    remat: str = "none"
    meshes: Sequence[tuple[tuple[str, ...], tuple[int, ...]]] = ()
    layouts: Mapping[str, Any] = field(default_factory=dict)


def staged_plan(program: Program, staged: StagedProgram, pipeline: Pipeline) -> Plan:
    """A plan with the stages asked for, on neighbouring devices of this machine."""
    cluster = load_cluster("local")
    places = Submeshes(cluster)
    costs = StageCosts(
        staged, parameters=parameter_infos(program), submeshes=places,
        constraints=Constraints(layouts=pipeline.layouts),
        remat=pipeline.remat, meshes=pipeline.meshes,
    )  # fmt: skip
    chunks = dict(pipeline.options).get("chunks", 1)
    submeshes = [*pairwise(accumulate(pipeline.submeshes, initial=0))] * chunks
    count = len(submeshes)
    layers = pipeline.layers or [len(part) for part in np.array_split(np.arange(len(staged.layers)), count)]
    stages = []
    ranges = pairwise(accumulate(layers, initial=0))
    for (first, last), (start, stop) in zip(ranges, submeshes, strict=True):
        place = Submesh(start, stop)
        option = min(costs.solve(first, last, place, pipeline.microbatches), key=lambda one: one.seconds)
        stages.append(PlacedStage(first, last, place, option))
    timing = staged_timing(costs.solver, stages)
    scheduled = best_schedule(timing, pipeline.microbatches, ["gpipe"], chunks=chunks)
    assert scheduled is not None
    plan = assemble(costs, stages, scheduled)
    return replace(plan, schedule=pipeline.schedule, schedule_options=pipeline.options)


def pipelined(step: Callable[..., Any], args: Sequence[Any], pipeline: Pipeline, **options: Any) -> PipelinedStep:
    """A step as a pipeline on the devices of this process; `options` are those of `PipelinedStep`."""
    program = trace_program(step, args, microbatches=pipeline.microbatches)
    staged = staged_program(program, scan_splits=pipeline.scan_splits)
    return PipelinedStep(program, staged_plan(program, staged, pipeline), jax.devices(), **options)


def inference(step: Callable[..., Any], args: Sequence[Any], pipeline: Pipeline) -> PipelinedStep:
    """A step without gradients as a pipeline on the devices of this process."""
    program = trace_inference(step, args, microbatches=pipeline.microbatches)
    staged = staged_program(program, scan_splits=pipeline.scan_splits)
    return PipelinedStep(program, staged_plan(program, staged, pipeline), jax.devices())


def holders(step: PipelinedStep, index: int) -> list[int]:
    """The stages on whose devices an argument is kept."""
    sharding = step.in_shardings[index]
    assert sharding is not None
    return [n for n, stage in enumerate(step.stages) if sharding.device_set.intersection(stage.mesh.devices.flat)]


def whole(tree: Any) -> Any:
    """Every leaf as an array of NumPy; keys as their words."""

    def one(x: Any) -> Any:
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(one, tree)


def assert_as_on_one_device(
    step: Callable[..., Any], state: Any, *batch: Any, pipeline: Pipeline, steps: int = 3
) -> PipelinedStep:
    """Run `step` as a pipeline and on one device, and compare all that comes back."""
    alone = jax.jit(step)
    parallel = pipelined(step, (state, *batch), pipeline)
    expected, found = state, copy(state)
    metrics = expected_metrics = None
    for _ in range(steps):
        expected, expected_metrics = alone(expected, *batch)
        found, metrics = parallel(found, *batch)
    assert_equal_trees(whole((found, metrics)), whole((expected, expected_metrics)))
    return parallel

"""A plan compiled, run for a few steps on the local devices, and compared with one device.

Known limits: a step with kinks (ReLU, max pooling, the choice of an expert) can turn a difference in the last digit
into a visible one: what is zero but for rounding is passed on one side and not on the other. That happens by chance, a
wrong plan is wrong from every start: where results differ, two more starts are tried, further along the run, and for
each leaf the median decides.

Microbatches whose losses are combined as the caller says (`reduction=`) may compute something else than the whole batch
does: where results differ, the truth is then the same microbatches on one device, run by Meshwright itself. Where it
was read from the program how they combine, the truth is the step on the whole batch. An asynchronous schedule has other
numbers than any one device: there nothing is compared but what was predicted.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..api import program_for
from ..cluster import Cluster, load_cluster
from ..compilers import check_compiler, target_devices
from ..compilers.facts import facts_of, sent_of
from ..errors import PlanError
from ..notes.device_memory import with_given_memory
from ..plan import Plan
from ..plan.io import load_plan
from ..planning.plan_for import plan_for
from ..program.effects import without_effects
from ..program.trace import Program
from ..runtime.executable import Executable, executable
from ..runtime.step import PlannedStep
from ..schedule.schedule import Mode
from ..simulate import plan_schedule
from ..targets import LoadedTarget
from .numbers import LeafError, last_place_of, leaf_error, numbers_of
from .reference import OneDevice, Reference
from .verification import Planned, Verification


def verify(
    target: LoadedTarget,
    *,
    devices: int | None = None,
    cluster: str | Cluster | None = None,
    plan: Plan | str | Path | None = None,
    steps: int = 3,
    timed_steps: int = 5,
    tell: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Verification:
    """Plan a target for the local devices, compile it, run it, and read what it really does.

    For a cluster that is not here the plan's programs are compiled by that machine's own compiler, and not run.

    Args:
      target: what to run, as `targets.load_target` gives it.
      devices: how many of the local devices to use; None for all, or as many as a given plan has.
      cluster: to compile for, by name or itself; None for the local devices.
      plan: run this plan, or the one saved at this path, instead of searching.
      steps: results are compared after so many.
      timed_steps: how many steps are timed after those.
      tell: called with a few words at each part of the work.
      options: as in `planning.plan_for`, without `cluster`; with `plan` only `batch_axis` and `reduction`.

    Raises:
      PlanError: if the local devices are too few, the cluster has no compiler here, no plan is found, or the plan given
        is not one for this target.
    """
    if cluster is not None:
        there = with_given_memory(load_cluster(cluster)) if isinstance(cluster, str) else cluster
        return _ahead(target, there, devices, plan, tell, options)
    tell("planning")
    program, plan, planned = _planned(target, None, devices, plan, options)
    program = without_effects(program)
    step = executable(program, plan, jax.devices())
    tell("compiling")
    begun = time.perf_counter()
    stages = facts_of(step, plan)
    compile_seconds = time.perf_counter() - begun

    if plan_schedule(plan).mode is Mode.ASYNCHRONOUS:
        tell(f"running on {plan.num_devices} devices")
        _, seconds = _run(step, target.make_args(), program.state_inputs, steps, timed_steps)
        return Verification(
            target=target.name, plan=plan, planning=planned, stages=stages, sent=sent_of(step, plan), steps=steps,
            reference="nothing: with an update for every microbatch the numbers are others", starts=((),),
            step_seconds=seconds, compile_seconds=compile_seconds,
        )  # fmt: skip
    tell("running on one device")
    alone = OneDevice(target, program.state_inputs, steps)
    names, last_places = _results(target)

    def judged(got: Sequence[np.ndarray], truth: Reference, args: tuple[Any, ...]) -> tuple[LeafError, ...]:
        errors = _errors(names, last_places, got, truth)
        if all(one.agrees for one in errors):
            return errors
        tell("running on one device with sums in other orders")
        return _errors(names, last_places, got, truth, alone.reordered(args))

    truth = alone.run(target.make_args())
    tell(f"running on {plan.num_devices} devices")
    got, seconds = _run(step, target.make_args(), program.state_inputs, steps, timed_steps)
    errors = judged(got, truth, target.make_args())
    starts, reference = [errors], "one device"
    if _is_off(errors) and plan.microbatches > 1 and program.reduction_given:
        tell("running the microbatches on one device")
        other = _same_microbatches(target, step, options, steps)
        starts = [judged(got, dataclasses.replace(truth, wanted=other), target.make_args())]
        reference = "one device, the same microbatches"
    elif _is_off(errors) and program.state_inputs:
        tell("running from two more starts")
        for _ in range(2):
            args = truth.following
            truth, noisy = alone.run(args), alone.reordered(args)
            got, _ = _run(step, args, program.state_inputs, steps, 0)
            starts.append(_errors(names, last_places, got, truth, noisy))
    return Verification(
        target=target.name, plan=plan, planning=planned, stages=stages, sent=sent_of(step, plan), steps=steps,
        reference=reference, starts=tuple(starts), step_seconds=seconds, compile_seconds=compile_seconds,
    )  # fmt: skip


def _ahead(
    target: LoadedTarget, cluster: Cluster, devices: int | None, plan: Plan | str | Path | None,
    tell: Callable[[str], None], options: dict[str, Any],
) -> Verification:  # fmt: skip
    """Plan a target for a cluster that is not here, and read what its compiler makes of the plan."""
    if devices is not None:
        raise PlanError(
            refused=f"devices={devices}", got=f"the cluster {cluster.name} as well", needed="one or the other",
            where="verify", try_="leaving out devices=, with as many in the cluster's name",
        )  # fmt: skip
    check_compiler(cluster)
    tell("planning")
    program, plan, planned = _planned(target, cluster, devices, plan, options)
    kinds = {one.device_kind for one in plan.stages} - {"", cluster.device_kinds}
    if kinds:
        raise PlanError(
            refused=f"to compile the plan for {cluster.name}", got=f"a plan for {', '.join(sorted(kinds))}",
            needed=f"one for {cluster.device_kinds}: memory and times are theirs", where="plan=",
            try_="the cluster that it was planned for, or planning again",
        )  # fmt: skip
    if (limit := options.get("memory_per_device")) is not None:
        cluster = cluster.with_memory_limit(limit)
    if plan.num_devices > cluster.num_devices:
        raise PlanError(
            refused=f"to compile the plan for {cluster.name}", got=f"a plan for {plan.num_devices} devices",
            needed=f"one for the {cluster.num_devices} of the cluster", where="plan=",
            try_="the cluster that it was planned for, or planning again",
        )  # fmt: skip
    step = executable(without_effects(program), plan, target_devices(cluster, plan))
    tell(f"compiling for {cluster.device_kinds}")
    begun = time.perf_counter()
    stages = facts_of(step, plan, cluster=cluster)
    return Verification(
        target=target.name, plan=plan, planning=planned, stages=stages, sent=sent_of(step, plan), steps=0,
        reference=f"compiled for {cluster.device_kinds}, and not run", starts=(), step_seconds=math.nan,
        compile_seconds=time.perf_counter() - begun,
    )  # fmt: skip


def local_cluster(devices: int | None = None) -> Cluster:
    """The local devices, or the first so many of them.

    Raises:
      PlanError: if there are fewer.
    """
    cluster = load_cluster("local")
    if devices is None or devices == cluster.num_devices:
        return cluster
    if not 1 <= devices < cluster.num_devices or len(cluster.hosts) != 1:
        raise PlanError(
            refused=f"a run on {devices} devices", got=f"{cluster.num_devices} local ones, {len(cluster.hosts)} hosts",
            needed="at least as many as asked for, on one host", where="jax.devices()",
            try_=f"XLA_FLAGS=--xla_force_host_platform_device_count={max(devices, 1)} for virtual CPU devices",
        )  # fmt: skip
    return dataclasses.replace(cluster, hosts=(dataclasses.replace(cluster.hosts[0], devices=devices),))


def _planned(
    target: LoadedTarget,
    cluster: Cluster | None,
    devices: int | None,
    plan: Plan | str | Path | None,
    options: dict[str, Any],
) -> tuple[Program, Plan, Planned]:
    """The program and its plan, found or given."""
    if plan is None:
        found = plan_for(target.step, target.example_args, cluster=cluster or local_cluster(devices), **options)
        took = Planned(
            seconds=found.seconds, trace_seconds=found.trace_seconds, solve_seconds=found.solve_seconds
        )  # fmt: skip
        return found.program, found.plan, took
    given = load_plan(plan) if isinstance(plan, (str, Path)) else plan
    allowed = {name: options[name] for name in ("batch_axis", "reduction") if options.get(name) is not None}
    if taken := sorted(name for name, value in options.items() if value is not None and name not in allowed):
        raise PlanError(
            refused=f"{taken[0]}={options[taken[0]]!r}", got="a plan as well, which says it", needed="one or the other",
            where="verify", try_=f"leaving out the plan, or {', '.join(taken)}",
        )  # fmt: skip
    if devices is not None and devices != given.num_devices:
        raise PlanError(
            refused=f"a run on {devices} devices", got=f"a plan for {given.num_devices}", needed="as many as planned",
            where="verify", try_=f"leaving out the number of devices, or {given.num_devices}",
        )  # fmt: skip
    return program_for(target.step, target.example_args, given, **allowed), given, Planned()


def _results(target: LoadedTarget) -> tuple[list[str], list[float]]:
    """The path of each leaf of the step's results, and the relative spacing of its numbers."""
    shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(target.step, *target.example_args))
    names = [f"result{jax.tree_util.keystr(path)}" for path, _ in shapes]
    return names, [last_place_of(leaf.dtype) for _, leaf in shapes]


def _errors(
    names: Sequence[str], last_places: Sequence[float], got: Sequence[np.ndarray], truth: Reference,
    reordered: Sequence[Sequence[np.ndarray]] = (),
) -> tuple[LeafError, ...]:  # fmt: skip
    return tuple(
        leaf_error(
            name,
            got[n],
            truth.wanted[n],
            truth.start[n] if n < len(truth.start) else None,
            [one[n] for one in reordered],
            last_place=last_place,
        )
        for n, (name, last_place) in enumerate(zip(names, last_places, strict=True))
    )


def _is_off(errors: Sequence[LeafError]) -> bool:
    return any(not one.agrees for one in errors)


def _run(
    step: Executable, args: tuple[Any, ...], num_state: int, steps: int, timed_steps: int
) -> tuple[list[np.ndarray], float]:
    """The step by its plan: its results after so many steps, and the median seconds of those timed. Its state is
    donated: that of `args` is gone afterwards."""
    tree = jax.tree.structure(args[0]) if args else None
    kept: list[np.ndarray] = []
    seconds = []
    for number in range(steps + timed_steps):
        begun = time.perf_counter()
        leaves = jax.tree.leaves(jax.block_until_ready(step(*args)))
        seconds.append(time.perf_counter() - begun)
        if number == steps - 1:
            kept = [numbers_of(leaf) for leaf in leaves]
        if num_state:
            assert tree is not None
            args = (jax.tree.unflatten(tree, leaves[:num_state]), *args[1:])
    return kept, statistics.median(seconds[steps:]) if timed_steps else math.nan


# Microbatches whose losses are combined as the caller says


def _same_microbatches(target: LoadedTarget, step: Executable, options: dict[str, Any], steps: int) -> list[np.ndarray]:
    """The results of the plan's microbatches on one device. A mesh, pins and a limit were for many devices."""
    kept = {name: options[name] for name in ("batch_axis", "reduction") if options.get(name) is not None}
    again = plan_for(
        target.step, target.example_args, cluster=local_cluster(1), microbatches=step.plan.microbatches, **kept
    )
    alone = PlannedStep(without_effects(again.program), again.plan, jax.devices()[:1])
    args = target.make_args()
    if isinstance(step, PlannedStep):  # of several stages microbatches are contiguous
        args = _regrouped(args, step, options.get("batch_axis", 0))
    return _run(alone, args, again.program.state_inputs, steps, 0)[0]


def _regrouped(args: tuple[Any, ...], planned: PlannedStep, batch_axis: int) -> tuple[Any, ...]:
    """The batch in the order in which one device's microbatches hold the examples of the planned step's.

    Each device cuts its own part of the batch, so a microbatch is a piece of every part. Parts that differ between the
    step's inputs would pair one example's input with another's label: then the order is left, and the error shows it.
    """
    program, count = planned.program, planned.plan.microbatches
    cut = {
        i: d for i, d in zip(program.core_inputs, program.split_dims, strict=True) if i is not None and d is not None
    }
    leaves, tree = jax.tree.flatten(args)
    parts, extents = set(), set()
    for index, dim in cut.items():
        sharding = planned.in_shardings[index]
        shape = leaves[index].shape
        extents.add(shape[dim])
        parts.add(shape[dim] // sharding.shard_shape(shape)[dim])
    if len(parts) != 1 or len(extents) != 1:
        return args
    (n,), (extent,) = parts, extents
    order = np.arange(extent).reshape(n, count, -1).swapaxes(0, 1).ravel()
    for index in range(program.state_inputs, len(leaves)):
        shape = leaves[index].shape
        if len(shape) > batch_axis and shape[batch_axis] == extent:
            leaves[index] = jnp.take(leaves[index], order, axis=batch_axis)
    return jax.tree.unflatten(tree, leaves)

"""Prediction beside truth: a plan for the devices at hand, compiled, run, and compared with one device.

Collectives, FLOPs and memory are read from the compiled program (`_jax.hlo`), numbers from runs of the same step on one
device. XLA combines several collectives into one operation with several operands, so arrays are counted, not
operations. Collectives whose operands hold at most 8 bytes each (a loss, a norm) are ignored on both sides.

Known limits: a step cut into microbatches may compute something else than the whole batch does (statistics of a batch,
the capacity of an expert); where the two differ by more than the tolerance, the truth is the same microbatches on one
device. A step with kinks (ReLU, max pooling) can turn a difference in the last digit into a visible one: an activation
that is zero but for rounding is passed on one side and not on the other. That happens by chance, a wrong plan is wrong
from every start: where results differ, two more starts are tried, further along the run, and the median error decides.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jax.hlo import CompiledFacts, read_compiled
from .cluster import Cluster, load_cluster
from .errors import PlanError
from .planning import Planning, plan_for
from .program.effects import without_effects
from .program.trace import Program
from .runtime.step import PlannedStep
from .targets import LoadedTarget

BYTES_TOLERANCE = 0.05
FLOPS_TOLERANCE = 0.02
MEMORY_TOLERANCE = 0.15
ERROR_TOLERANCE = 1e-4

# A collective of operands this small is a scalar's, which carries no traffic worth predicting.
_SCALAR_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind on one device in one step: `count` arrays of `bytes` in all, in `operations`.

    `operations` is what the arrays were combined into; equal to `count` where nothing was.
    """

    count: int
    bytes: float
    operations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the comparison.

    Args:
      name: what is compared.
      unit: "bytes", "flops" or "" (a plain number).
      predicted: by the plan, or the most that is allowed.
      compiled: what the compiled program does, or its run did.
      tolerance: allowed relative deviation; None where `predicted` is an upper limit.
      passed: the verdict.
    """

    name: str
    unit: str
    predicted: float
    compiled: float
    tolerance: float | None
    passed: bool

    @property
    def ratio(self) -> float:
        """Predicted over compiled; 1 where both are 0, NaN where only the compiled is, and for an upper limit."""
        if self.tolerance is None or (self.predicted and not self.compiled):
            return math.nan
        return self.predicted / self.compiled if self.compiled else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a plan predicted and what became of it; all sizes per device and step.

    Args:
      target: name of the step.
      planning: the plan and how it was found.
      predicted: collectives by kind, as the plan counts them.
      compiled: collectives by kind in the compiled program.
      facts: all that was read from the compiled program.
      steps: after how many steps results were compared.
      compared: "parameters" (differentiated leaves of the state), "state" (all its numbers) or "outputs".
      reference: what they were compared with.
      errors: from every start tried, the largest over leaves of max|a - b| / max|b|; NaN if either has one.
      step_seconds: median of the timed steps.
      compile_seconds: compiling the step.
    """

    target: str
    planning: Planning
    predicted: Mapping[str, Traffic]
    compiled: Mapping[str, Traffic]
    facts: CompiledFacts
    steps: int
    compared: str
    reference: str
    errors: tuple[float, ...]
    step_seconds: float
    compile_seconds: float

    @property
    def max_relative_error(self) -> float:
        """The median of `errors`; a NaN is larger than any number."""
        return sorted(self.errors, key=lambda error: (math.isnan(error), error))[len(self.errors) // 2]

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every comparison with its verdict."""
        (stage,) = self.planning.plan.stages
        prediction = self.planning.plan.predicted
        assert prediction is not None  # plan_for prices what it finds
        none = Traffic(count=0, bytes=0.0, operations=0)
        found = [
            _near(
                f"{kind} bytes", "bytes", self.predicted.get(kind, none).bytes, self.compiled.get(kind, none).bytes,
                BYTES_TOLERANCE,
            )
            for kind in sorted({*self.predicted, *self.compiled})
        ]  # fmt: skip
        peak, limit = float(self.facts.peak_bytes), stage.memory_limit_bytes
        return (
            *found,
            _near("FLOPs", "flops", prediction.flops_per_device, self.facts.flops, FLOPS_TOLERANCE),
            _near("peak memory", "bytes", stage.memory.total, peak, MEMORY_TOLERANCE),
            _below("peak memory within the limit", "bytes", limit, peak),
            _below(f"error after {self.steps} steps ({self.compared})", "", ERROR_TOLERANCE, self.max_relative_error),
        )

    @property
    def passed(self) -> bool:
        """Whether every check is."""
        return all(check.passed for check in self.checks)


def verify(
    target: LoadedTarget,
    *,
    devices: int | None = None,
    steps: int = 3,
    timed_steps: int = 5,
    tell: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Verification:
    """Plan a target for the local devices, compile it, run it, and read what it really does.

    Args:
      target: what to run, as `targets.load_target` gives it.
      devices: how many of the local devices to use; None for all.
      steps: results are compared after so many.
      timed_steps: how many steps are timed after those.
      tell: called with a few words at each part of the work.
      options: as in `planning.plan_for`, without `cluster`.

    Raises:
      PlanError: if the local devices are too few, or no plan is found.
    """
    cluster = local_cluster(devices)
    tell("planning")
    planning = plan_for(target.step, target.example_args, cluster=cluster, **options)
    program, plan = without_effects(planning.program), planning.plan
    planned = PlannedStep(program, plan, jax.devices()[: plan.num_devices])
    tell("compiling")
    begun = time.perf_counter()
    compiled = planned.lower().compile()
    compile_seconds = time.perf_counter() - begun
    facts = read_compiled(compiled)

    tell("running on one device")
    compared, which = _compared(program)
    args = target.make_args()
    wanted, following = _run_plain(target, args, program, steps, which)
    tell(f"running on {plan.num_devices} devices")
    run = _run_planned(args, planned, compiled, steps, timed_steps, which)
    errors, reference = [max_relative_error(run.leaves, wanted)], "one device"
    if not errors[0] <= ERROR_TOLERANCE and plan.microbatches > 1:
        tell("running the microbatches on one device")
        # A mesh, pins and a limit were for many devices.
        kept: dict[str, Any] = {name: options[name] for name in ("batch_axis", "reduction") if name in options}
        again = plan_for(
            target.step, target.example_args, cluster=local_cluster(1), microbatches=plan.microbatches, **kept
        )
        alone = PlannedStep(without_effects(again.program), again.plan, jax.devices()[:1])
        args = _regrouped(target.make_args(), planned, options.get("batch_axis", 0))
        wanted = _run_planned(args, alone, alone.lower().compile(), steps, 0, which).leaves
        errors, reference = [max_relative_error(run.leaves, wanted)], "one device, the same microbatches"
    elif not errors[0] <= ERROR_TOLERANCE and program.state_inputs:
        tell("running from two more starts")
        for _ in range(2):
            args = following
            wanted, following = _run_plain(target, args, program, steps, which)
            errors.append(max_relative_error(_run_planned(args, planned, compiled, steps, 0, which).leaves, wanted))
    return Verification(
        target=target.name, planning=planning, predicted=_predicted(planning), compiled=compiled_traffic(facts),
        facts=facts, steps=steps, compared=compared, reference=reference, errors=tuple(errors),
        step_seconds=run.step_seconds, compile_seconds=compile_seconds,
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


def compiled_traffic(facts: CompiledFacts) -> dict[str, Traffic]:
    """Collectives of a compiled program by kind, those of scalars left out."""
    total: dict[str, Traffic] = {}
    for one in facts.collectives:
        # The CPU backend gives an all-to-all one operand for each device of its group.
        in_pieces = one.kind == "all_to_all" and one.operands % one.group_size == 0
        arrays = one.operands // one.group_size if in_pieces else one.operands
        if one.bytes <= _SCALAR_BYTES * arrays:
            continue
        have = total.get(one.kind, Traffic(count=0, bytes=0.0, operations=0))
        total[one.kind] = Traffic(
            count=have.count + one.count * arrays,
            bytes=have.bytes + float(one.count * one.bytes),
            operations=have.operations + one.count,
        )
    return total


def max_relative_error(got: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest over arrays of max|a - b| / max|b|; NaN if one holds a NaN, 0 for no arrays.

    >>> max_relative_error([np.array([1.0, 4.5])], [np.array([1.0, 5.0])])
    0.1
    """
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        difference = float(np.max(np.abs(a - b), initial=0.0))
        scale = float(np.max(np.abs(b), initial=0.0))
        error = difference / scale if scale else (math.inf if difference else 0.0)
        if math.isnan(difference) or math.isnan(scale):
            return math.nan
        worst = max(worst, error)
    return worst


def _near(name: str, unit: str, predicted: float, compiled: float, tolerance: float) -> Check:
    passed = abs(predicted - compiled) <= tolerance * compiled
    return Check(name=name, unit=unit, predicted=predicted, compiled=compiled, tolerance=tolerance, passed=passed)


def _below(name: str, unit: str, limit: float, compiled: float) -> Check:
    return Check(name=name, unit=unit, predicted=limit, compiled=compiled, tolerance=None, passed=compiled <= limit)


def _predicted(planning: Planning) -> dict[str, Traffic]:
    return {
        kind: Traffic(count=one.count, bytes=one.bytes, operations=one.count)
        for kind, one in planning.plan.collectives().items()
    }


# Running


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    leaves: list[np.ndarray]
    step_seconds: float


def _compared(program: Program) -> tuple[str, list[int]]:
    """What is compared: positions among the leaves of the step's result."""
    parameters = [i for i in program.parameter_inputs if i is not None and i < program.state_inputs]
    if parameters:
        return "parameters", parameters
    # The leaves of a state come back first, so a position among the inputs is the one among the results.
    kept = [
        i
        for i, out in enumerate(program.outer.out_avals)
        if (i < program.state_inputs or not program.state_inputs) and not jnp.issubdtype(out.dtype, jax.dtypes.prng_key)
    ]
    return ("state" if program.state_inputs else "outputs"), kept


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


def _run_plain(
    target: LoadedTarget, args: tuple[Any, ...], program: Program, steps: int, which: Sequence[int]
) -> tuple[list[np.ndarray], tuple[Any, ...]]:
    """The step as the user wrote it, on one device: what is compared, and the arguments of the step after."""
    leaves, tree = jax.tree.flatten(args)
    step = jax.jit(lambda *flat: jax.tree.leaves(target.step(*jax.tree.unflatten(tree, flat))))
    state, rest = leaves[: program.state_inputs], leaves[program.state_inputs :]
    out: list[Any] = []
    for _ in range(steps):
        out = step(*state, *rest)
        state = out[: program.state_inputs]
    return [_numbers(out[i]) for i in which], jax.tree.unflatten(tree, [*state, *rest])


def _run_planned(
    args: tuple[Any, ...], planned: PlannedStep, compiled: Any, steps: int, timed_steps: int, which: Sequence[int]
) -> _Run:
    """The planned step. Its state is donated: that of `args` is gone afterwards."""
    num_state = planned.program.state_inputs
    flat = planned.place(jax.tree.leaves(args))
    kept: list[np.ndarray] = []
    seconds = []
    for number in range(steps + timed_steps):
        begun = time.perf_counter()
        out = jax.block_until_ready(compiled(*flat))
        seconds.append(time.perf_counter() - begun)
        if number == steps - 1:
            kept = [_numbers(out[i]) for i in which]
        flat = planned.place([*out[:num_state], *flat[num_state:]])
    return _Run(leaves=kept, step_seconds=statistics.median(seconds[steps:]) if timed_steps else math.nan)


def _numbers(leaf: Any) -> np.ndarray:
    """As float64 (complex128), in which differences of any narrower type are exact."""
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)

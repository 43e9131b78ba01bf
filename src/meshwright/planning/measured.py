"""`refine="measure"`: the best few plans compiled and timed on the real devices, and the fastest of them kept.

Predicted and measured seconds are never mixed: the plan keeps its prediction, and its notes say what was measured. In a
run of many processes process 0 plans, all time the same plans step by step, and process 0's clock decides.

Cost: planning the alternatives (the time limit once more at most), compiling each, and about `SECONDS` of steps. Plans
are timed one after the other, in turns, with only one state on the devices at a time.

Known limits: the state is made of zeros, so steps whose work depends on values are timed for those. A plan that does
not run in one process (out of memory) is left out with a note; in many processes it ends the run, because the others
would wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .._jax.devices import named_devices
from ..calibrate.sample import Sample, sample_of
from ..cluster import Cluster
from ..errors import PlanError
from ..plan.io import plan_from_dict, plan_to_dict
from ..program.trace import abstract
from ..program.traces import Traces
from ..report.table import format_seconds
from ..runtime.agree import agree
from ..runtime.executable import Executable, executable
from ..search.considered import Considered
from .candidates import Candidate, candidates
from .request import Planning, PlanOptions

# For the timed steps of all plans together.
SECONDS = 20.0

_TURNS = 3
_STEPS = (1, 20)  # of a plan in a turn, at least and at most
# How long other processes wait for process 0 beyond its searches: it traces, and compiles what it times.
_TRACE_SECONDS = 600.0

# Seconds of each of some steps of a plan.
Timer = Callable[[Executable, Sequence[Any], int], list[float]]


def local_devices(cluster: Cluster, named: Any = None) -> Sequence[jax.Device]:
    """The devices that stand for a cluster here.

    Args:
      cluster: to be stood for.
      named: which they are (`devices=`); None for the first.

    Raises:
      PlanError: if there are too few of them, or they are of another platform.
    """
    devices = jax.devices() if named is None else named_devices(named)
    if len(devices) < cluster.num_devices or devices[0].platform != cluster.device.platform:
        raise PlanError(
            refused="to measure plans", got=f"{len(devices)} {devices[0].platform} devices",
            needed=f"the devices themselves: {cluster.num_devices} x {cluster.device.kind}, as {cluster.name} has",
            where='refine="measure"', try_='cluster="local", or leaving refine= out',
        )  # fmt: skip
    return devices[: cluster.num_devices]


def measured_best(
    plan: Callable[[PlanOptions], Planning],
    options: PlanOptions,
    *,
    traces: Traces,
    args: Sequence[Any],
    cluster: Cluster,
    tell: Callable[[str], None],
    devices: Any = None,
    timer: Timer | None = None,
) -> Planning:
    """The fastest of the best few plans, as measured here. To be called by every process of a run.

    Args:
      plan: finds a plan of the step.
      options: what was asked for.
      traces: the step.
      args: its arguments.
      cluster: the local devices, as they are described.
      tell: called with a few words at each part of the work.
      devices: as of `planning.plan_for`.
      timer: times steps; by running them if not given.

    Raises:
      PlanError: if nothing fits, the cluster is not here, or none of the plans runs.
    """
    devices = local_devices(cluster, devices)
    chosen = _agreed(plan, options, traces, args, cluster, tell)
    timer = timer or step_seconds
    runs: dict[int, Executable] = {}
    failed: dict[int, str] = {}
    seconds: dict[int, list[float]] = {}
    for position, one in enumerate(chosen):
        tell(f"compiling plan {position + 1} of {len(chosen)}")
        with _Skipping(failed, position):
            runs[position] = executable(one.planning.program, one.planning.plan, devices, effects=False)
            seconds[position] = timer(runs[position], args, 1)
    if not seconds:
        raise PlanError(
            refused="to measure plans", got="; ".join(f"{chosen[p].name}: {why}" for p, why in failed.items()),
            needed="one that runs", where='refine="measure"', try_="memory_per_device= with less than devices have",
        )  # fmt: skip
    once = sum(sum(taken) for taken in seconds.values())
    steps = json.loads(agree(
        lambda: json.dumps(max(_STEPS[0], min(_STEPS[1], int(SECONDS / _TURNS / max(once, 1e-9))))),
        about="how long to measure", timeout_seconds=_TRACE_SECONDS,
    ))  # fmt: skip
    seconds = {position: [] for position in seconds}
    for turn in range(_TURNS):
        # Nobody is always the first.
        for position in list(seconds) if turn % 2 == 0 else list(seconds)[::-1]:
            tell(f"timing plan {position + 1} of {len(chosen)}")
            with _Skipping(failed, position):
                seconds[position] += timer(runs[position], args, steps)
    best, lines = json.loads(agree(
        lambda: json.dumps(_decided(chosen, seconds, failed)), about="the fastest plan",
        timeout_seconds=_TRACE_SECONDS,
    ))  # fmt: skip
    found = chosen[best].planning
    note = f"chosen by measured steps on {len(devices)} x {devices[0].device_kind}: {'; '.join(lines)}"
    plan_with_note = replace(found.plan, notes=(*found.plan.notes, note))
    considered = (*found.considered, *(Considered("measured", line) for line in lines))
    return replace(found, plan=plan_with_note, considered=considered)


def step_seconds(step: Executable, args: Sequence[Any], steps: int) -> list[float]:
    """Seconds of so many steps, after one that is not counted.

    Args:
      step: on its devices.
      args: its arguments, arrays or shapes; the state is not touched, one of zeros is made in its place.
      steps: how many.
    """
    args = tuple(args)
    with_state = bool(step.program.state_inputs)
    shape = abstract((args[0],))[0] if with_state else None
    rest = [_zeros(abstract((one,))[0]) if _has_shapes(one) else one for one in args[with_state:]]
    state = [step.create(lambda: _zeros(shape))] if with_state else []
    seconds = []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        out = step(*state, *rest)
        jax.block_until_ready(out)
        seconds.append(time.perf_counter() - begun)
        if with_state:
            # The state comes back by itself, or first.
            alone = jax.tree.structure(out) == jax.tree.structure(state[0])
            state = [out if alone else out[0]]
    return seconds[1:]


def _agreed(
    plan: Callable[[PlanOptions], Planning], options: PlanOptions, traces: Traces, args: Sequence[Any],
    cluster: Cluster, tell: Callable[[str], None],
) -> list[Candidate]:  # fmt: skip
    """The plans to time, the same in every process."""
    mine: list[Candidate] = []

    def search() -> str:
        mine.extend(candidates(plan, options, cluster, tell=tell))
        return json.dumps([[one.name, plan_to_dict(one.planning.plan)] for one in mine])

    limit = 2 * options.time_limit_seconds + _TRACE_SECONDS
    text = agree(search, about="the plans to measure", timeout_seconds=limit)
    if mine:
        return mine
    found = []
    for name, document in json.loads(text):
        theirs = plan_from_dict(document, source="the plan of process 0")
        axis = options.batch_axis
        program = (
            traces.inference(args, microbatches=theirs.microbatches, batch_axis=axis)
            if theirs.schedule == "inference"
            else traces.program(args, microbatches=theirs.microbatches, batch_axis=axis, reduction=options.reduction)
        )
        planning = Planning(program=program, plan=theirs, cluster=cluster, considered=())
        found.append(Candidate(name=name, planning=planning))
    return found


class _Skipping:
    """What fails on the devices is left out and said, where this process is alone."""

    def __init__(self, failed: dict[int, str], position: int) -> None:
        self._failed, self._position = failed, position

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, (jax.errors.JaxRuntimeError, PlanError)) or jax.process_count() > 1:
            return False
        self._failed[self._position] = f"does not run here: {str(error).splitlines()[0]:.120}"
        return True


def _decided(
    chosen: Sequence[Candidate], seconds: Mapping[int, Sequence[float]], failed: Mapping[int, str]
) -> tuple[int, list[str]]:
    """The position of the fastest, and a line for each plan, the fastest first."""
    samples = {p: sample_of(taken) for p, taken in seconds.items() if p not in failed}
    order = sorted(samples, key=lambda p: (samples[p].seconds, p))
    lines = [_line(chosen[position], samples[position]) for position in order]
    return order[0], lines + [f"{chosen[position].name}: {why}" for position, why in sorted(failed.items())]


def _line(one: Candidate, sample: Sample) -> str:
    return (
        f"{one.name}: measured {format_seconds(sample.seconds)} ({format_seconds(sample.low)} to "
        f"{format_seconds(sample.high)}, {sample.runs} steps), predicted {format_seconds(one.planning.step_seconds)}"
    )


def _has_shapes(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _zeros(tree: Any) -> Any:
    def one(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            key = jax.random.key(0)
            return jax.random.split(key, leaf.shape) if leaf.shape else key
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(one, tree)

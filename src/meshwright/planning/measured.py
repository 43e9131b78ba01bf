"""`refine="measure"`: the best few plans compiled and timed on the real devices, and the fastest of them kept.

A cost model errs where it compares unlike things, so the alternatives differ in kind from what is predicted to be the
fastest: each other logical mesh of up to two axes, twice the microbatches, data parallelism, ZeRO-3, tensor
parallelism. Whatever the user asked for stays as it is. Of plans that compute and move the same one is kept, and of the
rest the fastest by prediction.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from .._jax.devices import named_devices
from ..calibrate.sample import sample_of
from ..cluster import Cluster
from ..errors import PlanError
from ..plan import Plan
from ..plan.io import plan_from_dict, plan_to_dict
from ..report.table import format_seconds
from ..runtime.agree import agree
from ..runtime.executable import Executable, executable
from ..runtime.step_seconds import step_seconds
from ..search.considered import Considered
from .request import Planning, PlanOptions, PlanRequest

# So many plans are timed at most.
MOST = 4

# For the timed steps of all plans together.
SECONDS = 20.0

# What every search for an alternative is given at least.
_LEAST_SECONDS = 1.0

_TURNS = 3
_STEPS = (1, 20)  # of a plan in a turn, at least and at most
# How long other processes wait for process 0 beyond its searches: it traces, and compiles what it times.
_TRACE_SECONDS = 600.0


class Candidate(NamedTuple):
    """A plan to be timed or compiled, by what it differs in from the plan that was asked for."""

    name: str
    planning: Planning


def local_devices(cluster: Cluster, named: Any = None) -> Sequence[jax.Device]:
    """The devices that stand for a cluster here.

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
    plan: Callable[[PlanOptions], Planning], options: PlanOptions, asked: PlanRequest, *, devices: Any = None
) -> Planning:
    """The fastest of the best few plans, as measured here. To be called by every process of a run.

    Args:
      plan: finds a plan of the step.
      options: what was asked for.
      asked: the same, looked up; its cluster describes the local devices.
      devices: as of `planning.plan_for`.

    Raises:
      PlanError: if nothing fits, the cluster is not here, or none of the plans runs.
    """
    devices = local_devices(asked.cluster, devices)
    chosen = _agreed(plan, options, asked)
    runs: dict[int, Executable] = {}
    failed: dict[int, str] = {}
    seconds: dict[int, list[float]] = {}
    for position, one in enumerate(chosen):
        asked.tell(f"compiling plan {position + 1} of {len(chosen)}")
        with _skipping(failed, position):
            runs[position] = executable(one.planning.program, one.planning.plan, devices, effects=False)
            seconds[position] = step_seconds(runs[position], asked.args, 1)
    if not seconds:
        raise PlanError(
            refused="to measure plans", got="; ".join(f"{chosen[p].name}: {why}" for p, why in failed.items()),
            needed="one that runs", where='refine="measure"', try_="memory_per_device= with less than devices have",
        )  # fmt: skip
    once = max(sum(sum(taken) for taken in seconds.values()), 1e-9)
    steps = _told(lambda: max(_STEPS[0], min(_STEPS[1], int(SECONDS / _TURNS / once))), "how long to measure")
    seconds = {position: [] for position in seconds}
    for turn in range(_TURNS):
        # Nobody is always the first.
        for position in list(seconds) if turn % 2 == 0 else list(seconds)[::-1]:
            asked.tell(f"timing plan {position + 1} of {len(chosen)}")
            with _skipping(failed, position):
                seconds[position] += step_seconds(runs[position], asked.args, steps)
    best, lines = _told(lambda: _decided(chosen, seconds, failed), "the fastest plan")
    found = chosen[best].planning.noted(
        f"chosen by measured steps on {len(devices)} x {devices[0].device_kind}: {'; '.join(lines)}"
    )
    return replace(found, considered=(*found.considered, *(Considered("measured", line) for line in lines)))


def _told(decide: Callable[[], Any], about: str) -> Any:
    """What process 0 decides."""
    return json.loads(agree(lambda: json.dumps(decide()), about=about, timeout_seconds=_TRACE_SECONDS))


def _agreed(plan: Callable[[PlanOptions], Planning], options: PlanOptions, asked: PlanRequest) -> list[Candidate]:
    """The plans to time, the same in every process."""
    mine: list[Candidate] = []

    def search() -> str:
        mine.extend(candidates(plan, options, asked))
        return json.dumps([[one.name, plan_to_dict(one.planning.plan)] for one in mine])

    limit = 2 * options.time_limit_seconds + _TRACE_SECONDS
    text = agree(search, about="the plans to measure", timeout_seconds=limit)
    if mine:
        return mine
    found, axis = [], options.batch_axis
    for name, document in json.loads(text):
        theirs = plan_from_dict(document, source="the plan of process 0")
        program = (
            asked.traces.inference(asked.args, microbatches=theirs.microbatches, batch_axis=axis)
            if theirs.schedule == "inference" else replace(asked, padded=theirs.padded).program(theirs.microbatches)
        )  # fmt: skip
        planning = Planning(program=program, plan=theirs, cluster=asked.cluster, considered=())
        found.append(Candidate(name, planning))
    return found


def candidates(plan: Callable[[PlanOptions], Planning], options: PlanOptions, asked: PlanRequest) -> list[Candidate]:
    """The plan that is asked for, then the best of the alternatives, the fastest by prediction first.

    Raises:
      PlanError: if there is no plan for what was asked. An alternative that does not exist is none.
    """
    limit = options.time_limit_seconds
    kept = [Candidate("as planned", plan(options))]
    ways = alternatives(options, asked.cluster, kept[0].planning.plan)
    share = max(limit / max(len(ways), 1), min(limit, _LEAST_SECONDS))
    found = []
    for way in ways:
        name = ", ".join(f"{key}={value}" for key, value in way.items())
        asked.tell(f"an alternative, {name}")
        # A preset decides the number of stages.
        free = replace(options, stages=None) if "preset" in way else options
        try:
            found.append(Candidate(name, plan(replace(free, **way, time_limit_seconds=share))))
        except PlanError:
            continue
    seen = {_essence(kept[0].planning.plan)}
    for one in sorted(found, key=lambda one: one.planning.step_seconds):
        if len(kept) < MOST and _essence(one.planning.plan) not in seen:
            seen.add(_essence(one.planning.plan))
            kept.append(one)
    return kept


def alternatives(options: PlanOptions, cluster: Cluster, planned: Plan) -> list[dict[str, Any]]:
    """Options that differ from what was asked for, and planned, only in what was left open.

    >>> from types import SimpleNamespace
    >>> from meshwright.cluster import load_cluster
    >>> planned = SimpleNamespace(microbatches=2, stages=(SimpleNamespace(mesh=(("x", 4),)),))
    >>> alternatives(PlanOptions(mesh=(4,)), load_cluster("rtx4090-4"), planned)
    [{'microbatches': 4}]
    """
    ways: list[dict[str, Any]] = []
    free = options.mesh is None and options.preset is None and options.submeshes is None
    if free and options.stages in (1, None):
        mine = tuple(size for _, size in planned.stages[0].mesh) if len(planned.stages) == 1 else ()
        ways += [{"mesh": shape} for shape in cluster.logical_shapes(max_axes=2) if shape != mine]
        if options.zero is None and options.pins is None and options.schedule is None:
            most = min(host.devices for host in cluster.hosts)
            tensor = [f"megatron(tp={2**power})" for power in range(1, most.bit_length())]
            ways += [{"preset": name} for name in ("data_parallel()", "zero(stage=3)", *tensor)]
    if options.microbatches is None:
        ways.append({"microbatches": 2 * planned.microbatches})
    return ways


def _essence(plan: Plan) -> tuple[Any, ...]:
    """What a plan does: two that move and compute the same are one, whatever they call their axes."""
    parts = tuple((len(s.devices), s.communication, f"{s.compute_seconds:.6g}") for s in plan.stages)
    return (plan.microbatches, plan.schedule, parts)


@contextmanager
def _skipping(failed: dict[int, str], position: int) -> Iterator[None]:
    """What fails on the devices is left out and said, where this process is alone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, PlanError) as error:
        if jax.process_count() > 1:
            raise
        failed[position] = f"does not run here: {str(error).splitlines()[0]:.120}"


def _decided(
    chosen: Sequence[Candidate], seconds: Mapping[int, Sequence[float]], failed: Mapping[int, str]
) -> tuple[int, list[str]]:
    """The position of the fastest, and a line for each plan, the fastest first."""
    samples = {p: sample_of(taken) for p, taken in seconds.items() if p not in failed}
    order = sorted(samples, key=lambda p: (samples[p].seconds, p))
    lines = []
    for position in order:
        one, sample = chosen[position], samples[position]
        lines.append(
            f"{one.name}: measured {format_seconds(sample.seconds)} ({format_seconds(sample.low)} to "
            f"{format_seconds(sample.high)}, {sample.runs} steps), predicted "
            f"{format_seconds(one.planning.step_seconds)}"
        )
    return order[0], lines + [f"{chosen[position].name}: {why}" for position, why in sorted(failed.items())]

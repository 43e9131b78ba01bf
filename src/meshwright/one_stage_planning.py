"""Plans of one stage, checked against the traced program.

The search counts memory by layouts. The peak of the step that a plan runs is known only once the step is written out.
So the plan that is found is traced (nothing is compiled), and its predicted peak compared with what a device has. Where
it is too much, the search is repeated with less memory: it leaves room for what it has missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf

from .errors import MemoryExceeded, size_words
from .microbatch_counts import microbatch_counts
from .plan import Memory, Plan
from .plan_request import Planning, PlanRequest
from .program.batch import batch_inputs
from .runtime.local_step import LocalStep
from .search.memory_reserve import MissedMemory
from .search.one_stage import GAP, OneStageSearch
from .search.one_stage_plan import SearchRequest
from .search.parameters import parameter_infos
from .search.ways import Variant

# How often a plan whose traced peak is too high is searched again in less memory.
_ATTEMPTS = 12

# The predicted peak is a few percent off at times: this much of a device stays free.
MARGIN = 1.04


def plan_one_stage(asked: PlanRequest, *, faster_than_seconds: float = inf, gap: float = GAP) -> Planning:
    """The fastest plan of one stage, in as many microbatches as are best.

    Args:
      asked: the request.
      faster_than_seconds: a plan whose step takes longer is not wanted.
      gap: relative, to which layouts are solved.

    Raises:
      PlanError: if the request makes no sense, or nothing fits.
      NothingFaster: if no plan is that fast.
    """
    requests = _Requests(asked)
    search = OneStageSearch(requests, time_limit_seconds=max(asked.left_seconds, 0.0), tell=asked.tell, gap=gap)
    usable, platform = asked.cluster.device.usable_memory_bytes, asked.cluster.device.platform
    missed = MissedMemory(MARGIN)
    leanest: tuple[float, Plan] | None = None
    for _ in range(_ATTEMPTS):
        try:
            result = search.run(
                lambda count: missed(count).limit(usable, last=True), faster_than_seconds=faster_than_seconds
            )
        except MemoryExceeded as error:
            if leanest is not None:
                raise _over(asked, *leanest) from error
            raise
        asked.tell("predicting memory")
        plan = result.plan
        program = asked.program(plan.microbatches)
        peak = float(LocalStep(program, plan).predicted_memory(platform).peak_bytes)
        if MARGIN * peak <= usable:
            return Planning(
                program=program, plan=_with_memory(plan, peak), cluster=asked.cluster,
                considered=result.considered, alternatives=result.alternatives,
            )  # fmt: skip
        leanest = min(leanest or (inf, plan), (peak, plan), key=lambda one: one[0])
        missed.learn(plan.microbatches, [plan.stages[0].memory.total], [peak], [usable], [False])
    assert leanest is not None  # there is an attempt
    raise _over(asked, *leanest)


def fits_at_once(asked: PlanRequest) -> bool:
    """Whether a device may hold its share of the whole batch with nothing computed again. One stage is soon planned
    then: more microbatches are of no use, and memory hardly binds."""
    requests = _Requests(asked)
    first = next(iter(requests))
    usable = asked.cluster.device.usable_memory_bytes / MARGIN
    return Variant(requests[first], "none").least_bytes(first) <= usable


class _Requests(Mapping[int, SearchRequest]):
    """The step in each number of microbatches that may be considered, traced when it is asked for.

    Raises:
      PlanError: on asking, if the step cannot be cut so.
    """

    def __init__(self, asked: PlanRequest) -> None:
        self._asked = asked
        first = asked.program(asked.microbatches if asked.microbatches is not None else 1)
        counts = microbatch_counts(asked)
        self._counts = counts if first.marked else counts[:1]

    def __iter__(self) -> Iterator[int]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, count: int) -> SearchRequest:
        asked = self._asked
        asked.tell("tracing" if count == 1 else f"tracing {count} microbatches")
        program, pins = asked.program(count), asked.pins
        if asked.preset is not None:
            batch = batch_inputs(program, asked.traces, asked.args, batch_axis=asked.batch_axis)
            roles = asked.preset.roles_in(program, batch, where=asked.traces.name)
            pins = replace(pins, roles=roles, gradient_exchange=asked.preset.gradient_exchange)
        pins.check(program.input_names, [program.graph.values[v].name for v in program.graph.inputs])
        return SearchRequest(
            graph=program.graph, fingerprint=program.fingerprint, parameters=parameter_infos(program),
            cluster=asked.cluster, microbatches=count, mesh=asked.mesh, pins=pins, remat=asked.remat,
            carried=0 if program.marked else program.state_inputs, split_dims=program.split_dims,
        )  # fmt: skip


def _over(asked: PlanRequest, peak: float, leanest: Plan) -> MemoryExceeded:
    device = asked.cluster.device
    return MemoryExceeded(
        refused=f"a plan for {asked.cluster.num_devices} x {device.kind}",
        got=f"{size_words(device.usable_memory_bytes)} usable on a device",
        needed=f"about {size_words(MARGIN * peak)} on a device, the predicted peak of the leanest plan found with "
        f"{leanest.microbatches} microbatches",
        where="stage 1 of 1",
        try_="more devices, a smaller batch" + (', or remat="layer"' if asked.remat == "none" else ""),
    )  # fmt: skip


def _with_memory(plan: Plan, peak: float) -> Plan:
    """The plan with its activations and workspace as traced."""
    (stage,) = plan.stages
    known = stage.memory.parameters + stage.memory.gradients + stage.memory.optimizer
    held = max(peak - known, 0.0)
    activations = min(stage.memory.activations, held)
    memory = Memory(
        parameters=stage.memory.parameters,
        gradients=min(stage.memory.gradients, max(peak - stage.memory.parameters - stage.memory.optimizer, 0.0)),
        optimizer=stage.memory.optimizer,
        activations=activations,
        workspace=held - activations,
    )
    return replace(plan, stages=(replace(stage, memory=memory),))

"""A plan of several stages applied to a program: what each stage runs, without devices."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property

from jax.sharding import Mesh

from ...errors import PlanError
from ...memory.transfers import kept_bytes, workspace_bytes
from ...plan import Memory, Plan
from ...program.staged import StagedProgram, staged_program
from ...program.trace import Program
from ...schedule import Edge, Mode, Schedule
from ...simulate import EdgeTiming, StageTiming, Timeline, Timing, plan_schedule, plan_timing, simulate
from ..microbatches import grown_dims
from ..plan_of_program import check_program
from .alike import likeness
from .asynchronous import check_asynchronous
from .stage_memory import StageMemory, passed_on, stage_memory
from .stage_program import StageProgram
from .surroundings import Surroundings
from .update_program import UpdateProgram


class LocalStages:
    """The stages of a step, as programs of one device each.

    Args:
      program: the traced step; one in stages whose scans are split as the plan's saves building that again.
      plan: for this program.
      meshes: of the stages; None for meshes without devices.
      platform: of the devices, as `Device.compiler`.
      counted: what stages hold that were counted before, of this or other plans for the program; it learns new ones.

    Attributes:
      schedule: the plan's.
      stages: what they compute of the core.
      around: what surrounds it, shared out.

    Raises:
      PlanError: if the plan is for another program, or asks for what the runtime cannot do.
    """

    def __init__(
        self,
        program: Program | StagedProgram,
        plan: Plan,
        meshes: Sequence[Mesh] | None = None,
        platform: str = "cpu",
        *,
        counted: MutableMapping[Hashable, StageMemory] | None = None,
    ) -> None:
        staged = _staged(program, plan)
        self.program = program = staged.source
        self.plan = plan
        self.platform = platform
        self._meshes = meshes
        self._counted = {} if counted is None else counted
        self._core = staged.core
        self.schedule: Schedule = plan_schedule(plan)
        numbered = enumerate(meshes if meshes is not None else [None] * len(plan.stages))
        asynchronous = self.schedule.mode is Mode.ASYNCHRONOUS
        self.stages = [StageProgram(staged, plan, n, mesh, asynchronous=asynchronous) for n, mesh in numbered]
        self.around = Surroundings(staged, [stage.cut for stage in self.stages])
        if asynchronous:
            check_asynchronous(self.around, program.state_inputs, grown_dims(program))
        self._update_of = cache(lambda number: UpdateProgram(staged, self.stages[number], self.around))

    @property
    def updates(self) -> list[UpdateProgram]:
        """What the stages compute around the core."""
        return [self._update_of(number) for number in range(len(self.stages))]

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """For each stage what it holds on one device, from its traced programs: nothing is compiled."""
        keys = self._likeness()
        for key, stage, number in zip(keys, self.stages, range(len(keys)), strict=True):
            if key not in self._counted:
                self._counted[key] = stage_memory(
                    stage, self._update_of(number), splits_backward=self.schedule.splits_backward,
                    platform=self.platform,
                )  # fmt: skip
        return tuple(passed_on(self._counted[key], stage) for key, stage in zip(keys, self.stages, strict=True))

    def _likeness(self) -> list[Hashable]:
        """Of each stage what is equal for those that are the same program, of which one is traced."""
        found: list[Hashable] = []
        for number, s in enumerate(self.stages):
            alike = likeness(self._core, s, self._update_of(number), self.around)
            found.append((alike, s.microbatches, len(s.own), self.schedule.splits_backward, self.platform))
        return found

    def elsewhere(self) -> LocalStages:
        """The same where nobody says which process has which device, as where plans are made."""
        other = copy(self)
        other._meshes = None
        return other

    def timing(self, memory: Sequence[StageMemory] | None = None) -> Timing:
        """The plan's seconds, with the bytes of the traced programs.

        Args:
          memory: what stages hold, where that is known otherwise.

        Raises:
          PlanError: nobody has priced the plan.
        """
        planned, memory = plan_timing(self.plan), memory or self.memory
        stages = tuple(_traced(stage, found) for stage, found in zip(planned.stages, memory, strict=True))
        edges = tuple(self._edge(one, memory) for one in planned.edges)
        stages = tuple(
            replace(stage, constant_bytes=stage.constant_bytes + kept)
            for stage, kept in zip(stages, self._kept_by_transfers(edges), strict=True)
        )
        return replace(planned, stages=stages, edges=edges)

    def _edge(self, planned: EdgeTiming, memory: Sequence[StageMemory]) -> EdgeTiming:
        source, target = planned.edge.source, planned.edge.target
        sent = memory[source].sent_bytes[target]
        received = memory[target].received_bytes[source]
        edge = replace(planned, source_bytes=sent, target_bytes=received)
        if not self._apart(planned.edge):
            return edge
        return replace(
            edge,
            source_workspace_bytes=workspace_bytes(sent, received),
            target_workspace_bytes=workspace_bytes(received, sent),
        )

    def _apart(self, edge: Edge) -> bool:
        """Whether moving values takes memory of its own; assumed where nobody says which process has which device."""
        if self._meshes is None:
            return self.plan.stages[edge.source].devices != self.plan.stages[edge.target].devices
        return _takes_workspace(self._meshes[edge.source], self._meshes[edge.target])

    def _kept_by_transfers(self, edges: Sequence[EdgeTiming]) -> list[float]:
        """For each stage what stays on a device between transfers."""
        received = [0.0] * len(self.stages)
        for one in filter(lambda one: self._apart(one.edge), edges):
            received[one.edge.source] += one.target_bytes
            received[one.edge.target] += one.source_bytes
        return list(map(kept_bytes, received))

    def timeline(self) -> Timeline:
        """The predicted step, with the memory of the traced programs.

        Raises:
          PlanError: nobody has priced the plan.
        """
        return simulate(self.schedule, self.timing())

    def plan_with_memory(self, memory: Sequence[StageMemory] | None = None) -> Plan:
        """The plan with its stages' memory as traced: the totals are the peaks of the predicted step. Its notes say
        what large values stages send each other around the core.

        Args:
          memory: what stages hold, where that is known otherwise.

        Raises:
          PlanError: nobody has priced the plan.
        """
        known = memory or self.memory
        peaks = simulate(self.schedule, self.timing(known)).peak_bytes
        ranks = self.schedule.stage_ranks
        activations = [m.in_flight_bytes * n for m, n in zip(known, self.schedule.in_flight, strict=True)]
        parameters = [m.parameter_bytes * n for m, n in zip(known, self.schedule.weight_versions, strict=True)]
        named = [
            weights + m.gradient_bytes + m.state_bytes + kept
            for weights, m, kept in zip(parameters, known, activations, strict=True)
        ]
        stages = []
        for number, (stage, found) in enumerate(zip(self.plan.stages, known, strict=True)):
            others = [n for n, rank in enumerate(ranks) if rank == ranks[number]]
            # What stages of one rank need besides, they need for all of them together.
            rest = (peaks[ranks[number]] - sum(named[n] for n in others)) / len(others)
            counted = Memory(
                parameters=parameters[number],
                gradients=found.gradient_bytes,
                optimizer=found.state_bytes,
                activations=activations[number],
                workspace=max(rest, 0.0),
            )
            stages.append(replace(stage, memory=counted, in_flight=self.schedule.in_flight[number]))
        note = self.around.note()
        notes = () if note is None or note in self.plan.notes else (note,)
        return replace(self.plan, stages=tuple(stages), notes=(*self.plan.notes, *notes))


def _takes_workspace(source: Mesh, target: Mesh) -> bool:
    """Whether a transfer between two meshes may be a program of its own: between CPU devices of one process JAX copies.

    Args:
      source: of one stage.
      target: of another.
    """
    devices = [device for mesh in (source, target) for device in mesh.devices.flat]
    return len({d.process_index for d in devices}) > 1 or any(d.platform != "cpu" for d in devices)


def _traced(planned: StageTiming, found: StageMemory) -> StageTiming:
    """What a plan says of a stage, with what its traced programs hold."""
    return replace(
        planned,
        constant_bytes=found.constant_bytes,
        version_bytes=found.parameter_bytes,
        in_flight_bytes=found.in_flight_bytes,
        delayed_bytes=found.delayed_bytes,
        handed_bytes=found.handed_bytes,
        workspace_bytes=found.workspace_bytes,
        update_workspace_bytes=found.update_workspace_bytes,
    )


def _staged(given: Program | StagedProgram, plan: Plan) -> StagedProgram:
    """The program with its scans split as the plan says; the plan's stages are its layers."""
    program = given.source if isinstance(given, StagedProgram) else given
    _check(program, plan)
    if isinstance(given, StagedProgram) and dict(given.scan_splits) == dict(plan.scan_splits):
        return given
    cuts = [stage.equations[0] for stage in plan.stages[1:] if stage.equations is not None and not plan.shares]
    return staged_program(program, layers=1, cuts=cuts, scan_splits=dict(plan.scan_splits))


def _check(program: Program, plan: Plan) -> None:
    check_program(program, plan)
    if not program.marked:
        raise PlanError(
            refused="a pipeline", got=program.marks.got, needed="exactly one, outside of loops",
            where="the step", try_=f"{program.marks.advice}, one stage, or for a step without gradients a program of "
            "trace_inference",
        )  # fmt: skip
    if any(stage.equations is None for stage in plan.stages):
        raise PlanError(
            refused="the plan", got="a stage without a range of equations", needed="one for each stage",
            where="plan=", try_="planning again",
        )  # fmt: skip
    if plan.shares:
        check_replicas(program)
    if plan.schedule == "inference" and program.parameter_inputs:
        raise PlanError(
            refused="the schedule inference", got="a step with gradients", needed="one that goes forward only",
            where="plan=", try_="one_f_one_b, or the forward step alone (program.inference.trace_inference)",
        )  # fmt: skip


def check_replicas(program: Program) -> None:
    """Refuse steps that replicas cannot share.

    Raises:
      PlanError: saying why.
    """
    for effect in program.effects.lifted:
        if effect.in_loss:
            raise PlanError(
                refused="the schedule replicas", got=f"{effect.name} in the loss function",
                needed="a loss function without effects, whose microbatches are shared out", where=effect.line,
                try_="calling it outside the loss function, or another schedule",
            )  # fmt: skip
    if not program.marked or any(dim is not None for dim in grown_dims(program)):
        no_core = "a step without meshwright.value_and_grad, whose microbatches are shared out"
        raise PlanError(
            refused="the schedule replicas", where="the step",
            got="results of the loss function that grow with the batch" if program.marked else no_core,
            needed="one call of meshwright.value_and_grad, and of its function losses and sums alone",
            try_="the sums or means of these results, or another schedule",
        )  # fmt: skip

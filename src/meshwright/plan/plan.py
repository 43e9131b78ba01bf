"""The plan and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import Any

from ..program.padded_dims import PaddedDim
from ..sharding.spec import Spec

SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPlan:
    """How one operator is split.

    Args:
      path: the equation's position in the program, one number for each level of nesting.
      name: its primitive, for reading.
      axes: for each factor of its rule the mesh axes that split it, major first.
      broadcast: for the link of a scan, the axes over which the value's cotangent stays partial inside the loop.
    """

    path: tuple[int, ...]
    name: str
    axes: tuple[tuple[str, ...], ...]
    broadcast: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """Where a differentiated input and all that belongs to it lives.

    Args:
      name: its path in the user's state.
      shape: global shape.
      use: the spec the program reads it in; `broadcast` axes are those its gradient is summed over.
      storage: the spec the optimizer state and the update have. Equal to `use` without `broadcast` (no ZeRO), or split
        further (ZeRO-1; 2 if `scattered`). Where `use` itself is split over axes that the operators then gather, that
        is ZeRO-3.
      rows: the rows a stage holds of a stacked parameter whose scan is cut over several stages, first and one past the
        last; None for the whole parameter. `shape` is that of the part.
      rows_dim: the dim on which the layers are stacked.
      gathered: the axes that split it and over which it is gathered where it is used.
      scattered: whether each microbatch's gradient is summed over devices into the spec of `storage` and added up there
        (ZeRO-2); else gradients are added up as they are, and summed once a step.
    """

    name: str
    shape: tuple[int, ...]
    use: Spec
    storage: Spec
    rows: tuple[int, int] | None = None
    rows_dim: int = 0
    gathered: tuple[str, ...] = ()
    scattered: bool = False

    @property
    def stored_axes(self) -> tuple[str, ...]:
        """Axes that split the optimizer state but not the parameter."""
        return tuple(a for a in self.storage.sharded_axes if a not in self.use.sharded_axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan:
    """The spec of one input of the program that is not differentiated."""

    name: str
    shape: tuple[int, ...]
    spec: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Predicted peak bytes on one device."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        """All of it, bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Predicted traffic of one kind of collective on one device during one step.

    Args:
      kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute".
      count: how many run.
      bytes: sum of their buffers (all_reduce, reduce_scatter, all_to_all: inputs; all_gather: outputs).
    """

    kind: str
    count: int
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the program on a submesh.

    A parameter that several stages name (a tied embedding) is held by each of them: its gradient is summed over its
    holders once a step, and each updates its copy. With `rows`, the holders' parts are disjoint and nothing is summed.

    Args:
      layers: first and one past the last layer.
      devices: positions in the cluster, in the mesh's row-major order.
      mesh: the logical mesh: axis names and sizes, major first.
      operators: by operator index.
      settled: for values with several readers, the spec they are moved to once for all of them.
      parameters: differentiated inputs, in input order.
      inputs: the other inputs, in input order.
      rematerialised: equation ranges whose results are computed again in the backward pass, by nesting path.
      memory: predicted, on one device.
      memory_limit_bytes: what one device may use.
      communication: predicted collectives of one step.
      compute_seconds: predicted, of one step.
      communication_seconds: predicted, of one step.
      equations: first and one past the last top-level equation of the core, its scans split as the plan's `scan_splits`
        say; None for all of them. What the range reads of values that depend on no input (masks, positions), made by
        equations before it, the stage makes again for itself (`program.cut` lists these equations).
      forward_seconds: predicted, of one microbatch.
      backward_seconds: predicted, of one microbatch, rematerialisation included.
      weight_seconds: predicted, of that the gradients of parameters, which a schedule may put off.
      synchronise_seconds: predicted, of the gradients' synchronisation, once a step.
      update_seconds: predicted, of the optimizer, once a step.
      in_flight: most microbatches whose activations it holds at once.
      gradient_exchange: how gradients that all devices of an axis have a part of are summed: "collective" (all-reduce),
        or "central": each device sends its part to the first, which sends the sums back (a parameter server).
      device_kind: what its devices are, as the cluster calls them; of several kinds all, in order.
      flops: predicted, executed FLOPs of matrix products and convolutions on one device in one step; None in a plan
        that does not say.
      kept_inside: paths of equations in the rematerialised ranges whose results are kept all the same.
    """

    layers: tuple[int, int]
    devices: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    operators: tuple[OperatorPlan, ...]
    settled: tuple[tuple[int, Spec], ...]
    parameters: tuple[ParameterPlan, ...]
    inputs: tuple[InputPlan, ...]
    rematerialised: tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...]
    memory: Memory
    memory_limit_bytes: float
    communication: tuple[Collective, ...]
    compute_seconds: float
    communication_seconds: float
    equations: tuple[int, int] | None = None
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    weight_seconds: float = 0.0
    synchronise_seconds: float = 0.0
    update_seconds: float = 0.0
    in_flight: int = 1
    gradient_exchange: str = "collective"
    device_kind: str = ""
    flops: float | None = None
    kept_inside: tuple[tuple[int, ...], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis."""
        return dict(self.mesh)

    @property
    def rematerialised_segments(self) -> int:
        """How many ranges of equations are rematerialised, each by itself."""
        return sum(len(runs) for _, runs in self.rematerialised)

    @property
    def remat(self) -> str:
        """What is rematerialised, in a word: "none", "layer", or "selective" where some results are kept inside."""
        if not self.rematerialised:
            return "none"
        return "selective" if self.kept_inside else "layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value that one stage computes and another reads, once a microbatch.

    Args:
      source: the stage that computes it.
      target: the stage that reads it; not always the next one.
      name: of the value, for reading.
      value: its position among the values of the core's graph, its scans split.
      bytes: of the whole value, for one microbatch.
      differentiated: whether its cotangent comes back.
      forward_seconds: predicted, of one microbatch.
      backward_seconds: predicted, of its cotangent.
    """

    source: int
    target: int
    name: str
    value: int
    bytes: float
    differentiated: bool
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says of a plan.

    Args:
      step_seconds: one training step.
      tflops_per_device: model FLOPs (forward and backward, no rematerialisation) per second and device, in 1e12.
      flops_per_device: executed FLOPs of matrix products and convolutions on one device in one step.
      optimality_gap: how far, at most, the objective is from the optimum, relative; in the objective a split backward
        counts for more than it takes, since it has to be worth it. Infinite where no bound is known.
      bubble_fraction: the share of all devices' time in which they wait for other stages.
    """

    step_seconds: float
    tflops_per_device: float
    flops_per_device: float
    optimality_gap: float
    bubble_fraction: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a program runs on a cluster.

    Args:
      program: fingerprint of the program and its shapes.
      cluster: name of the cluster.
      cluster_fingerprint: of everything in its description.
      microbatches: how many parts the batch is cut into, their gradients added up.
      schedule: order of the microbatches over stages, a name of `schedule.SCHEDULES`; "none" with one stage.
      stages: in program order; of replicas, copies of the whole program.
      predicted: by the cost model; None for a plan nobody has priced.
      schedule_options: options of the schedule by name: `warm_up` (a number for each edge, in sorted order), `chunks`,
        `split_backward` (0 or 1), `shares` (of replicas, how many microbatches each runs).
      scan_splits: scans of the core that are cut into several, by position of their equation before any is: the trips
        of each piece (`program.scan_split`).
      transfers: what stages send each other, by source, target and value.
      padded: dims that the program has longer inside than its inputs have, so that axes divide them.
    """

    program: str
    cluster: str
    cluster_fingerprint: str
    microbatches: int
    schedule: str
    stages: tuple[Stage, ...]
    predicted: Prediction | None = None
    notes: tuple[str, ...] = field(default=())
    schedule_options: tuple[tuple[str, int | tuple[int, ...]], ...] = ()
    scan_splits: tuple[tuple[int, tuple[int, ...]], ...] = ()
    transfers: tuple[Transfer, ...] = ()
    padded: tuple[PaddedDim, ...] = ()

    @cached_property
    def num_devices(self) -> int:
        """How many devices the stages use together; stages of one rank (interleaving) share theirs."""
        return len({device for stage in self.stages for device in stage.devices})

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Of replicas, how many microbatches each runs; empty where every stage runs all."""
        shares = dict(self.schedule_options).get("shares", ())
        return shares if isinstance(shares, tuple) else (shares,)

    def microbatches_of(self, stage: int) -> int:
        """How many microbatches a stage runs in a step."""
        return self.shares[stage] if self.shares else self.microbatches

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of stages (source, target) with something to send, sorted."""
        return tuple(sorted({(t.source, t.target) for t in self.transfers}))

    def save(self, path: Any) -> None:
        """Write the plan as JSON (schema `SCHEMA`)."""
        from .io import save_plan

        save_plan(self, path)

    def diff(self, other: Plan) -> tuple[str, ...]:
        """What differs in `other`, a line each; empty for equal plans."""
        from .diff import diff_plans

        return diff_plans(self, other)

    def with_prediction(self, predicted: Prediction | None) -> Plan:
        """The same plan with another prediction."""
        return replace(self, predicted=predicted)

    def __str__(self) -> str:
        """A short paragraph; `meshwright.report.explain` shows all of it."""
        meshes = ", ".join(" ".join(f"{name}={size}" for name, size in s.mesh) or "one device" for s in self.stages)
        text = (
            f"Plan for {self.num_devices} devices of cluster {self.cluster}: mesh {meshes}, "
            f"stages: {len(self.stages)}, schedule: {self.schedule}, microbatches: {self.microbatches}, "
            f"parameters: {sum(len(s.parameters) for s in self.stages)}."
        )
        if self.predicted is not None:
            peak, gap = max((s.memory.total for s in self.stages), default=0.0), self.predicted.optimality_gap
            text += (
                f" Predicted: {self.predicted.step_seconds:.4g} s a step, {peak / 2**20:.1f} MiB on a device, "
                f"optimality gap {f'{100 * gap:.3g} %' if isfinite(gap) else 'not known'}."
            )
        return text

    def collectives(self) -> Mapping[str, Collective]:
        """Predicted collectives of all stages by kind."""
        total: dict[str, Collective] = {}
        for stage in self.stages:
            for c in stage.communication:
                have = total.get(c.kind, Collective(kind=c.kind, count=0, bytes=0.0))
                total[c.kind] = Collective(kind=c.kind, count=have.count + c.count, bytes=have.bytes + c.bytes)
        return total

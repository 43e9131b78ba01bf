"""The plan and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..sharding.spec import Spec

SCHEMA = 1


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
        further (ZeRO-1 and 2). Where `use` itself is split over axes that the operators then gather, that is ZeRO-3.
    """

    name: str
    shape: tuple[int, ...]
    use: Spec
    storage: Spec

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

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis."""
        return dict(self.mesh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says of a plan.

    Args:
      step_seconds: one training step.
      tflops_per_device: model FLOPs (forward and backward, no rematerialisation) per second and device, in 1e12.
      flops_per_device: executed FLOPs of matrix products and convolutions on one device in one step.
      optimality_gap: how far, at most, the objective is from the optimum, relative.
    """

    step_seconds: float
    tflops_per_device: float
    flops_per_device: float
    optimality_gap: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a program runs on a cluster.

    Args:
      program: fingerprint of the program and its shapes.
      cluster: name of the cluster.
      cluster_fingerprint: of everything in its description.
      microbatches: how many parts the batch is cut into, their gradients added up.
      schedule: order of the microbatches over stages; "none" with one stage.
      stages: in program order.
      predicted: by the cost model; None for a plan nobody has priced.
    """

    program: str
    cluster: str
    cluster_fingerprint: str
    microbatches: int
    schedule: str
    stages: tuple[Stage, ...]
    predicted: Prediction | None = None
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def num_devices(self) -> int:
        """How many devices the stages use together."""
        return sum(len(stage.devices) for stage in self.stages)

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
            peak = max((s.memory.total for s in self.stages), default=0.0)
            text += (
                f" Predicted: {self.predicted.step_seconds:.4g} s a step, {peak / 2**20:.1f} MiB on a device, "
                f"optimality gap {100 * self.predicted.optimality_gap:.3g} %."
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

"""The intra-operator problem of one stage, and the seconds of its solutions by pass.

A stage differs from a whole program in its memory: activations and received values are held for every microbatch *in
flight*, while parameters, gradients, optimizer state and the batch's inputs are held once. And the stage search needs
the two passes apart, since a pipeline's transfers and memory lie between them (`passes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cluster import Device, LogicalMesh
from ...cost.compute import elementwise_seconds
from ...cost.kernels import Kernel
from ...program.cut import Cut
from ...program.graph import Graph
from ...program.residuals import kept_inputs
from ...solve.flat import FlatNodes
from ..intra.limited import LimitedProblem
from ..intra.passes import Passes
from ..intra.problem import ParameterInfo
from ..intra.workspace import AS_BAD, Workspace
from ..restrictions.constraints import Constraints


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds and bytes of a solved stage.

    Args:
      forward_seconds: of one microbatch.
      backward_seconds: of one microbatch.
      weight_seconds: of that, the gradients of parameters, which nobody waits for.
      synchronise_seconds: of the gradients, once a step.
      update_seconds: of the optimizer, once a step.
      constant_bytes: on one device throughout.
      workspace_bytes: on one device while its backward pass runs.
      in_flight_bytes: on one device for each microbatch in flight.
    """

    forward_seconds: float
    backward_seconds: float
    weight_seconds: float
    synchronise_seconds: float
    update_seconds: float
    constant_bytes: float
    workspace_bytes: float
    in_flight_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastBytes:
    """Lower bounds on the memory of any layout of a stage, on one device.

    Args:
      constant: throughout.
      workspace: while its backward pass runs.
      kept: for each microbatch in flight.
    """

    constant: float
    workspace: float
    kept: float

    def held(self, in_flight: int) -> float:
        """The bound with so many microbatches in flight."""
        return self.constant + self.workspace + in_flight * self.kept


@dataclass(frozen=True, slots=True, kw_only=True)
class AsPart:
    """A solved part of a longer range of layers, with what the range saves.

    Args:
      seconds: of the part by itself.
      received_seconds: of writing what it receives, for each microbatch: in a longer range it is there.
      fixed_seconds: of starting the collective that sums its gradients, once a step: a range has one.
      cotangent_bytes: of its workspace, the cotangents of what it receives.
      inputs: what each input of its graph takes, which a range has once however many parts read it: seconds for each
        microbatch, seconds once a step, bytes throughout, bytes for each microbatch in flight; `[inputs, 4]`.
      output_seconds: of writing each output of its graph, beside computing it where it is read; `[outputs]`.
    """

    seconds: StageSeconds
    received_seconds: float
    fixed_seconds: float
    cotangent_bytes: float
    inputs: np.ndarray
    output_seconds: np.ndarray


class StageProblem(LimitedProblem):
    """The problem of one stage on one logical mesh, for any number of microbatches in flight.

    Args:
      cut: the stage's part of the program, at the size of one microbatch.
      graph: that of the cut, with what is rematerialised marked.
      mesh: logical mesh.
      device: what it is made of.
      parameters: by position in the graph's parameters.
      microbatches: in a step.
      constraints: what the user has fixed.
      split_dims: for the inputs of the whole program that are not differentiated, the dim that microbatches cut.
      workspace: what its backward pass makes beside what is kept; None for nothing.
      alone: whether it is the only stage of its plan, which is run as one program then.
      carried: as of `IntraOpProblem`.
    """

    def __init__(
        self,
        cut: Cut,
        graph: Graph,
        mesh: LogicalMesh,
        device: Device,
        *,
        parameters: Sequence[ParameterInfo],
        microbatches: int,
        constraints: Constraints,
        split_dims: Sequence[int | None],
        workspace: Workspace | None = None,
        alone: bool = False,
        carried: int = 0,
    ) -> None:
        self.is_one_program = alone
        places = {value: place for place, value in enumerate(cut.whole.inputs[: len(split_dims)])}
        super().__init__(
            graph, mesh, device, parameters=parameters, microbatches=microbatches, constraints=constraints,
            carried=carried, workspace=workspace,
            split_dims=[split_dims[places[v]] if microbatches > 1 and v in places else None for v in cut.inputs],
        )  # fmt: skip
        self._as_part: dict[tuple[int, ...], AsPart] = {}
        self._received = graph.inputs[len(cut.parameters) + len(cut.program_inputs) :]
        constant = {node for value, node in self.input_node.items() if value not in self._received}
        # In a longer range its moments may count less beside those of others, and what it received it has itself.
        self._least_workspace = AS_BAD * _least(self._workspace)
        nothing = [np.zeros(len(size)) for size in self._bytes]
        self._cotangents = {}
        for value in self._received if workspace is not None else ():
            if graph.values[value].differentiated:  # its cotangent, on its way back
                node, specs = self._defines[value]
                self._cotangents[node] = self.local_bytes(value, specs)
                self._workspace[node] = self._workspace[node] + self._cotangents[node]
        self._throughout = [self._input_bytes[n] if n in constant else nothing[n] for n in range(len(nothing))]
        self._constant_bytes = [a + b for a, b in zip(self._throughout, self._workspace, strict=True)]
        stays = kept_inputs(graph)
        self._kept_by_node = [*self._bytes]
        self._received_bytes = {}
        for value in self._received:
            # The whole program's inputs are there for all microbatches; what is received, for those in flight, unless
            # only the forward pass reads it: a loop keeps its carry itself.
            node = self.input_node[value]
            self._received_bytes[node] = self._input_bytes[node] / microbatches * (value in stays)
            self._kept_by_node[node] = self._kept_by_node[node] + self._received_bytes[node]

    @cached_property
    def _once_bytes(self) -> Sequence[np.ndarray]:
        return self._constant_bytes

    @property
    def _each_bytes(self) -> Sequence[np.ndarray]:
        return self._kept_by_node

    @cached_property
    def least_bytes(self) -> LeastBytes:
        """Lower bounds on the bytes of all choices, on one device."""
        return LeastBytes(
            constant=_least(self._throughout), workspace=self._least_workspace, kept=_least(self._kept_by_node),
        )  # fmt: skip

    @property
    def least_input_bytes(self) -> np.ndarray:
        """Of each input of the graph the least bytes on one device: throughout, and for each microbatch in flight,
        `[inputs, 2]`."""
        nodes = [self.input_node[value] for value in self.graph.inputs]
        none = np.zeros(1)
        rows = [(self._throughout[node].min(), self._received_bytes.get(node, none).min()) for node in nodes]
        return np.array(rows).reshape(-1, 2)

    @cached_property
    def _passes(self) -> Passes:
        return Passes(self)

    @cached_property
    def _flat_bytes(self) -> FlatNodes:
        """Bytes throughout, of the workspace and for each microbatch in flight."""
        return FlatNodes(self._throughout, self._workspace, self._kept_by_node)

    def release(self) -> None:
        """Free what solving it and adding it up has prepared."""
        super().release()
        self._as_part.clear()
        for name in ("_passes", "_flat_bytes"):
            self.__dict__.pop(name, None)

    def seconds(self, choices: tuple[int, ...], objective: float | None = None) -> StageSeconds:
        """Seconds and bytes of a choice for each node.

        Args:
          choices: of all nodes.
          objective: their seconds in a step, if they are known.
        """
        passes = self._passes.seconds(choices, self._free.seconds(choices) if objective is None else objective)
        constant, workspace, kept = self._flat_bytes.sum(np.array(choices, dtype=int)).tolist()
        return StageSeconds(
            forward_seconds=passes.forward,
            backward_seconds=passes.backward,
            weight_seconds=passes.weight,
            synchronise_seconds=passes.synchronise,
            update_seconds=passes.update,
            constant_bytes=constant,
            workspace_bytes=workspace,
            in_flight_bytes=kept,
        )

    def as_part(self, choices: tuple[int, ...]) -> AsPart:
        """The same as a part of a longer range; cached, since many prices of memory have the same choices.

        Args:
          choices: of all nodes.
        """
        if choices not in self._as_part:
            written, inputs = 0.0, []
            for value in self.graph.inputs:
                node = self.input_node[value]
                number = choices[node]
                if value in self._received:
                    shards = self.prices.shards(self._defines[value][1]).item(number)
                    written += self.graph.values[value].bytes / shards
                    inputs.append((0.0, 0.0, 0.0, self._received_bytes[node].item(number)))
                    continue
                accumulate = once = 0.0
                if (known := self.parameter_prices.get(node)) is not None:
                    accumulate = known.each_seconds(self.microbatches).item(number)
                    synchronise = known.synchronise_seconds.item(number) - known.fixed_seconds.item(number)
                    once = max(0.0, synchronise) + known.update_seconds.item(number)
                inputs.append((accumulate, once, self._throughout[node].item(number), 0.0))
            self._as_part[choices] = AsPart(
                seconds=self.seconds(choices),
                received_seconds=elementwise_seconds(written, self.prices.device),
                fixed_seconds=sum(one.fixed_seconds.item(choices[n]) for n, one in self.parameter_prices.items()),
                cotangent_bytes=sum(size.item(choices[node]) for node, size in self._cotangents.items()),
                inputs=np.array(inputs).reshape(-1, 4),
                output_seconds=np.array([self._writing_seconds(v, choices) for v in self.graph.outputs]),
            )
        return self._as_part[choices]

    def _writing_seconds(self, value: int | None, choices: tuple[int, ...]) -> float:
        """Seconds of writing a value, beside computing it where it is read."""
        if value is None or value not in self._defines:
            return 0.0
        node, specs = self._defines[value]
        written = self.graph.values[value].bytes / self.prices.shards(specs).item(choices[node])
        return max(
            0.0, self.prices.kernel(Kernel("stored", 0.0, written)) - self.prices.kernel(Kernel("fused", 0.0, written))
        )


def _least(rows: Sequence[np.ndarray]) -> float:
    """The least numbers of rows together."""
    if not rows:
        return 0.0
    flat = FlatNodes(rows)
    return float(np.minimum.reduceat(flat.numbers, flat.starts).sum())

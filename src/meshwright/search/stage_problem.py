"""The intra-operator problem of one stage, and what its solution costs, forward and backward apart.

A stage differs from a whole program in its memory: what it keeps for the backward pass, and what it receives, it keeps
for every microbatch *in flight*, while parameters, gradients, optimizer state and the batch's inputs are there once.
And the stage search needs the two passes apart, since a pipeline's transfers and memory lie between them.

The forward pass is priced by itself, from the same prices: each operator as if nothing were differentiated, and of each
conversion its forward collectives. What remains of the problem's objective is the backward pass, rematerialisation
included, once what happens once a step (gradient synchronisation, the optimizer's update) is taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cluster import Device, LogicalMesh
from ..cost.compute import elementwise_seconds
from ..program.cut import Cut
from ..program.graph import Graph
from ..sharding import Spec, convert
from ..solve import Problem
from .intra_op import IntraOpProblem, IntraOpSolution, ParameterInfo
from .pins import Pins


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """What a solved stage takes.

    Args:
      forward_seconds: of one microbatch.
      backward_seconds: of one microbatch.
      synchronise_seconds: of the gradients, once a step.
      update_seconds: of the optimizer, once a step.
      constant_bytes: on one device throughout.
      in_flight_bytes: on one device for each microbatch in flight.
    """

    forward_seconds: float
    backward_seconds: float
    synchronise_seconds: float
    update_seconds: float
    constant_bytes: float
    in_flight_bytes: float


class StageProblem(IntraOpProblem):
    """The problem of one stage on one logical mesh, for any number of microbatches in flight.

    Args:
      cut: the stage's part of the program, at the size of one microbatch.
      graph: that of the cut, with what is rematerialised marked.
      mesh: logical mesh.
      device: what it is made of.
      parameters: by position in the graph's parameters.
      microbatches: in a step.
      pins: what the user has fixed.
      split_dims: for the inputs of the whole program that are not differentiated, the dim that microbatches cut.
      workspace_bytes: on one device, while the backward pass computes a rematerialised part again.
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
        pins: Pins,
        split_dims: Sequence[int | None],
        workspace_bytes: float = 0.0,
    ) -> None:
        dims = [None] * len(cut.parameters) + [
            split_dims[i] if microbatches > 1 and i < len(split_dims) else None for i in cut.program_inputs
        ]
        super().__init__(
            graph, mesh, device, parameters=parameters, microbatches=microbatches, pins=pins, carried=0,
            split_dims=dims,
        )  # fmt: skip
        self.in_flight = 1
        self.price = 0.0
        self.workspace_bytes = workspace_bytes
        received = set(graph.inputs[len(cut.parameters) + len(cut.program_inputs) :])
        constant = {node for value, node in self.input_node.items() if value not in received}
        self._constant_bytes = [size if n in constant else np.zeros_like(size) for n, size in enumerate(self._bytes)]
        self._received = sorted(self.input_node[value] for value in received)
        kept = [np.zeros_like(size) if n in constant else size for n, size in enumerate(self._bytes)]
        for value in received:
            # The whole program's inputs are there for all microbatches; what is received, for those in flight.
            kept[self.input_node[value]] = kept[self.input_node[value]] / microbatches
        self._kept_by_node = kept

    def problem(self, memory_limit_bytes: float) -> Problem:
        """The problem as numbers, with `in_flight` microbatches kept. With a `price`, in seconds per byte, memory has
        that cost in place of a limit: what it saves is traded for what it costs."""
        memory = tuple(c + self.in_flight * k for c, k in zip(self._constant_bytes, self._kept_by_node, strict=True))
        plain = super().problem(memory_limit_bytes - self.workspace_bytes)
        if not self.price:
            return replace(plain, memory=memory)
        costs = tuple(seconds + self.price * size for seconds, size in zip(plain.costs, memory, strict=True))
        return Problem(costs=costs, edges=plain.edges)

    def least_bytes(self) -> tuple[float, float, float]:
        """No choice needs less on a device: throughout, kept for each microbatch, and of that what is received."""
        constant = self.workspace_bytes + sum(float(row.min()) for row in self._constant_bytes)
        kept = sum(float(row.min()) for row in self._kept_by_node)
        received = sum(float(self._kept_by_node[node].min()) for node in self._received)
        return constant, kept, received

    def seconds(self, chosen: IntraOpSolution) -> StageSeconds:
        """What a solution of this problem takes."""
        synchronise = update = 0.0
        for info, position, choice in zip(self.parameters, self.graph.parameters, chosen.parameters, strict=True):
            size = self.graph.values[self.graph.inputs[position]].bytes
            both, _ = self._parameter_price(size, info, choice)
            shards = choice.storage.shards(self.sizes)
            mine = elementwise_seconds((2 * info.optimizer_bytes + 3 * size) / shards, self.prices.device)
            synchronise += both - mine
            update += mine
        forward = self._forward_seconds(chosen)
        once = synchronise + update
        picked = chosen.solution.choices
        constant = float(sum(row[c] for row, c in zip(self._constant_bytes, picked, strict=True)))
        kept = float(sum(row[c] for row, c in zip(self._kept_by_node, picked, strict=True)))
        objective = chosen.solution.objective - self.price * (constant + self.in_flight * kept)
        return StageSeconds(
            forward_seconds=forward,
            backward_seconds=max(0.0, (objective - once) / self.microbatches - forward),
            synchronise_seconds=max(0.0, synchronise),
            update_seconds=update,
            constant_bytes=constant + self.workspace_bytes,
            in_flight_bytes=kept,
        )

    def boundary_seconds(self, chosen: IntraOpSolution) -> tuple[float, float]:
        """What a range of equations saves when it is no stage of its own but part of a larger one: the writing of what
        it receives, a microbatch, and the fixed cost of the one collective that sums its gradients, a step."""
        graph = self.graph
        spec_of = dict(zip(graph.inputs, chosen.inputs, strict=True))
        node_of = {node: value for value, node in self.input_node.items()}
        received = sum(
            elementwise_seconds(graph.values[v].bytes / spec_of[v].shards(self.sizes), self.prices.device)
            for v in (node_of[node] for node in self._received)
        )
        fixed = 0.0
        for choice in chosen.parameters:
            steps = convert(Spec(choice.use.dims, partial=choice.use.broadcast), choice.storage) or ()
            for step in steps:
                if step.forward == "all_reduce":
                    fixed += self.prices.collective("all_reduce", 1.0, step.axes) / len(self.parameters)
        return received, fixed

    def _forward_seconds(self, chosen: IntraOpSolution) -> float:
        """Of one microbatch."""
        graph, prices = self.graph, self.prices
        total = 0.0
        spec_of: dict[int, Spec] = dict(zip(graph.inputs, chosen.inputs, strict=True))
        for position, value in enumerate(graph.inputs):
            if position not in graph.parameters:
                total += elementwise_seconds(
                    graph.values[value].bytes / spec_of[value].shards(self.sizes), prices.device
                )
        for operator, choice in zip(graph.operators, chosen.operators, strict=True):
            if choice is None:
                continue
            plain = replace(operator, differentiated=False)
            total += operator.repeats * sum(prices.operator(graph, plain, choice.algorithm, forward_runs=1))
            spec_of.update({v: choice.algorithm.results[i] for i, v in enumerate(operator.results) if v is not None})
        for value, target in chosen.settled.items():
            maker = graph.operators[graph.producer[value][0]]
            total += self.trips(maker, value) * self._moved_seconds(value, spec_of[value], target)
            spec_of[value] = target
        for operator, choice in zip(graph.operators, chosen.operators, strict=True):
            if choice is None:
                continue
            for position, value in enumerate(operator.operands):
                if value is not None and value in spec_of:
                    seconds = self._moved_seconds(value, spec_of[value], choice.algorithm.operands[position])
                    total += operator.operand_repeats[position] * seconds
        for value in graph.outputs:
            if value is not None and value in spec_of:
                total += self._moved_seconds(value, spec_of[value], Spec(spec_of[value].dims))
        return total

    def _moved_seconds(self, value: int, source: Spec, target: Spec) -> float:
        """Of the forward collectives of one conversion."""
        array = self.graph.values[value]
        if not array.differentiated:
            source, target = source.without_broadcast(), target.without_broadcast()
        if source == target:
            return 0.0
        steps = convert(source, target)
        assert steps is not None, (source, target)
        return sum(
            self.prices.collective(step.forward, array.bytes * step.buffer_fraction(self.sizes), step.axes)
            for step in steps
            if step.forward is not None
        )

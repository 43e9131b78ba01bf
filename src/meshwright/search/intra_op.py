"""Intra-operator parallelism: the best algorithm of every operator of one stage on one logical mesh.

The problem (design of Alpa, OSDI '22, with compute, both passes and storage in the objective): nodes are operators,
inputs, parameters and *shared values* (a value with several readers is moved once for all of them); an edge costs the
conversion between what its producer leaves and what its reader needs. One memory row bounds parameters, optimizer
state, gradients and the activations kept for the backward pass. `solve` proves the optimum or prints its gap.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import numpy as np

from ..cluster import Device, LogicalMesh
from ..cost.compute import elementwise_seconds
from ..program.graph import Graph, Operator, once_for_each_graph
from ..program.origins import dim_origins, operator_origins
from ..program.residuals import is_cheap, is_stored, kept_values, needed_again, read_by_backward
from ..sharding import Spec
from ..solve import Problem, Solution, solve
from .choices import (
    OperatorChoice,
    ParameterChoice,
    operator_choices,
    parameter_choices,
    spec_choices,
    values_of_parameters,
)
from .parameter_prices import ParameterPrices, parameter_prices
from .pins import Pins
from .prices import OperatorPrices, prices_of
from .spec_row import SpecRow


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """What belongs to a differentiated input.

    Args:
      name: its path in the user's state.
      optimizer_bytes: bytes of the optimizer state that is laid out like it.
    """

    name: str
    optimizer_bytes: float


@dataclass(frozen=True, slots=True)
class Move:
    """A conversion that each microbatch makes so many times, between what two nodes choose.

    Args:
      source: node whose choices say what there is.
      target: node whose choices say what is read; the same where sums are taken and no more.
      value: that is converted.
      times: in a microbatch.
      sources: of each choice of the one node, the spec.
      targets: of each choice of the other.
    """

    source: int
    target: int
    value: int
    times: int
    sources: SpecRow
    targets: SpecRow


@dataclass(frozen=True, slots=True, kw_only=True)
class IntraOpSolution:
    """A choice for every node.

    Args:
      operators: by operator index; None for operators that depend on no input.
      settled: the spec shared values are moved to.
      parameters: by position in `Graph.parameters`.
      inputs: spec of every program input, parameters included.
      solution: the solver's objective, bound and method.
    """

    operators: tuple[OperatorChoice | None, ...]
    settled: Mapping[int, Spec]
    parameters: tuple[ParameterChoice, ...]
    inputs: tuple[Spec, ...]
    solution: Solution


def trips_of(operator: Operator, value: int) -> int:
    """How often `value`, a result of `operator`, is made: the outer result of a carry or stack is made once."""
    if operator.name == "scan_stack" or (operator.name == "scan_carry" and operator.results[1] == value):
        return operator.outer_repeats
    return operator.repeats


# What tells operators apart, numbered: programs have thousands of operators of a few hundred kinds, and a number is
# looked up at once.
_NUMBERS: dict[Hashable, int] = {}


@once_for_each_graph
def _signatures(graph: Graph) -> tuple[int, ...]:
    """Of each operator what its choices and their seconds depend on, but for mesh and device, as a number."""
    values, of_parameters = graph.values, values_of_parameters(graph)

    def described(indices: tuple[int | None, ...]) -> tuple[Any, ...]:
        return tuple(
            None if v is None else (values[v].shape, values[v].dtype, values[v].differentiated) for v in indices
        )

    found = (
        (
            operator.name, operator.rule, described(operator.operands), described(operator.results), operator.flops,
            operator.combine, operator.differentiated,
            all(v in of_parameters for v in operator.results if v is not None),
            tuple(v in of_parameters for v in operator.operands), is_stored(graph, operator),
        )
        for operator in graph.operators
    )  # fmt: skip
    return tuple(_NUMBERS.setdefault(one, len(_NUMBERS)) for one in found)


@once_for_each_graph
def _signatures_with_origins(graph: Graph) -> tuple[int, ...]:
    """The same, told apart by what their dims stand for as well."""
    return tuple(
        _NUMBERS.setdefault((number, origins), len(_NUMBERS))
        for number, origins in zip(_signatures(graph), operator_origins(graph), strict=True)
    )


class IntraOpProblem:
    """Builds the problem of one stage on one mesh.

    Args:
      graph: the stage's operators, at the size of one microbatch.
      mesh: logical mesh.
      device: what it is made of.
      parameters: by position in `graph.parameters`.
      microbatches: how often the program runs in a step.
      pins: what the user has fixed.
      split_dims: for the leading inputs, the dim that microbatches cut, or None.
      carried: how many leading outputs are the next step's leading inputs, and must leave as those came.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: LogicalMesh,
        device: Device,
        *,
        parameters: Sequence[ParameterInfo],
        microbatches: int,
        pins: Pins,
        carried: int,
        split_dims: Sequence[int | None] = (),
    ) -> None:
        self.graph = graph
        self.prices = prices_of(mesh, device)
        self.sizes = self.prices.sizes
        self.parameters = parameters
        self.microbatches = microbatches
        self.carried = carried
        self.gradient_exchange = pins.gradient_exchange
        self._pins = pins
        self._again, self._read_again = needed_again(graph)
        self.of_parameters = values_of_parameters(graph)
        # Parameters are at hand anyway, and so is what is made of them alone.
        self._kept = kept_values(graph) - self.of_parameters
        # Node tables: choices, seconds, bytes; and the spec each choice gives each value it defines.
        self.choices: list[tuple[Any, ...]] = []
        self._seconds: list[np.ndarray] = []
        self._bytes: list[np.ndarray] = []
        self._edges: dict[tuple[int, int], np.ndarray] = {}
        self.operator_node: dict[int, int] = {}
        self.operator_prices: dict[int, OperatorPrices] = {}
        self.shared_node: dict[int, int] = {}
        self.input_node: dict[int, int] = {}
        self.parameter_prices: dict[int, ParameterPrices] = {}
        self.moves: list[Move] = []
        # Edges that are alike share their table: by the one it was made of, and how often that runs; and turned round.
        self._scaled: dict[tuple[int, float], np.ndarray] = {}
        self._turned: dict[int, np.ndarray] = {}
        self._defines: dict[int, tuple[int, SpecRow]] = {}
        self._add_inputs()
        self._agree_on_batch(split_dims)
        self._add_operators()
        self._add_operands()
        self._add_outputs()

    # Nodes

    def _node(self, choices: Sequence[Any], seconds: Sequence[float] | np.ndarray) -> int:
        self.choices.append(tuple(choices))
        self._seconds.append(np.array(seconds, dtype=float))
        self._bytes.append(np.zeros(len(choices)))
        return len(self.choices) - 1

    def _add_inputs(self) -> None:
        graph = self.graph
        for position, index in enumerate(graph.inputs):
            value = graph.values[index]
            if position in graph.parameters:
                info = self.parameters[graph.parameters.index(position)]
                known = self._parameter_prices(index, info)
                node = self._node(known.choices, known.seconds(self.microbatches))
                self.parameter_prices[node] = known
                self._bytes[node] += known.held_bytes
                self._defines[index] = (node, SpecRow(choice.use for choice in known.choices))
            else:
                specs = spec_choices(value.shape, self.sizes, broadcast=False) if value.dtype != "key" else ()
                specs = specs or (Spec.replicated(len(value.shape)),)
                if self._pins.roles is not None and not self._is_pinned(value.name, value.shape):
                    specs = self._pins.roles.input(graph, index, specs)
                specs = self._pins.input(value.name, specs, self.sizes)
                held = [value.bytes * self.microbatches / s.shards(self.sizes) for s in specs]
                # Whatever a device is given has to be written to its memory.
                node = self._node(specs, [elementwise_seconds(size, self.prices.device) for size in held])
                self._bytes[node] += held
                self._defines[index] = (node, SpecRow(specs))
            self.input_node[index] = node

    def _parameter_prices(self, index: int, info: ParameterInfo) -> ParameterPrices:
        """Of each choice of a parameter; those of parameters that may lie in any way are found once for a mesh."""
        value, pins = self.graph.values[index], self._pins
        free = pins.roles is None and pins.zero is None and not self._is_pinned(info.name, value.shape)
        central = self.gradient_exchange == "central"
        key = value.shape, value.bytes, info.optimizer_bytes, len(self.parameters), central
        if free and key in self.prices.parameters:
            return self.prices.parameters[key]
        choices: Sequence[ParameterChoice] = parameter_choices(value.shape, self.sizes)
        if pins.roles is not None and not self._is_pinned(info.name, value.shape):
            choices = pins.roles.parameter(dim_origins(self.graph, index), choices)
        choices = tuple(pins.parameter(info.name, choices, self.sizes))
        found = parameter_prices(
            self.prices, choices, value.bytes, info.optimizer_bytes, parameters=len(self.parameters), central=central
        )
        if free:
            self.prices.parameters[key] = found
        return found

    def _is_pinned(self, name: str, shape: Sequence[int]) -> bool:
        return self._pins.layout(name, len(shape), self.sizes) is not None

    def _agree_on_batch(self, split_dims: Sequence[int | None]) -> None:
        """Arrays that microbatches cut split their batch over the same axes, or the first few of them: else a
        microbatch would pair different examples on one device."""
        cut = [(self.graph.inputs[i], d) for i, d in enumerate(split_dims) if d is not None]
        for (left, left_dim), (right, right_dim) in combinations(cut, 2):
            u, v = self.input_node[left], self.input_node[right]
            table = np.zeros((len(self.choices[u]), len(self.choices[v])))
            for i, a in enumerate(self.choices[u]):
                for j, b in enumerate(self.choices[v]):
                    shared = min(len(a.dims[left_dim]), len(b.dims[right_dim]))
                    if a.dims[left_dim][:shared] != b.dims[right_dim][:shared]:
                        table[i, j] = np.inf
            self._connect(u, v, table)

    def _is_constant(self, operator: Operator) -> bool:
        return all(v is None or self.graph.values[v].constant for v in operator.results)

    def forward_runs(self, operator: Operator) -> int:
        """How often an operator runs for one backward pass: twice where it is rematerialised."""
        return 2 if operator.index in self._again else 1

    def forward_runs_of(self, value: int, operator: Operator) -> int:
        """How often a conversion of `value` made for (or right after) `operator` runs forward."""
        return 2 if operator.region is not None and value in self._read_again else 1

    def _add_operators(self) -> None:
        graph, m = self.graph, self.microbatches
        roles = self._pins.roles
        signatures = _signatures(graph) if roles is None else _signatures_with_origins(graph)
        cache = self.prices.operators.setdefault(None if roles is None else roles.key, {})
        for operator in graph.operators:
            if self._is_constant(operator):
                continue
            signature = signatures[operator.index]
            if signature not in cache:
                of_parameters = self._is_of_parameters(operator)
                choices = operator_choices(graph, operator, self.sizes, of_parameters=of_parameters)
                if roles is not None:
                    origins = operator_origins(graph)[operator.index]
                    choices = roles.operator(operator, origins, choices, of_parameters=of_parameters)
                cache[signature] = self.prices.of_operator(graph, operator, choices)
            known = cache[signature]
            seconds = self.forward_runs(operator) * known.forward_seconds + known.backward_seconds
            node = self._node(known.choices, m * operator.repeats * seconds)
            self.operator_node[operator.index] = node
            self.operator_prices[operator.index] = known
            choices = known.choices
            for position, value in enumerate(operator.results):
                if value is not None:
                    self._defines[value] = (node, known.results[position])
        for value, users in graph.consumers.items():
            if value in self._defines and self._is_shared(value, users):
                self._add_shared(value)

    def _is_of_parameters(self, operator: Operator) -> bool:
        return all(v in self.of_parameters for v in operator.results if v is not None)

    def _is_shared(self, value: int, users: Sequence[tuple[int, int]]) -> bool:
        if value in self.input_node:
            return False
        made_by = self.graph.producer.get(value)
        if made_by is not None and self.graph.operators[made_by[0]].name in ("scan_const", "scan_slice"):
            return False
        return sum(1 for operator, _ in users if operator in self.operator_node) > 1

    def _add_shared(self, index: int) -> None:
        producer, specs = self._defines[index]
        users = [(user, at) for user, at in self.graph.consumers[index] if user in self.operator_node]
        choices = self.prices.shared(specs, tuple(self.operator_prices[user].operands[at] for user, at in users))
        node = self._node(choices, [0.0] * len(choices))
        self.shared_node[index] = node
        made_by = self.graph.operators[self.graph.producer[index][0]]
        table = self._conversions(index, specs, choices, self.forward_runs_of(index, made_by))
        times = self.trips(made_by, index)
        self._connect(producer, node, self._times(self.microbatches * times, table))
        self.moves.append(Move(producer, node, index, times, specs, choices))
        self._defines[index] = (node, choices)
        if index in self._kept:
            self._bytes[node] += self._kept_bytes(index, choices)

    def trips(self, operator: Operator, value: int) -> int:
        """As `trips_of`."""
        return trips_of(operator, value)

    def _kept_bytes(self, index: int, specs: SpecRow) -> np.ndarray:
        trips = self.trips(self.graph.operators[self.graph.producer[index][0]], index)
        return trips * self.local_bytes(index, specs)

    def local_bytes(self, index: int, specs: SpecRow) -> np.ndarray:
        """Bytes of a value on one device, by how it is split."""
        return self.graph.values[index].bytes / self.prices.shards(specs)

    def _conversions(self, index: int, sources: SpecRow, targets: SpecRow, runs: int) -> np.ndarray:
        value = self.graph.values[index]
        return self.prices.conversion_table(
            sources, targets, value.bytes, forward_runs=runs, differentiated=value.differentiated
        )

    def _times(self, times: float, table: np.ndarray) -> np.ndarray:
        """So many conversions as one. The table lives as long as the prices do, so that its identity tells it."""
        key = id(table), times
        if key not in self._scaled:
            self._scaled[key] = times * table
        return self._scaled[key]

    def _connect(self, u: int, v: int, table: np.ndarray) -> None:
        """Add what a pair of choices costs; the table is not to be changed any more."""
        if u == v:
            self._seconds[u] = self._seconds[u] + np.diag(table)
        elif u < v:
            self._edges[u, v] = self._edges[u, v] + table if (u, v) in self._edges else table
        else:
            self._connect(v, u, self._turned.setdefault(id(table), table.T))

    def _add_operands(self) -> None:
        graph, m = self.graph, self.microbatches
        gathered: set[int] = set()
        for operator in graph.operators:
            node = self.operator_node.get(operator.index)
            if node is None:
                continue
            for position, index in enumerate(operator.operands):
                if index is None or index not in self._defines:
                    continue
                source, specs = self._defines[index]
                targets = self.operator_prices[operator.index].operands[position]
                table = self._conversions(index, specs, targets, self.forward_runs_of(index, operator))
                times = operator.operand_repeats[position]
                self._connect(source, node, self._times(m * times, table))
                self.moves.append(Move(source, node, index, times, specs, targets))
                if index in self._kept and index not in self.shared_node and index not in self.input_node:
                    self._bytes[node] += self._kept_bytes(index, targets)
                elif index not in gathered and self._keeps_gathered(operator, index):
                    gathered.add(index)
                    self._bytes[node] += self.was_gathered(targets) * self._kept_bytes(index, targets)

    def _keeps_gathered(self, operator: Operator, value: int) -> bool:
        """Whether an operand of a product is kept as it was gathered for it: collectives run once, so the backward pass
        has no other."""
        return operator.region is None and self.reads_gathered(operator, value)

    def reads_gathered(self, operator: Operator, value: int) -> bool:
        """Whether the derivative of an operator reads an operand as it was gathered for it."""
        return (
            not is_cheap(operator.name) and value in self.graph.producer
            and value not in self.of_parameters and value in read_by_backward(self.graph, operator)
        )  # fmt: skip

    def was_gathered(self, specs: SpecRow) -> np.ndarray:
        """Of an operand, by how it is split: what is split over all devices was not gathered."""
        return self.prices.shards(specs) < prod(self.sizes.values())

    def _add_outputs(self) -> None:
        """An output may leave in any layout, but a partial one has to be summed for whoever reads it, and one that is
        carried to the next step leaves as the input it becomes."""
        for position, index in enumerate(self.graph.outputs):
            if index is None or index not in self._defines:
                continue
            node, specs = self._defines[index]
            if position < self.carried:
                target, wanted = self._defines[self.graph.inputs[position]]
                self._connect(node, target, self._conversions(index, specs, wanted, 1))
                self.moves.append(Move(node, target, index, 1, specs, wanted))
                continue
            self.moves.append(Move(node, node, index, 1, specs, SpecRow(Spec(spec.dims) for spec in specs)))
            for i, spec in enumerate(specs):
                if spec.partial or spec.broadcast:
                    self._seconds[node][i] += (
                        self._conversions(index, SpecRow([spec]), SpecRow([Spec(spec.dims)]), 1)[0, 0]
                        * self.microbatches
                    )

    # Solving

    def problem(self, memory_limit_bytes: float) -> Problem:
        """The problem as numbers."""
        return Problem(
            costs=tuple(self._seconds),
            edges=dict(self._edges),
            memory=tuple(self._bytes),
            memory_limit=memory_limit_bytes,
        )

    def solve(
        self, memory_limit_bytes: float, *, gap: float = 0.0, time_limit_seconds: float = 60.0,
        known: tuple[int, ...] | None = None,
    ) -> IntraOpSolution:  # fmt: skip
        """The best choice for every node within the memory limit; arguments as of `solve.solve`.

        Raises:
          solve.Infeasible: if no choice fits.
        """
        problem = self.problem(memory_limit_bytes)
        solution = solve(problem, gap=gap, time_limit_seconds=time_limit_seconds, known=known)
        picked = [choices[c] for choices, c in zip(self.choices, solution.choices, strict=True)]
        graph = self.graph
        parameters = tuple(picked[self.input_node[graph.inputs[p]]] for p in graph.parameters)
        inputs = tuple(
            picked[self.input_node[v]].use if i in graph.parameters else picked[self.input_node[v]]
            for i, v in enumerate(graph.inputs)
        )
        return IntraOpSolution(
            operators=tuple(
                picked[self.operator_node[o.index]] if o.index in self.operator_node else None for o in graph.operators
            ),
            settled={value: picked[node] for value, node in self.shared_node.items()},
            parameters=parameters,
            inputs=inputs,
            solution=solution,
        )

"""Intra-operator parallelism: the best algorithm of every operator of one stage on one logical mesh.

The problem (design of Alpa, OSDI '22, with compute, both passes and storage in the objective): nodes are operators,
inputs, parameters and *shared values* (a value with several readers is moved once for all of them), each with the
operators that are merged into it (`node_merging`); an edge costs the conversion between what its producer leaves and
what its reader needs. One memory row bounds parameters, optimizer state, gradients and the activations kept for the
backward pass. `solve` proves the optimum or prints its gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..._jax.barriers import barriers_hold
from ...cluster import Device, LogicalMesh
from ...cost.compute import elementwise_seconds
from ...program.graph import Graph, Operator
from ...program.origins import dim_origins, operator_origins
from ...program.parameter_values import is_read_again, values_of_parameters
from ...program.residuals import kept_itemsize
from ...sharding import Spec
from ...solve import Problem, Solution, solve
from ..prices.choices import (
    OperatorChoice,
    ParameterChoice,
    loop_rows,
    operator_choices,
    parameter_choices,
    reads_rows,
    spec_choices,
)
from ..prices.exposure import Exposure
from ..prices.of_choices import OperatorPrices, ParameterPrices
from ..prices.operators import prices_of, signatures, signatures_with_origins
from ..prices.parameters import Scattering, parameter_prices
from ..prices.spec_row import SpecRow
from ..restrictions.constraints import Constraints
from .node_merging import (
    Shared,
    forward_runs,
    forward_runs_of,
    node_merging_of,
    node_merging_of_one_program,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """What belongs to a differentiated input.

    Args:
      name: its path in the user's state.
      optimizer_bytes: bytes of the optimizer state that is laid out like it.
    """

    name: str
    optimizer_bytes: float


class Move(NamedTuple):
    """A conversion that each microbatch makes so many times, between what two nodes choose; less than once where it is
    made at the end of a step.

    Args:
      source: node whose choices say what there is.
      target: node whose choices say what is read; the same where an output's sums are taken and no more, or where
        followers of one array read each other.
      value: that is converted.
      times: in a microbatch.
      sources: of each choice of the one node, the spec.
      targets: of each choice of the other.
    """

    source: int
    target: int
    value: int
    times: float
    sources: SpecRow
    targets: SpecRow


@dataclass(frozen=True, slots=True, kw_only=True)
class IntraOpSolution:
    """A choice for every node.

    Args:
      operators: by operator index; None for operators that depend on no input.
      resharded_once: the spec shared values are moved to.
      parameters: by position in `Graph.parameters`.
      inputs: spec of every program input, parameters included.
      solution: the solver's objective, bound and method.
    """

    operators: tuple[OperatorChoice | None, ...]
    resharded_once: Mapping[int, Spec]
    parameters: tuple[ParameterChoice, ...]
    inputs: tuple[Spec, ...]
    solution: Solution


def trips_of(operator: Operator, value: int) -> int:
    """How often `value`, a result of `operator`, is made: the outer result of a carry or stack is made once."""
    if operator.name == "scan_stack" or (operator.name == "scan_carry" and operator.results[1] == value):
        return operator.outer_repeats
    return operator.repeats


class IntraOpProblem:
    """Builds the problem of one stage on one mesh.

    Args:
      graph: the stage's operators, at the size of one microbatch.
      mesh: logical mesh.
      device: what it is made of.
      parameters: by position in `graph.parameters`.
      microbatches: how often the program runs in a step.
      constraints: what the user has fixed.
      split_dims: for the leading inputs, the dim that microbatches cut, or None.
      carried: how many leading outputs are the next step's leading inputs, and must leave as those came.
    """

    # Whether forward and backward pass are one program. Such a one keeps more than two do; it keeps what it gathers of
    # parameters, which the loop of a pipeline's stage gathers again; and it sums single numbers over devices once, at
    # the end of a step.
    is_one_program = True

    def __init__(
        self,
        graph: Graph,
        mesh: LogicalMesh,
        device: Device,
        *,
        parameters: Sequence[ParameterInfo],
        microbatches: int,
        constraints: Constraints,
        carried: int,
        split_dims: Sequence[int | None] = (),
    ) -> None:
        self.graph = graph
        self.prices = prices_of(mesh, device)
        self.sizes = self.prices.sizes
        self.parameters = parameters
        self.microbatches = microbatches
        self.carried = carried
        self.gradient_exchange = constraints.gradient_exchange
        self._constraints = constraints
        self.of_parameters = values_of_parameters(graph)
        self._node_merging = (
            node_merging_of_one_program(graph, device.compiler, in_loop=microbatches > 1)
            if self.is_one_program
            else node_merging_of(graph)
        )
        self.operators = self._node_merging.operators
        # Node tables: choices, seconds, bytes (of inputs apart); and the spec each choice gives each value it defines.
        self.choices: list[tuple[Any, ...]] = []
        self._seconds: list[np.ndarray] = []
        self._bytes: list[np.ndarray] = []
        self._input_bytes: dict[int, np.ndarray] = {}
        self._edges: dict[tuple[int, int], np.ndarray] = {}
        self.operator_node: dict[int, int] = {}
        self.operator_prices: dict[int, OperatorPrices] = {}
        self.shared_node: dict[int, int] = {}
        self.input_node: dict[int, int] = {}
        self.parameter_prices: dict[int, ParameterPrices] = {}
        self.moves: list[Move] = []
        # Edges that are alike share their table, and the same turned round.
        self._turned: dict[int, np.ndarray] = {}
        self._defines: dict[int, tuple[int, SpecRow]] = {}
        self._add_inputs()
        self._agree_on_batch(split_dims)
        self._add_operators()
        self._add_operands()
        self._add_outputs()

    # Nodes

    def _node(self, choices: tuple[Any, ...], seconds: np.ndarray) -> int:
        """A new node; its seconds may be others' too, and are not to be changed."""
        self.choices.append(choices)
        self._seconds.append(seconds)
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
                self._input_bytes[node] = known.held_bytes
                self._defines[index] = (node, known.uses)
            else:
                specs = spec_choices(value.shape, self.sizes, broadcast=False) if value.dtype != "key" else ()
                specs = specs or (Spec.replicated(len(value.shape)),)
                if self._constraints.roles is not None and not self._is_pinned(value.name, value.shape):
                    specs = self._constraints.roles.input(graph, index, specs)
                specs = self._constraints.input(value.name, specs, self.sizes)
                row = SpecRow(specs)
                held = self.microbatches * self.prices.held_bytes(value, row)
                # Whatever a device is given has to be written to its memory.
                node = self._node(row, elementwise_seconds(1.0, self.prices.device) * held)
                self._input_bytes[node] = held
                self._defines[index] = (node, row)
            self.input_node[index] = node

    def _parameter_prices(self, index: int, info: ParameterInfo) -> ParameterPrices:
        """The prices of each choice of a parameter, cached by mesh for parameters without constraints."""
        value, constraints = self.graph.values[index], self._constraints
        free = constraints.roles is None and constraints.zero is None and not self._is_pinned(info.name, value.shape)
        central = self.gradient_exchange == "central"
        exposure = self.prices.exposure(self.graph, index)
        if self.microbatches > 1 or not self.is_one_program:
            # Behind a loop over microbatches, and between the programs of a stage, nothing runs beside sums.
            exposure = Exposure(starts=exposure.starts)
        rows = loop_rows(self.graph, index)
        scattering = Scattering(exposure=self.prices.exposure(self.graph, index))
        if rows is not None:
            exposed = self.prices.exposure(self.graph, rows.row)
            scattering = Scattering(rows=value.shape[rows.dim], exposure=exposed)
        # One microbatch has nothing to add up. In a stage's backward program compilers that hide latency make all
        # gradients before they scatter the first (`memory.latency_hiding`): nothing is saved there.
        pays = self.microbatches > 1 and self.is_one_program
        scatters = (pays or constraints.zero == 2) and not central
        key = (
            value.shape, value.bytes, info.optimizer_bytes, len(self.parameters), central, exposure,
            scatters, scattering if scatters else None, rows.dim if rows is not None else None,
        )  # fmt: skip
        if free and key in self.prices.parameters:
            return self.prices.parameters[key]
        choices: Sequence[ParameterChoice] = parameter_choices(
            value.shape, self.sizes, scattered=scatters, rows_dim=rows.dim if rows is not None else None
        )
        if constraints.roles is not None and not self._is_pinned(info.name, value.shape):
            choices = constraints.roles.parameter(dim_origins(self.graph, index), choices)
        choices = tuple(constraints.parameter(info.name, choices, self.sizes))
        found = parameter_prices(
            self.prices, choices, value.bytes, info.optimizer_bytes, parameters=len(self.parameters), central=central,
            exposure=exposure, scattering=scattering,
        )  # fmt: skip
        if free:
            self.prices.parameters[key] = found
        return found

    def _is_pinned(self, name: str, shape: Sequence[int]) -> bool:
        return self._constraints.layout(name, len(shape), self.sizes) is not None

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

    def forward_runs(self, operator: Operator) -> int:
        """How often an operator runs for one backward pass: twice where it is rematerialised."""
        return forward_runs(self.graph, operator)

    def forward_runs_of(self, value: int, operator: Operator) -> int:
        """How often a conversion of `value` made for (or right after) `operator` runs forward."""
        again = is_read_again(
            self.graph, value, operator, one_program=self.is_one_program,
            in_line=barriers_hold(self.prices.device.compiler),
        )  # fmt: skip
        return 2 if again else forward_runs_of(self.graph, value, operator)

    def _add_operators(self) -> None:
        graph, m, prices = self.graph, self.microbatches, self.operator_prices
        roles = self._constraints.roles
        numbers = signatures(graph) if roles is None else signatures_with_origins(graph)
        cache = self.prices.operators.setdefault(None if roles is None else roles.key, {})
        for operator in self._node_merging.operators:
            signature = numbers[operator.index]
            if signature not in cache:
                of_parameters = self._is_of_parameters(operator)
                choices = operator_choices(graph, operator, self.sizes, of_parameters=of_parameters)
                if roles is not None:
                    origins = operator_origins(graph)[operator.index]
                    choices = roles.operator(operator, origins, choices, of_parameters=of_parameters)
                cache[signature] = self.prices.of_operator(graph, operator, choices, self.of_parameters)
            prices[operator.index] = cache[signature]
        for operator in self._node_merging.operators:
            index = operator.index
            known = prices[index]
            seconds = known.seconds(self.forward_runs(operator), m * operator.repeats)
            node = self._node_of_operand(operator)
            if node is None:
                node = self._node(known.choices, seconds)
            else:
                self._seconds[node] = self._seconds[node] + seconds
            self.operator_node[index] = node
            for value, row in zip(operator.results, known.results, strict=True):
                if value is not None:
                    self._defines[value] = (node, row)
                    if value in self._node_merging.shared:
                        self._add_shared(self._node_merging.shared[value])

    def _node_of_operand(self, operator: Operator) -> int | None:
        """The node that an operator is merged into: each of its choices is one of the operator's; None for none."""
        merged_into = self._node_merging.merged_into.get(operator.index)
        value = operator.operands[merged_into.position] if merged_into is not None else None
        if merged_into is None or value is None or value not in self._defines:
            return None  # or a loop carries it, and its maker comes later
        node, row = self._defines[value]
        return node if self._is_merged(operator.index, merged_into.position, row) else None

    def _is_merged(self, index: int, at: int, row: SpecRow) -> bool:
        """Whether an operator is merged into the node of an operand with these specs."""
        merged_into = self._node_merging.merged_into.get(index)
        if merged_into is None or merged_into.position != at:
            return False
        return row is self.operator_prices[index].operands[at] and row.distinct  # rows that are equal are one object

    def _is_of_parameters(self, operator: Operator) -> bool:
        return all(v in self.of_parameters for v in operator.results if v is not None)

    def _add_shared(self, shared: Shared) -> None:
        """Add the node of a value that is resharded once for its readers, unless they are merged into its maker's."""
        index = shared.value
        producer, specs = self._defines[index]
        others = sum(not self._is_merged(user, at, specs) for user, at in shared.users)
        made = self._node_merging.merged_into.get(shared.maker.index)
        if others <= 1 and made is not None and made.whole:
            if shared.kept:
                self._bytes[producer] += self._kept_bytes(index, specs)
            return
        choices = self.prices.shared(specs, tuple(self.operator_prices[user].operands[at] for user, at in shared.users))
        node = self._node(choices, np.zeros(len(choices)))
        self.shared_node[index] = node
        times = self.trips(shared.maker, index)
        table = self._conversions(index, specs, choices, self.forward_runs_of(index, shared.maker), times)
        readers = [self.graph.operators[user] for user, _ in shared.users]
        self._connect(producer, node, self._gathered_in_loops(index, readers, specs, choices, table))
        self.moves.append(Move(producer, node, index, times, specs, choices))
        self._defines[index] = (node, choices)
        if shared.kept:
            self._bytes[node] += self._kept_bytes(index, choices)

    def trips(self, operator: Operator, value: int) -> int:
        """As `trips_of`."""
        return trips_of(operator, value)

    def _kept_bytes(self, index: int, specs: SpecRow) -> np.ndarray:
        times = self.trips(self.graph.operators[self.graph.producer[index][0]], index)
        if self.is_one_program:
            times *= kept_itemsize(self.graph, index, self.prices.device.compiler) / self.graph.values[index].itemsize
        return times * self.local_bytes(index, specs)

    def local_bytes(self, index: int, specs: SpecRow) -> np.ndarray:
        """Bytes of a value on one device, by how it is split."""
        return self.prices.held_bytes(self.graph.values[index], specs)

    def _conversions(self, index: int, sources: SpecRow, targets: SpecRow, runs: int, times: float) -> np.ndarray:
        """So many conversions of a value in each microbatch of a step, as a table that is not to be changed."""
        value = self.graph.values[index]
        return self.prices.conversion_table(
            sources, targets, value.bytes, forward_runs=runs, differentiated=value.differentiated,
            times=self.microbatches * times, exposure=self.prices.exposure(self.graph, index),
        )  # fmt: skip

    def _gathered_in_loops(
        self, index: int, readers: Sequence[Operator], sources: SpecRow, targets: SpecRow, table: np.ndarray
    ) -> np.ndarray:
        """A table of conversions without those that gather the rows of parameters before the loop that reads them: the
        memory of all trips' rows is not in the model. They are gathered trip by trip, or once a step where a
        parameter's storage and use differ."""
        if index not in self.of_parameters or not any(reads_rows(self.graph, reader) for reader in readers):
            return table
        return np.where(self.prices.shards(sources)[:, None] > self.prices.shards(targets), np.inf, table)

    def _connect(self, u: int, v: int, table: np.ndarray) -> None:
        """Add what a pair of choices costs; the table is not to be changed any more."""
        if u == v:
            self._seconds[u] = self._seconds[u] + np.diag(table)
        elif u < v:
            self._edges[u, v] = self._edges[u, v] + table if (u, v) in self._edges else table
        else:
            self._connect(v, u, self._turned.setdefault(id(table), table.T))

    def _add_operands(self) -> None:
        for operator, reads in zip(self._node_merging.operators, self._node_merging.reads, strict=True):
            node, operands = self.operator_node[operator.index], self.operator_prices[operator.index].operands
            for read in reads:
                index, times = read.value, read.times
                source, specs = self._defines[index]
                targets = operands[read.position]
                if source != node or specs is not targets:  # else it follows what makes the value
                    runs = self.forward_runs_of(index, operator)
                    often = 1 / self.microbatches if read.waits and self.is_one_program else times
                    table = self._conversions(index, specs, targets, runs, often)
                    self._connect(source, node, self._gathered_in_loops(index, (operator,), specs, targets, table))
                    self.moves.append(Move(source, node, index, often, specs, targets))
                if read.holds == "read":
                    self._bytes[node] += self._kept_bytes(index, targets)
                elif read.holds == "gathered":
                    self._bytes[node] += self.was_gathered(targets) * self._kept_bytes(index, targets)
                elif read.holds == "made":
                    self._bytes[source] += self._kept_bytes(index, specs)

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
                self._connect(node, target, self._conversions(index, specs, wanted, 1, 1 / self.microbatches))
                self.moves.append(Move(node, target, index, 1, specs, wanted))
                continue
            whole = SpecRow(Spec(spec.dims) for spec in specs)
            last = self.is_one_program and not self.graph.values[index].shape
            often = 1 / self.microbatches if last else 1
            self.moves.append(Move(node, node, index, often, specs, whole))
            if whole is not specs:
                self._connect(node, node, self._conversions(index, specs, whole, 1, often))

    # Solving

    def operator_choices(self, choices: Sequence[int]) -> tuple[OperatorChoice | None, ...]:
        """The choice of every operator, None for what depends on no input, for choices of all nodes."""
        nodes, known = self.operator_node, self.operator_prices
        return tuple(
            known[index].choices[choices[nodes[index]]] if index in nodes else None
            for index in range(len(self.graph.operators))
        )

    def _memory(self) -> tuple[np.ndarray, ...]:
        """Bytes on one device, by the choice of each node."""
        return tuple(size + self._input_bytes.get(node, 0.0) for node, size in enumerate(self._bytes))

    def problem(self, memory_limit_bytes: float) -> Problem:
        """The problem as numbers. Edges that are alike share their table."""
        return Problem.unchecked(
            costs=tuple(self._seconds), edges=dict(sorted(self._edges.items())), memory=self._memory(),
            memory_limit=memory_limit_bytes,
        )  # fmt: skip

    def solve(
        self, memory_limit_bytes: float, *, gap: float = 0.0, time_limit_seconds: float = 60.0,
        known: tuple[int, ...] | None = None,
    ) -> IntraOpSolution:  # fmt: skip
        """The best choice for every node within the memory limit; arguments as of `solve.solve`.

        Raises:
          solve.Infeasible: if no choice fits.
        """
        problem = self.problem(memory_limit_bytes)
        return self.of(solve(problem, gap=gap, time_limit_seconds=time_limit_seconds, known=known))

    def of(self, solution: Solution) -> IntraOpSolution:
        """A solution of the numbers as choices of layouts."""
        graph = self.graph
        picked = [row[c] for row, c in zip(self.choices, solution.choices, strict=True)]
        inputs = [picked[self.input_node[value]] for value in graph.inputs]
        return IntraOpSolution(
            operators=self.operator_choices(solution.choices),
            resharded_once={value: picked[node] for value, node in self.shared_node.items()},
            parameters=tuple(inputs[position] for position in graph.parameters),
            inputs=tuple(one.use if isinstance(one, ParameterChoice) else one for one in inputs),
            solution=solution,
        )

"""The intra-operator problem of one stage, and what its solution costs, forward and backward apart.

A stage differs from a whole program in its memory: what it keeps for the backward pass, and what it receives, it keeps
for every microbatch *in flight*, while parameters, gradients, optimizer state and the batch's inputs are there once.
And the stage search needs the two passes apart, since a pipeline's transfers and memory lie between them (`passes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from ..cluster import Device, LogicalMesh
from ..cost.compute import elementwise_seconds
from ..program.cut import Cut
from ..program.graph import Graph
from ..program.residuals import kept_inputs
from ..solve import Problem, Solution
from ..solve.flat import FlatNodes
from ..solve.improve import improve
from .choices import ParameterChoice
from .intra_op import IntraOpProblem, IntraOpSolution, ParameterInfo
from .passes import Passes
from .pins import Pins
from .priced import FEW_NODES, Priced, PricedProblem
from .wiring import reads_gathered
from .workspace import AS_BAD, Moment, Workspace

# Prices of memory to begin with, in units of a stage's seconds over the limit; and how often they are drawn closer.
_FIRST_PRICES = (0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 10.0, 100.0)
_ROUNDS_OF_PRICES = 3

# Where a forest leaves more than this open, relative, another one is tried; and then elimination, if there are few
# nodes, as where a scan runs over the layers.
_CLOSE = 1e-3

# For what is left open where layouts that fit are known: seldom is it what the best plan is made of. Of gpt3-15b on 32
# V100 (`benchmarks/planning_time.py --tight`) MILP closed nothing in twenty seconds, twice, and no time was left for
# plans that are an eighth faster.
_SECONDS_FOR_THE_REST = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """What a solved stage takes.

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
    """What no layout of a stage is below, on one device.

    Args:
      constant: throughout.
      workspace: while its backward pass runs.
      kept: for each microbatch in flight.
      received: of that, what is sent to it.
    """

    constant: float
    workspace: float
    kept: float
    received: float

    def held(self, in_flight: int) -> float:
        """With so many microbatches in flight."""
        return self.constant + self.workspace + in_flight * self.kept


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
      workspace: what its backward pass makes beside what is kept; None for nothing.
    """

    # Loops keep it.
    gathers_again = True
    # Ranks hand on what each microbatch makes.
    sums_numbers_last = False

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
        workspace: Workspace | None = None,
    ) -> None:
        dims = [None] * len(cut.parameters) + [
            split_dims[i] if microbatches > 1 and i < len(split_dims) else None for i in cut.program_inputs
        ]
        super().__init__(
            graph, mesh, device, parameters=parameters, microbatches=microbatches, pins=pins, carried=0,
            split_dims=dims,
        )  # fmt: skip
        self.in_flight = 1
        self._within: dict[tuple[float, int, float], tuple[IntraOpSolution | None, float]] = {}
        self._as_part: dict[tuple[int, ...], tuple[StageSeconds, tuple[float, float]]] = {}
        self._received = graph.inputs[len(cut.parameters) + len(cut.program_inputs) :]
        constant = {node for value, node in self.input_node.items() if value not in self._received}
        self._workspace = self._workspace_by_node(workspace)
        # In a longer range its moments may count less beside those of others, and what it received it has itself.
        self._least_workspace = AS_BAD * _least(self._workspace)
        for value in self._received if workspace is not None else ():
            if graph.values[value].differentiated:  # its cotangent, on its way back
                node, specs = self._defines[value]
                self._workspace[node] = self._workspace[node] + self.local_bytes(value, specs)
        nothing = [np.zeros(len(size)) for size in self._bytes]
        self._throughout = [self._input_bytes[n] if n in constant else nothing[n] for n in range(len(nothing))]
        self._constant_bytes = [a + b for a, b in zip(self._throughout, self._workspace, strict=True)]
        stays = kept_inputs(graph)
        self._kept_by_node = [*self._bytes]
        self._received_bytes = []
        for value in self._received:
            # The whole program's inputs are there for all microbatches; what is received, for those in flight, unless
            # only the forward pass reads it: a loop keeps its carry itself.
            node = self.input_node[value]
            self._received_bytes.append(self._input_bytes[node] / microbatches * (value in stays))
            self._kept_by_node[node] = self._kept_by_node[node] + self._received_bytes[-1]

    def _workspace_by_node(self, workspace: Workspace | None) -> list[np.ndarray]:
        """Bytes on one device, by the choice of each node."""
        rows = [np.zeros(len(row)) for row in self._bytes]
        if workspace is None:
            return rows
        again: Counter[int] = Counter()
        for moment in workspace.moments:
            again.update(moment.again)
            self._hold_around(rows, moment, 1 / len(workspace.moments))
        for value in sorted(again.keys() & self._defines.keys()):
            self._hold(rows, value, again[value] / len(workspace.moments))
        if workspace.weight is not None:
            node = self.input_node[workspace.weight]
            rows[node] += workspace.gradient_bytes / self.prices.shards(self.parameter_prices[node].uses)
        return rows

    def _hold(self, rows: list[np.ndarray], value: int, share: float) -> None:
        """Add a value that is computed again, as its readers have it."""
        graph, (node, specs) = self.graph, self._defines[value]
        users = graph.consumers.get(value, ())
        readers = [(self.operator_node[o], o, at) for o, at in users if o in self.operator_node]
        if shared := (value in self._wiring.shared or not readers):
            rows[node] += share * self.local_bytes(value, specs)
            readers = [one for one in readers if reads_gathered(graph, graph.operators[one[1]], value)]
        for reader, user, at in readers[:1]:
            wanted = self.operator_prices[user].operands[at]
            held = share * self.local_bytes(value, wanted)
            rows[reader] += self.was_gathered(wanted) * held if shared else held

    def _hold_around(self, rows: list[np.ndarray], moment: Moment, share: float) -> None:
        """Add what is there around an operator, as its algorithms split it."""
        if moment.operator not in self.operator_node:
            return
        operator, node = self.graph.operators[moment.operator], self.operator_node[moment.operator]
        known = self.operator_prices[moment.operator]
        for value, times in moment.around.items():
            made = value in operator.results
            at = (operator.results if made else operator.operands).index(value)
            specs = (known.results if made else known.operands)[at]
            rows[node] += share * times * self.local_bytes(value, specs)

    def _memory(self) -> tuple[np.ndarray, ...]:
        """With `in_flight` microbatches kept."""
        return tuple(c + self.in_flight * k for c, k in zip(self._constant_bytes, self._kept_by_node, strict=True))

    @cached_property
    def _free(self) -> PricedProblem:
        """The problem without a limit, made ready for prices."""
        plain = Problem.unchecked(costs=tuple(self._seconds), edges=dict(self._edges))
        return PricedProblem(plain, constant=self._constant_bytes, kept=self._kept_by_node)

    def priced(self, prices: Sequence[tuple[float, float]], *, gap: float, time_limit_seconds: float) -> list[Priced]:
        """The best choice of each node where memory has no limit but a price: `PricedProblem.best`.

        Args:
          prices: in seconds per byte, each with the microbatches in flight.
          gap: at which to stop, relative to the seconds without what bytes cost.
          time_limit_seconds: for each price, where the graph is too wide to be solved exactly.

        Raises:
          solve.Infeasible: if there is no choice of layouts at all.
        """
        return self._free.best(prices, gap=gap, time_limit_seconds=time_limit_seconds)

    @cached_property
    def fastest(self) -> Priced:
        """The fastest layouts, whatever their memory, as far as forests find them.

        Raises:
          solve.Infeasible: if there is no choice of layouts at all.
        """
        return self._free.relaxed([(0.0, 1)], gap=_CLOSE)[0]

    def needs_at_best(self, in_flight: int) -> float:
        """Bytes on a device, workspace included, of the fastest layouts.

        Args:
          in_flight: microbatches kept.

        Raises:
          solve.Infeasible: if there is no choice of layouts at all.
        """
        free = self.fastest
        return self._held(free.choices, in_flight) if free.choices is not None else 0.0

    def within(self, limit_bytes: float, *, gap: float) -> IntraOpSolution | None:
        """The best solution within a limit of memory that forests, and elimination if there are few nodes, find at
        prices of memory (Everett, 1963), with `in_flight` microbatches kept, and what they prove: at every price what
        is best there bounds all that fits from below.

        Args:
          limit_bytes: on a device, workspace included.
          gap: relative, between the best found and the best bound, at which to stop.

        Returns:
          None where nothing is found, which says nothing of whether there is a solution.

        Raises:
          solve.Infeasible: if there is no choice of layouts at all.
        """
        return self._known_within(limit_bytes, gap)[0]

    def proven(self, limit_bytes: float, *, gap: float, time_limit_seconds: float) -> IntraOpSolution:
        """The best solution within a limit of memory, solved until no more than a gap is left open or the time is over;
        with `in_flight` microbatches kept.

        Args:
          limit_bytes: on a device, workspace included.
          gap: relative.
          time_limit_seconds: for what `within` leaves open.

        Raises:
          solve.Infeasible: if no choice fits.
          solve.Unsolved: if none was found in time.
        """
        found, price = self._known_within(limit_bytes, gap)
        if found is None:
            return self.solve(limit_bytes, gap=gap, time_limit_seconds=time_limit_seconds)
        if found.solution.proven:
            return found
        if len(self.choices) > FEW_NODES:
            paid = price * limit_bytes
            known = Priced(choices=found.solution.choices, bound=found.solution.lower_bound + paid)
            passed = self._free.passed((price, self.in_flight), known)
            # What is better with what its bytes cost there may be too large, or slower.
            tried = [found.solution.choices, *([passed.choices] if passed.choices is not None else [])]
            fitting = [one for one in tried if self._held(one, self.in_flight) <= limit_bytes]
            found = self._bounded(min(fitting, key=self._free.seconds), passed.bound - paid, gap)
            if found.solution.proven:
                return found
        choices, bound = found.solution.choices, found.solution.lower_bound
        seconds = min(time_limit_seconds, _SECONDS_FOR_THE_REST)
        solved = self.solve(limit_bytes, gap=gap, time_limit_seconds=seconds, known=choices)
        # What prices prove holds for whatever was found then.
        proven = min(max(solved.solution.lower_bound, bound), solved.solution.objective)
        return replace(solved, solution=replace(solved.solution, lower_bound=proven))

    def _known_within(self, limit_bytes: float, gap: float) -> tuple[IntraOpSolution | None, float]:
        """As `within`, and the price that bounds it most."""
        if limit_bytes <= 0:
            return None, 0.0
        key = limit_bytes, self.in_flight, gap
        if key not in self._within:
            self._within[key] = self._by_prices(limit_bytes, gap)
        return self._within[key]

    def _by_prices(self, limit_bytes: float, gap: float) -> tuple[IntraOpSolution | None, float]:
        ready, in_flight = self._free, self.in_flight
        few = len(self.choices) <= FEW_NODES
        free = self.fastest
        unit = max(free.bound, 1e-12) / limit_bytes
        cheap, dear = 0.0, inf
        best: tuple[float, tuple[int, ...]] | None = None
        over, bound, at_price = free.choices, free.bound, 0.0
        if over is not None and self._held(over, in_flight) <= limit_bytes:
            over, best = None, (ready.seconds(over), over)
        prices = unit * np.array(_FIRST_PRICES)
        for _ in range(_ROUNDS_OF_PRICES):
            at = [(price, in_flight) for price in prices.tolist()]
            found = ready.relaxed(at, gap=_CLOSE)
            if few and any(one.choices is None or one.share < 1 - _CLOSE for one in found) and ready.is_exact:
                found = ready.best(at, gap=_CLOSE)
            for price, one in zip(prices.tolist(), found, strict=True):
                if one.bound - price * limit_bytes > bound:
                    bound, at_price = one.bound - price * limit_bytes, price
                if one.choices is None:
                    continue
                if self._held(one.choices, in_flight) > limit_bytes:
                    cheap, over = (price, one.choices) if price >= cheap else (cheap, over)
                else:
                    dear = min(dear, price)
                    seconds = ready.seconds(one.choices)
                    best = min(best, (seconds, one.choices)) if best is not None else (seconds, one.choices)
            if best is None or not cheap < dear or best[0] - bound <= gap * abs(best[0]):
                break
            prices = np.linspace(cheap, dear, len(_FIRST_PRICES) + 2)[1:-1]
        if best is None:
            return None, at_price
        if best[0] - bound > _CLOSE * abs(best[0]):
            # Prices alone miss what uses the last bytes of memory.
            choices = improve(self.problem(limit_bytes), heavy=over, light=[best[1]])
            best = min(best, (ready.seconds(choices), choices))
        return self._bounded(best[1], bound, gap), at_price

    def _bounded(self, choices: tuple[int, ...], bound: float, gap: float) -> IntraOpSolution:
        """Choices as a solution, where no other takes less than so many seconds."""
        seconds = self._free.seconds(choices)
        share = min(max(bound / seconds, 0.0), 1.0) if seconds > 0 else 1.0
        return self.chosen(choices, share, proven=share >= 1 - gap)

    def _held(self, choices: tuple[int, ...], in_flight: int) -> float:
        constant, workspace, kept = self._flat_bytes.sum(np.array(choices, dtype=int)).tolist()
        return constant + workspace + in_flight * kept

    def chosen(self, choices: tuple[int, ...], share: float = 1.0, *, proven: bool = True) -> IntraOpSolution:
        """These choices as a solution, of whose seconds no other takes less than this share."""
        objective = self._free.seconds(choices)
        solution = Solution(
            choices=choices, objective=objective, method="prices", proven=proven, seconds=0.0,
            lower_bound=share * objective,
            memory=self._held(choices, self.in_flight),
        )  # fmt: skip
        graph = self.graph
        picked = [row[c] for row, c in zip(self.choices, choices, strict=True)]
        inputs = [picked[self.input_node[value]] for value in graph.inputs]
        return IntraOpSolution(
            operators=self.operator_choices(choices),
            settled={value: picked[node] for value, node in self.shared_node.items()},
            parameters=tuple(inputs[position] for position in graph.parameters),
            inputs=tuple(one.use if isinstance(one, ParameterChoice) else one for one in inputs),
            solution=solution,
        )

    @cached_property
    def least_bytes(self) -> LeastBytes:
        """No choice needs less on a device."""
        return LeastBytes(
            constant=_least(self._throughout), workspace=self._least_workspace, kept=_least(self._kept_by_node),
            received=_least(self._received_bytes),
        )  # fmt: skip

    @cached_property
    def _passes(self) -> Passes:
        return Passes(self)

    @cached_property
    def _flat_bytes(self) -> FlatNodes:
        """Bytes throughout, of the workspace and for each microbatch in flight."""
        return FlatNodes(self._throughout, self._workspace, self._kept_by_node)

    def seconds(self, choices: tuple[int, ...], objective: float | None = None) -> StageSeconds:
        """What choices of layouts take.

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

    def as_part(self, choices: tuple[int, ...]) -> tuple[StageSeconds, tuple[float, float]]:
        """What choices of layouts take, and what they save as a part of a longer range (`boundary_seconds`): found out
        once, since many prices of memory have the same ones.

        Args:
          choices: of all nodes.
        """
        if choices not in self._as_part:
            self._as_part[choices] = self.seconds(choices), self.boundary_seconds(choices)
        return self._as_part[choices]

    def boundary_seconds(self, choices: tuple[int, ...]) -> tuple[float, float]:
        """What a range of equations saves when it is no stage of its own but part of a larger one: the writing of what
        it receives, a microbatch, and the fixed cost of the one collective that sums its gradients, a step.

        Args:
          choices: of all nodes.
        """
        written = 0.0
        for value in self._received:
            node, row = self._defines[value]
            written += self.graph.values[value].bytes / self.prices.shards(row).item(choices[node])
        fixed = sum(one.fixed_seconds.item(choices[node]) for node, one in self.parameter_prices.items())
        return elementwise_seconds(written, self.prices.device), fixed


def _least(rows: Sequence[np.ndarray]) -> float:
    """The least numbers of rows together."""
    if not rows:
        return 0.0
    flat = FlatNodes(rows)
    return float(np.minimum.reduceat(flat.numbers, flat.starts).sum())

"""Whole small programs: every assignment of every node enumerated and priced from the definitions, against the search.

The price here shares no code with `search`: it walks the operators of one assignment, asks `sharding.convert` for every
move and `cost.collective` for its seconds, and adds them up. Only the choices each node has are taken from the problem.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.cluster import Cluster, Device, Host, Link
from meshwright.cost.collective import collective_seconds
from meshwright.errors import MemoryExceeded
from meshwright.program.graph import Operator
from meshwright.program.parameter_values import values_of_parameters
from meshwright.program.residuals import is_fusible, kept_in_one_program, needed_again, read_by_backward
from meshwright.program.staged import whole_program
from meshwright.program.trace import trace_program
from meshwright.search.intra import problem as intra_op
from meshwright.search.intra.limited import LimitedProblem
from meshwright.search.intra.node_merging import node_merging_of_one_program
from meshwright.search.intra.problem import IntraOpProblem, ParameterInfo
from meshwright.search.intra.workspace import workspace_of
from meshwright.search.pipelines.driver import StageSearch
from meshwright.search.pipelines.request import StageRequest
from meshwright.search.restrictions.constraints import Constraints
from meshwright.search.stages.reserve import MemoryReserve
from meshwright.sharding import Spec, convert
from meshwright.solve import solve

FLOPS_PER_SECOND = 1e6
MEMORY_BYTES_PER_SECOND = 1e6
LAUNCH_SECONDS = 1e-5
KERNEL_SECONDS = 3e-6
MEMORY_OVERLAP = 0.6
# Of an unknown device: what is stored is written and read, what is fused leaves a tenth of that.
PASSES, FUSED_SHARE = 2.0, 0.1
OPTIMIZER_SHARE = 2.0


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def descend(loss: Callable[..., Any], params: Any, *args: Any) -> tuple[Any, Any]:
    value, grads = mw.value_and_grad(loss)(params, *args)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def two_matmuls(params: Any, x: Any) -> Any:
    return descend(lambda p: jnp.sum(jnp.tanh(x @ p["a"]) @ p["b"]), params)


def shared_value(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        h = x @ p["a"]
        return jnp.sum(jnp.tanh(h) * (h @ p["b"]))

    return descend(loss, params)


def mlp(params: Any, batch: Any) -> Any:
    x, y = batch
    return descend(lambda p: jnp.sum((jax.nn.relu(x @ p["w"] + p["b"]) - y) ** 2), params)


def mean_and_deviation(params: Any, x: Any) -> Any:
    """A number that is linear in sums over the batch beside one that is not."""

    def loss(p: Any) -> Any:
        y = jnp.tanh(x @ p["a"]) @ p["b"]
        return jnp.mean(y) / 2 - 0.1 * jnp.sqrt(jnp.sum(y))

    return descend(loss, params)


def one_matmul(params: Any, x: Any) -> Any:
    return descend(lambda p: jnp.sum(jnp.tanh(x @ p)), params)


def rematerialised(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        hidden = jax.checkpoint(lambda h: jnp.sin(h @ p["a"]) @ p["b"])(x)
        return jnp.sum(jnp.exp(hidden))

    return descend(loss, params)


def scanned(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        last, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)
        return jnp.sum(last)

    return descend(loss, params)


def attention(x: Any, w: Any) -> Any:
    return jnp.exp((x @ w) @ x.T) @ x


def power_iteration(vectors: Any, matrix: Any) -> Any:
    moved = matrix @ vectors
    return moved / jnp.sum(moved * moved), jnp.max(moved)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, a mesh, and hardware on which its best plan is not the trivial one."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: tuple[int, ...] = (2,)
    microbatches: int = 1
    reduction: str | None = None
    bandwidth_bytes_per_second: float = 1e6
    pins: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


CASES = {
    "two matmuls, slow network": Case(
        step=two_matmuls, args=({"a": array(4, 6), "b": array(6, 3)}, array(8, 4)), bandwidth_bytes_per_second=3e5
    ),
    "two matmuls, fast network": Case(
        step=two_matmuls, args=({"a": array(4, 6), "b": array(6, 3)}, array(8, 4)), bandwidth_bytes_per_second=1e8
    ),
    "two matmuls in microbatches": Case(
        step=two_matmuls, args=({"a": array(4, 6), "b": array(6, 3)}, array(8, 4)), microbatches=2,
    ),
    "a mean and a deviation in microbatches": Case(
        step=mean_and_deviation, args=({"a": array(4, 6), "b": array(6, 3)}, array(8, 4)), microbatches=4,
        bandwidth_bytes_per_second=1e5, reduction="mean",
    ),
    "a shared value": Case(step=shared_value, args=({"a": array(3, 6), "b": array(6, 6)}, array(8, 3))),
    "mlp": Case(
        step=mlp, args=({"w": array(3, 4), "b": array(4)}, (array(8, 3), array(8, 4))),
        pins={"args?0???w??": ((), ("x",)), "args?1??1?": (("x",), ())},
    ),
    "one matmul on two axes": Case(step=one_matmul, args=(array(3, 4), array(4, 3)), mesh=(2, 2)),
    "a parameter split on two dims": Case(
        step=one_matmul, args=(array(2, 6), array(4, 2)), mesh=(2, 2), pins={"args?1?": (("x",), ())}
    ),
    "rematerialised": Case(step=rematerialised, args=({"a": array(4, 6), "b": array(6, 3)}, array(8, 4))),
    "scanned layers": Case(step=scanned, args=(array(3, 4, 4), array(6, 4))),
    "attention": Case(step=attention, args=(array(8, 4), array(4, 4))),
    "a state carried to the next step": Case(step=power_iteration, args=(array(6, 4), array(6, 6))),
}  # fmt: skip


def cluster_of(case: Case) -> Cluster:
    device = Device(
        kind="toy", peak_flops={"float32": FLOPS_PER_SECOND}, efficiency=1.0,
        kernel_launch_seconds=KERNEL_SECONDS, memory_overlap=MEMORY_OVERLAP, memory_bytes=1e9,
        usable_memory_fraction=1.0, memory_bandwidth_bytes_per_second=MEMORY_BYTES_PER_SECOND,
    )  # fmt: skip
    link = Link(
        bandwidth_bytes_per_second=case.bandwidth_bytes_per_second, latency_seconds=1e-6, launch_seconds=LAUNCH_SECONDS
    )
    return Cluster(name="toy", hosts=(Host(device=device, devices=math.prod(case.mesh), link=link, nics=1, nic=link),))


class Priced:
    """One program on one mesh, priced assignment by assignment."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.program = program = trace_program(
            case.step, case.args, microbatches=case.microbatches, reduction=case.reduction
        )
        self.graph = graph = program.graph
        self.cluster = cluster_of(case)
        self.mesh = self.cluster.logical_mesh(case.mesh)
        self.sizes = dict(zip(self.mesh.axis_names, self.mesh.shape, strict=True))
        self.carried = 0 if program.marked else program.state_inputs
        self.parameters = [
            ParameterInfo(name=value.name, optimizer_bytes=OPTIMIZER_SHARE * value.bytes)
            for value in (graph.values[graph.inputs[p]] for p in graph.parameters)
        ]

        def problem(kind: type[IntraOpProblem] = IntraOpProblem, **more: Any) -> IntraOpProblem:
            return kind(
                graph, self.mesh, self.cluster.device, parameters=self.parameters, microbatches=case.microbatches,
                constraints=Constraints(layouts=case.pins), carried=self.carried, **more,
            )  # fmt: skip

        self.chained = problem()
        # Every operator by itself: what follows another one may be laid out in any way.
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                intra_op,
                "node_merging_of_one_program",
                lambda *args, **more: replace(node_merging_of_one_program(*args, **more), merged_into={}),
            )
            self.problem = problem()
            # As the search counts memory: with what the backward pass makes beside what is kept.
            workspace = workspace_of(
                graph, microbatches=case.microbatches, is_one_program=True, platform=self.cluster.device.compiler
            )
            self.limited = problem(LimitedProblem, workspace=workspace)
        self.kept = kept_in_one_program(graph, self.cluster.device.compiler) - values_of_parameters(graph)
        self.again, self.read_again = needed_again(graph)
        self.move_seconds = lru_cache(maxsize=None)(self._move_seconds)
        self.work_seconds = lru_cache(maxsize=None)(self._work_seconds)
        self.parameter_seconds = lru_cache(maxsize=None)(self._parameter_seconds)
        self.shard_bytes = lru_cache(maxsize=None)(self._shard_bytes)
        self.is_summed_last = lru_cache(maxsize=None)(self._is_summed_last)
        self.is_kept_gathered = lru_cache(maxsize=None)(self._is_kept_gathered)
        self.is_gathered_again = lru_cache(maxsize=None)(self._is_gathered_again)
        self.of_parameters = values_of_parameters(graph)
        self.shared = node_merging_of_one_program(graph, self.cluster.device.compiler).shared

    def search(self) -> StageSearch:
        request = StageRequest(
            programs=[whole_program(self.program)], parameters=self.parameters, cluster=self.cluster,
            mesh=[(self.mesh.axis_names, self.mesh.shape)], constraints=Constraints(layouts=self.case.pins),
            remat="none", alone=True, gap=0.0,
        )  # fmt: skip
        return StageSearch(request)

    def leaving(self, limit_bytes: float) -> Callable[[int], MemoryReserve]:
        """What is reserved where so many bytes may be counted on a device."""
        usable = self.cluster.device.usable_memory_bytes
        # Which rounds to less than a millionth of a byte.
        return lambda count: MemoryReserve(final=usable - min(limit_bytes + 1e-6, usable))

    def assignments(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(len(choices)) for choices in self.problem.choices))

    def collective(self, kind: str, size_bytes: float, axes: Sequence[str]) -> float:
        return collective_seconds(kind, size_bytes, [self.mesh.axis(a) for a in axes])

    def _move_seconds(self, value: int, source: Spec, target: Spec, runs: int) -> float:
        """Seconds of one value's way from spec to spec: `runs` times forward, once back if it has a cotangent."""
        array = self.graph.values[value]
        if not array.differentiated:
            source, target = source.without_broadcast(), target.without_broadcast()
        steps = convert(source, target)
        if steps is None:
            return math.inf
        total = 0.0
        for step in steps:
            size = array.bytes / math.prod(self.sizes[a] for a in step.still_split)
            total += runs * self.collective(step.forward, size, step.axes) if step.forward else 0.0
            total += self.collective(step.backward, size, step.axes) if step.backward and array.differentiated else 0.0
        return total

    def _shard_bytes(self, value: int, spec: Spec) -> float:
        return 4.0 * math.prod(spec.local_shape(self.graph.values[value].shape, self.sizes))

    def _work_seconds(self, index: int, choice: Any) -> float:
        """Seconds of one run of an operator, its collectives inside and its derivative included."""
        operator, algorithm = self.graph.operators[index], choice.algorithm
        if operator.is_link:
            return 0.0
        runs = 2 if index in self.again else 1
        written = self._bytes(operator.results, algorithm.results)
        if operator.name == "dot_general":
            left, right = operator.operands
            (out,) = operator.results
            # Here always contracted over the last dim of the left operand.
            flops = 2 * math.prod(self.graph.values[out].shape) * self.graph.values[left].shape[-1]
            split = math.prod(self.sizes[a] for axes in algorithm.axes for a in axes)
            products = runs + sum(self.graph.values[v].differentiated for v in (left, right)) * operator.differentiated
            touched = written + self._bytes(operator.operands, algorithm.operands)
            roofs = flops / split / FLOPS_PER_SECOND, touched / MEMORY_BYTES_PER_SECOND
            return products * (max(roofs) + (1 - MEMORY_OVERLAP) * min(roofs) + KERNEL_SECONDS)
        inside = 0.0
        if operator.name == "reduce_max":
            # Of all dims, here always.
            axes = algorithm.operands[0].sharded_axes
            inside = self.collective("all_reduce", written, axes) if axes else 0.0
        once = PASSES * written / MEMORY_BYTES_PER_SECOND
        once = once + KERNEL_SECONDS if self.is_stored(operator) else FUSED_SHARE * once
        return (runs + (1 if operator.differentiated else 0)) * once + inside

    def _bytes(self, values: Sequence[int | None], specs: Sequence[Spec]) -> float:
        return sum(self.shard_bytes(v, s) for v, s in zip(values, specs, strict=True) if v is not None)

    def is_stored(self, operator: Operator) -> bool:
        if all(math.prod(self.graph.values[v].shape) == 1 for v in operator.results if v is not None):
            return False
        readers = [other for other in self.graph.operators if set(other.operands) & set(operator.results)]
        return not is_fusible(operator) or not readers or not all(is_fusible(reader) for reader in readers)

    def _parameter_seconds(self, value: int, choice: Any) -> float:
        """Seconds a step for a parameter: its gradient to storage, the update there, the result back to use."""
        size = self.graph.values[value].bytes
        gradient = convert(Spec(choice.use.dims, partial=choice.use.broadcast), choice.storage)
        fetch = convert(choice.storage, Spec(choice.use.dims))
        assert gradient is not None
        assert fetch is not None
        # ZeRO-2 sums the gradient of each microbatch, ZeRO-1 once that of all.
        times = self.case.microbatches if choice.scattered else 1
        total = 0.0
        for step, count in (*((step, times) for step in gradient), *((step, 1) for step in fetch)):
            if step.forward is not None:
                buffer = size / math.prod(self.sizes[a] for a in step.still_split)
                seconds = count * self.collective(step.forward, buffer, step.axes)
                if step.forward == "all_reduce" and not choice.scattered:
                    # All parameters' sums run as one collective and share its fixed cost.
                    fixed = self.collective(step.forward, 1.0, step.axes)
                    seconds += fixed / len(self.parameters) - fixed
                total += seconds
        moved = (2 * OPTIMIZER_SHARE + 3) * self.shard_bytes(value, choice.storage)
        if self.case.microbatches > 1:
            summed = choice.storage if choice.scattered else choice.use
            moved += self.case.microbatches * 3 * self.shard_bytes(value, summed)
        return total + moved / MEMORY_BYTES_PER_SECOND

    def price(self, assignment: Sequence[int], problem: IntraOpProblem | None = None) -> tuple[float, float]:
        """Seconds of a step and bytes on a device."""
        problem = problem or self.problem
        graph, m = self.graph, self.case.microbatches
        operators = problem.operator_choices(assignment)
        picked = [choices[i] for choices, i in zip(problem.choices, assignment, strict=True)]
        seconds = size = 0.0
        have: dict[int, Spec] = {}
        for position, value in enumerate(graph.inputs):
            choice = picked[problem.input_node[value]]
            if position in graph.parameters:
                have[value] = choice.use
                seconds += self.parameter_seconds(value, choice)
                # The parameter, its gradient, its optimizer state.
                size += self.shard_bytes(value, choice.use)
                size += self.shard_bytes(value, choice.storage if choice.scattered else choice.use)
                size += OPTIMIZER_SHARE * self.shard_bytes(value, choice.storage)
            else:
                have[value] = choice
                # A device holds the whole batch, and it is written there once.
                size += m * self.shard_bytes(value, choice)
                seconds += m * self.shard_bytes(value, choice) / MEMORY_BYTES_PER_SECOND
        for index in problem.operator_node:
            for value, spec in zip(graph.operators[index].results, operators[index].algorithm.results, strict=True):
                if value is not None:
                    have[value] = spec
        shared = self.shared
        for value in self.kept & (shared.keys() - problem.shared_node.keys()):  # their readers follow
            maker = graph.operators[graph.producer[value][0]]
            size += maker.repeats * self.shard_bytes(value, have[value])
        for value, node in problem.shared_node.items():
            maker = graph.operators[graph.producer[value][0]]
            readers = [index for index, _ in graph.consumers[value]]
            again = any(self.is_gathered_again(index, value) for index in readers)
            runs = 2 if again or (maker.region is not None and value in self.read_again) else 1
            seconds += m * maker.repeats * self.move_seconds(value, have[value], picked[node], runs)
            have[value] = picked[node]
            if value in self.kept:
                size += maker.repeats * self.shard_bytes(value, picked[node])
        gathered: set[int] = set()
        for index in problem.operator_node:
            operator, algorithm = graph.operators[index], operators[index].algorithm
            seconds += m * operator.repeats * self.work_seconds(index, operators[index])
            for position, value in enumerate(operator.operands):
                if value is None or value not in have:
                    continue
                again = self.is_gathered_again(index, value)
                runs = 2 if again or (operator.region is not None and value in self.read_again) else 1
                target = algorithm.operands[position]
                often = 1 if self.is_summed_last(value) else m * operator.operand_repeats[position]
                seconds += often * self.move_seconds(value, have[value], target, runs)
                of_parameters = operator.name == "scan_slice" and value in self.of_parameters
                if of_parameters and have[value].shards(self.sizes) > target.shards(self.sizes):
                    seconds = math.inf  # rows of parameters are gathered in a loop, not before it
                if value in self.kept and value in graph.producer and value not in shared:
                    size += graph.operators[graph.producer[value][0]].repeats * self.shard_bytes(value, target)
                elif value not in gathered and self.is_kept_gathered(index, value):
                    gathered.add(value)
                    if target.shards(self.sizes) < math.prod(self.sizes.values()):
                        size += graph.operators[graph.producer[value][0]].repeats * self.shard_bytes(value, target)
        for position, value in enumerate(graph.outputs):
            if value is not None and value in have:
                carried = position < self.carried
                target = have[graph.inputs[position]] if carried else Spec(have[value].dims)
                often = 1 if not carried and self.is_summed_last(value) else m
                seconds += often * self.move_seconds(value, have[value], target, 1)
        return seconds, size

    def _is_summed_last(self, value: int) -> bool:
        """Whether a number is summed over devices once for all microbatches: if a result of the step is linear in it,
        and nothing else is made of it."""
        graph = self.graph
        readers = graph.consumers.get(value, ())
        if graph.values[value].shape or len(readers) > 1:
            return False
        if not readers:
            return value in graph.outputs
        ((index, at),) = readers
        operator = graph.operators[index]
        fixed = [v is None or graph.values[v].constant for v in operator.operands]
        scales = (operator.name == "mul" and fixed[1 - at]) or (operator.name == "div" and at == 0 and fixed[1])
        return (scales or operator.name in ("add", "sub", "neg")) and self.is_summed_last(operator.results[0])

    def _is_gathered_again(self, index: int, value: int) -> bool:
        """Whether an operator's gradients read a weight, which is gathered for them once more: not the one that they
        read first, as the last operator outside loops does."""

        def reads(operator: Operator) -> set[int]:
            return self.of_parameters & read_by_backward(self.graph, operator) if operator.region is None else set()

        graph, operator = self.graph, self.graph.operators[index]
        made = [v for v in operator.results if v is not None]
        if self.of_parameters.issuperset(made):  # rows, of which the gradients read one after the other
            return any(self.is_gathered_again(user, v) for v in made for user, _ in graph.consumers.get(v, ()))
        outside = [other for other in graph.operators if len(other.path) == 1 and reads(other)]
        first = reads(outside[-1]) if outside else set()
        return value in reads(operator) - first

    def _is_kept_gathered(self, index: int, value: int) -> bool:
        """Of what a product's gradients read and the program makes of data, the copy that was gathered for it."""
        operator, products = self.graph.operators[index], ("dot_general", "conv_general_dilated")
        return (
            operator.name in products and operator.region is None and value in self.graph.producer
            and value not in self.of_parameters and value in read_by_backward(self.graph, operator)
        )  # fmt: skip


@cache
def priced_case(name: str) -> Priced:
    return Priced(CASES[name])


@pytest.fixture(params=CASES)
def priced(request: pytest.FixtureRequest) -> Priced:
    return priced_case(request.param)


@pytest.mark.parametrize("chained", [False, True])
def test_the_problem_prices_assignments_by_the_definitions(priced: Priced, chained: bool) -> None:
    rng = np.random.default_rng(0)
    problem = priced.chained if chained else priced.problem
    numbers = problem.problem(math.inf)
    finite = 0
    for _ in range(400):
        assignment = tuple(int(rng.integers(len(choices))) for choices in problem.choices)
        seconds, size = priced.price(assignment, problem)
        assert numbers.objective(assignment) == pytest.approx(seconds, rel=1e-9)
        assert numbers.memory_of(assignment) == pytest.approx(size, rel=1e-9)
        finite += math.isfinite(seconds)
    assert finite >= 40


def test_operators_follow_others() -> None:
    """Else the least of all assignments says nothing of chains."""
    cases = [*map(priced_case, CASES)]
    assert sum(len(one.chained.choices) < len(one.problem.choices) for one in cases) >= 3


def test_the_search_finds_the_least_of_all_assignments(priced: Priced) -> None:
    counted = priced.limited.problem(math.inf).memory_of
    prices = np.array([(priced.price(one)[0], counted(one)) for one in priced.assignments()])
    seconds, memory = prices[np.isfinite(prices[:, 0])].T
    best = np.lexsort((memory, seconds))[0]
    # Thirds of moments, added in another order, differ in the last bit.
    least_memory = float(memory.min()) * (1 + 1e-15)
    limits = [math.inf, *(least_memory + share * (float(memory[best]) - least_memory) for share in (0.0, 0.4, 0.8))]
    search = priced.search()
    for limit in limits:
        expected = seconds[memory <= limit].min()
        plan = search.run(priced.leaving(limit)).plan
        assert plan.predicted.step_seconds == pytest.approx(expected, rel=1e-9), limit
        assert plan.predicted.optimality_gap <= 1e-9
        assert plan.stages[0].memory.total <= limit * (1 + 1e-9)
        chosen = priced.limited.solve(limit).solution.choices
        assert priced.price(chosen)[0] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(MemoryExceeded):
        search.run(priced.leaving(0.99 * least_memory))


def test_memory_decides_in_most_cases() -> None:
    """The limits above would prove nothing where the fastest plan is also the leanest."""
    bound = 0
    for name in CASES:
        priced = priced_case(name)
        fastest = priced.problem.solve(math.inf).solution
        least_memory = solve(priced.problem.problem(math.inf).of_memory()).objective
        bound += priced.problem.solve(least_memory).solution.objective > fastest.objective
    assert bound >= len(CASES) // 2

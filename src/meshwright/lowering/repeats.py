"""Runs of equations that a program repeats, such as the layers of an unrolled model, traced once.

JAX differentiates a program equation by equation, at half a millisecond to two for each. A run that stands in the
program several times with the same layouts is therefore evaluated inside one `jax.jit` function, whose trace,
derivative and transpose JAX remembers. In the traced step the run stands as a call, which compilers and the memory
model write in line before anything else. (JAX would write it in line itself under `inline=True`, but equations lose
their source lines by that.) Predicting the memory of 48 unrolled layers takes half the time.

Runs begin where fewer values cross than at any position around: at the residual stream of a transformer, between the
blocks of a convolutional network. Two runs are repeats of one another if their equations, source lines, algorithms and
settled values are equal, and they read and leave values in the same places. Values that a run reads are moved to the
layouts that it reads them in outside of it, and the layouts that it has moved a value to leave with the value, so that
readers share a collective as they do without runs.

Known limit: loops, branches, draws by position and numbers that are left as summands are not in runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax

from .._jax.jaxpr import Equation, Jaxpr, consts_of, is_dropped, is_literal, is_remat, open_jaxpr
from .._jax.pallas import has_kernel
from ..program.graph import Graph, Operator, Path
from ..program.rules import Rules, is_call
from ..sharding import Algorithm, Spec
from ..sharding.deferred_sums import makes_a_number
from .local_value import LocalValue

Env = dict[Any, LocalValue]

# A run begins where no position within so many equations has fewer values crossing. Blocks of models have more
# equations, and between two neighbouring places of a block that are as narrow there are fewer.
_AROUND = 16

# Shorter runs take as long to call as to evaluate (equations; measured on wresnet-500m).
_SHORTEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Equations of one level that are evaluated in a row.

    Args:
      start: position of the first.
      stop: position after the last.
      segment: the runs inside of equations that are rematerialised together; None of others.
      repeated: what is known of them if they stand in the program more than once.
    """

    start: int
    stop: int
    segment: tuple[Run, ...] | None = None
    repeated: Repeated | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A run that may be a repeat of others.

    Args:
      key: equal for repeats of one another.
      read: variables that it reads and does not make.
      specs: of each of these the layouts that it is read in.
      left: variables that it makes and others read.
      constants: positions of equations that depend on no input; every reader of their results makes them.
      read_by_constants: variables that these read.
    """

    key: Hashable
    read: tuple[Any, ...]
    specs: tuple[tuple[Spec, ...], ...]
    left: tuple[Any, ...]
    constants: tuple[int, ...]
    read_by_constants: frozenset[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """How a value leaves a run: its layout, and others that it was moved to inside."""

    spec: Spec
    moved: tuple[Spec, ...]
    differentiated: bool
    name: str


class Repeats:
    """The repeated runs of one planned program.

    Args:
      graph: its operators.
      rules: their factor rules.
      algorithms: one for each operator.
      settled: specs of settled values.
      sizes: mesh axis sizes.
      kept: paths of equations whose results rematerialised segments keep.
    """

    def __init__(
        self, graph: Graph, rules: Rules, algorithms: Sequence[Algorithm], settled: Mapping[int, Spec],
        sizes: Mapping[str, int], kept: Collection[Path],
    ) -> None:  # fmt: skip
        self._graph, self._rules, self._algorithms = graph, rules, algorithms
        self._settled, self._sizes, self._kept = settled, sizes, kept
        self._operators = {operator.path: operator for operator in graph.operators}
        self._numbers: dict[Hashable, int] = {}
        self._traced: dict[Hashable, tuple[Callable[..., Any], list[_Left]]] = {}

    def runs(self, jaxpr: Jaxpr, paths: Sequence[Path], segments: Sequence[tuple[int, int]]) -> list[Run]:
        """One level of the program as runs, in order.

        Args:
          jaxpr: the level.
          paths: of its equations.
          segments: the runs among them that are rematerialised together.
        """
        operators = [self._operators.get(path) for path in paths]
        lazy = [self._is_constant(equation, one) for equation, one in zip(jaxpr.eqns, operators, strict=True)]
        described = [self._described(e, o, at) for e, o, at in zip(jaxpr.eqns, operators, lazy, strict=True)]
        last, crossing = _last_reads(jaxpr), _crossing(jaxpr, lazy)

        def cut(start: int, stop: int) -> list[Run]:
            places = [start, *(at for at in range(start + 1, stop) if _is_narrow(crossing, at, start, stop)), stop]
            return [
                Run(start=a, stop=b, repeated=self._repeated(jaxpr, a, b, operators, lazy, described, last))
                for a, b in pairwise(places)
            ]

        found: list[Run] = []
        done = 0
        for start, stop in segments:
            found += [*cut(done, start), Run(start=start, stop=stop, segment=tuple(cut(start, stop)))]
            done = stop
        found += cut(done, len(jaxpr.eqns))
        flat = [one for run in found for one in run.segment or (run,)]
        times = Counter(run.repeated.key for run in flat if run.repeated is not None)

        def kept(run: Run) -> Run:
            if run.segment is not None:
                return replace(run, segment=tuple(map(kept, run.segment)))
            once = run.repeated is not None and times[run.repeated.key] == 1
            return replace(run, repeated=None) if once else run

        return [kept(run) for run in found if run.start < run.stop]

    def _is_constant(self, equation: Equation, operator: Operator | None) -> bool:
        """Whether what an equation makes is made by its readers."""
        if operator is None or is_call(equation):
            return False
        return all(v is None or self._graph.values[v].constant for v in operator.results)

    def _described(self, equation: Equation, operator: Operator | None, lazy: bool) -> Hashable:
        """Equal for equations that are evaluated alike on equal operands; None for what is in no run."""
        name = equation.primitive.name
        if operator is None or equation.effects or "whole" in equation.params:
            return None
        if not lazy and makes_a_number(self._graph, operator):  # in as many summands as its operands are
            return None
        if name in ("scan", "while", "cond") or is_remat(equation):
            return None
        params: Hashable
        if is_call(equation):
            body = equation.params["call_jaxpr"]
            if consts_of(body) or has_kernel(open_jaxpr(body)):  # whose text leaves out which blocks it reads
                return None
            params = id(self._rules.derivative(equation)) if operator.differentiated else str(open_jaxpr(body))
        else:
            params = tuple((key, _param(value)) for key, value in sorted(equation.params.items()))
        values = self._graph.values

        def flags(indices: Sequence[int | None]) -> Hashable:
            return tuple(None if v is None else (values[v].differentiated, self._settled.get(v)) for v in indices)

        described = (
            name, params, id(operator.rule), operator.differentiated, lazy, operator.path in self._kept,
            flags(operator.operands), flags(operator.results), tuple(map(_atom, equation.invars)),
            tuple(map(_atom, equation.outvars)), None if lazy else self._algorithms[operator.index],
            equation.source_info.traceback,
        )  # fmt: skip
        try:
            return self._numbers.setdefault(described, len(self._numbers))
        except TypeError:  # a parameter that nobody can compare
            return None

    def _repeated(
        self, jaxpr: Jaxpr, start: int, stop: int, operators: Sequence[Operator | None], lazy: Sequence[bool],
        described: Sequence[Hashable], last: Mapping[Any, int],
    ) -> Repeated | None:  # fmt: skip
        """What is known of a run; None where an equation of it is in no run, or it is too short."""
        places = range(start, stop)
        if len(places) < _SHORTEST or any(described[at] is None for at in places):
            return None
        number: dict[Any, int] = {}
        made: set[Any] = set()
        read: dict[Any, dict[Spec, None]] = {}
        by_constants: set[Any] = set()
        wiring = []
        for at in places:
            equation, operator = jaxpr.eqns[at], operators[at]
            assert operator is not None  # described
            for position, atom in enumerate(equation.invars):
                if is_literal(atom):
                    continue
                number.setdefault(atom, len(number))
                if atom not in made:
                    specs = read.setdefault(atom, {})
                    if lazy[at]:
                        by_constants.add(atom)
                    else:
                        specs[self._algorithms[operator.index].operands[position]] = None
            made.update(equation.outvars)
            for var in equation.outvars:
                number.setdefault(var, len(number))
            wiring.append(tuple(None if is_literal(a) else number[a] for a in equation.invars))
        left = [
            var for at in places if not lazy[at] for var in jaxpr.eqns[at].outvars
            if not is_dropped(var) and last.get(var, -1) >= stop
        ]  # fmt: skip
        key = (
            tuple(described[at] for at in places), tuple(wiring), tuple(number[var] for var in read),
            tuple(number[var] for var in left),
        )  # fmt: skip
        return Repeated(
            key=key, read=tuple(read), specs=tuple(map(tuple, read.values())), left=tuple(left),
            constants=tuple(at for at in places if lazy[at]), read_by_constants=frozenset(by_constants),
        )  # fmt: skip

    def evaluate(self, repeated: Repeated, env: Env, plainly: Callable[[Env], None]) -> bool:
        """Evaluate a run but for its constants.

        Args:
          repeated: the run.
          env: what is known before it; learns what it leaves.
          plainly: evaluates it equation by equation.

        Returns:
          Whether it was done; else it cannot be.
        """
        given = [env[var] for var in repeated.read]
        # What is no array of the trace is the same in every run that reads it.
        is_array = [not value.is_lazy and value.is_traced for value in given]
        for var, value, array in zip(repeated.read, given, is_array, strict=True):
            if value.is_traced and (not array or var in repeated.read_by_constants):
                return False
        seen = tuple(
            (value.spec, value.differentiated) if array else id(var)
            for var, value, array in zip(repeated.read, given, is_array, strict=True)
        )
        key = repeated.key, seen
        if key not in self._traced:
            self._traced[key] = self._function(repeated, given, is_array, plainly)
        function, left = self._traced[key]
        arrays = [
            value.read(spec)
            for value, array, specs in zip(given, is_array, repeated.specs, strict=True)
            if array
            for spec in specs
        ]
        results = function(*arrays)
        for var, how, (shard, *moved) in zip(repeated.left, left, results, strict=True):
            env[var] = LocalValue(
                shard, how.spec, self._sizes, differentiated=how.differentiated, name=how.name,
                moved=dict(zip(how.moved, moved, strict=True)),
            )  # fmt: skip
        return True

    def _function(
        self, repeated: Repeated, given: Sequence[LocalValue], is_array: Sequence[bool], plainly: Callable[[Env], None]
    ) -> tuple[Callable[..., Any], list[_Left]]:
        """A run as a function of the arrays that it reads; and how values leave it, known once it has been called."""
        left: list[_Left] = []
        # Arrays belong to the trace at hand, and the function outlives it.
        fixed = [None if array else value for value, array in zip(given, is_array, strict=True)]
        outline = [(value.spec, value.differentiated) for value in given]

        def run(*arrays: Any) -> list[list[Any]]:
            pieces = iter(arrays)
            env: Env = {}
            for var, same, (spec, moving), specs in zip(repeated.read, fixed, outline, repeated.specs, strict=True):
                if same is not None:
                    env[var] = same.enter()
                    continue
                moved = {one: next(pieces) for one in specs}
                env[var] = LocalValue(moved.get(spec), spec, self._sizes, differentiated=moving, moved=moved)
            plainly(env)
            made = [env[var] for var in repeated.left]
            left[:] = [
                _Left(spec=v.spec, moved=tuple(v.moved), differentiated=v.differentiated, name=v.name) for v in made
            ]
            return [[value.shard, *value.moved.values()] for value in made]

        return jax.jit(run), left


def _crossing(jaxpr: Jaxpr, lazy: Sequence[bool]) -> list[int]:
    """How many values that equations make are read at or after each position."""
    last = _last_reads(jaxpr)
    change = [0] * (len(jaxpr.eqns) + 2)
    for at, equation in enumerate(jaxpr.eqns):
        for var in equation.outvars:
            if not lazy[at] and last.get(var, -1) > at:
                change[at + 1] += 1
                change[min(last[var], len(jaxpr.eqns)) + 1] -= 1
    crossing, now = [], 0
    for difference in change:
        now += difference
        crossing.append(now)
    return crossing


def _last_reads(jaxpr: Jaxpr) -> dict[Any, int]:
    """The last position at which each variable is read; outputs are read after all equations."""
    found = {atom: at for at, e in enumerate(jaxpr.eqns) for atom in e.invars if not is_literal(atom)}
    found.update({atom: len(jaxpr.eqns) for atom in jaxpr.outvars if not is_literal(atom)})
    return found


def _is_narrow(crossing: Sequence[int], at: int, start: int, stop: int) -> bool:
    """Whether fewer values cross a position than the one before, and no more than any around it."""
    around = crossing[max(at - _AROUND, start + 1) : min(at + _AROUND, stop - 1) + 1]
    return crossing[at] < crossing[at - 1] and crossing[at] <= min(around)


def _param(value: Any) -> Hashable:
    """A parameter of an equation, equal for those that mean the same."""
    inner = open_jaxpr(value)
    if hasattr(inner, "eqns"):
        return id(value) if consts_of(value) else str(inner)
    return value


def _atom(atom: Any) -> Hashable:
    aval = atom.aval
    described = tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", aval)), getattr(aval, "weak_type", False)
    return (*described, repr(atom.val)) if is_literal(atom) else described

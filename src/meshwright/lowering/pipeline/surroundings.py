"""What surrounds the core of a step (preprocessing, the optimizer), shared out over the stages.

Every value of the step lives on some stages: a parameter, its gradient and its optimizer state where the parameter is
held, the loss where it is computed. What depends on none of these (step counts, hyperparameters, the batch) is
*neutral* and computed by every stage that needs it. An equation is computed where all it reads lives. One that reads
from several stages (the sum behind a global norm, a test that all is finite) is computed by every stage that needs its
result, from small values that the stages exchange; large values do not travel, with one exception: the gradients of a
parameter that several stages hold (a tied embedding) are summed over its holders.

A stacked parameter whose loop is cut over stages lies in parts (`rows`); what its rows add up to is exchanged like any
small value, as a *contribution* of each stage that has some.

An exchange ends a *round*: what a stage computes in round k reads what others computed in rounds before. A step with a
global norm has two rounds, one without has one.

Only wanted values count: the outputs of the step, at the stages where its state lies, and the operands of the core.
Cost: linear in equations x stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..._jax.jaxpr import ClosedJaxpr, Equation, consts_of, is_literal, open_jaxpr, source_line
from ..._jax.passes import size_bytes
from ...errors import PlanError
from ...program.cut import Cut
from ...program.staged import StagedProgram
from ..microbatches import reduction_of
from .homes import Homes
from .placement import Home, Stages, can_travel, is_small
from .rows import Rows


@dataclass(slots=True)
class Wanted:
    """What one stage computes around the core.

    Args:
      values: variables it needs, its own and others'.
      round_of: the round in which each value is at hand.
      sends: by round, the values that other stages read, in program order: each large one by its number, and bundles of
        small ones by their dtypes.
      inputs: the step's inputs it reads.
      outputs: the step's outputs it computes.
      rounds: how many rounds it takes part in.
    """

    values: set[Any] = field(default_factory=set)
    round_of: dict[Any, int] = field(default_factory=dict)
    sends: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    rounds: int = 1

    @property
    def sent(self) -> Iterator[Any]:
        """All values that it sends."""
        return (var for bundles in self.sends.values() for bundle in bundles.values() for var in bundle)


class Surroundings:
    """The equations around a core and the stages that compute them.

    Args:
      staged: the program in stages.
      cuts: of its stages.

    Attributes:
      equations: of the step, the core's left out.
      outvars: the results of the step.
      results: the variable of each output of the core that a stage computes.
      gradients: the variable of each parameter's gradient.
      holders: for each parameter the stages that hold it.
      parameter_inputs: the inputs of the step that are parameters.
      totals: numbers that the core returns for a microbatch, as they are for all.
      rows: for each value that lies in parts, which; `contributions` for each that is the sum (or another combination)
        of what stages have: the word for it and the stages.
      stages: what each stage computes.

    Raises:
      PlanError: an equation needs large values of several stages.
    """

    def __init__(self, staged: StagedProgram, cuts: Sequence[Cut]) -> None:
        program = staged.source
        assert program.marker is not None
        jaxpr = open_jaxpr(program.outer)
        marker = jaxpr.eqns[program.marker]
        self._program = program
        self.parameter_inputs = frozenset(i for i in program.parameter_inputs if i is not None)
        self._cuts = cuts
        self._everywhere: Stages = frozenset(range(len(cuts)))
        self.invars = list(jaxpr.invars)
        self.operands = list(marker.invars)
        count = len(open_jaxpr(staged.core).outvars)
        made: dict[int, list[int]] = {}
        for number, cut in enumerate(cuts):
            for i in cut.program_outputs:
                made.setdefault(i, []).append(number)
        self.totals: list[Any] = []
        alias = self._aliases(staged, marker, made, count)

        def read(atom: Any) -> Any:
            return atom if is_literal(atom) else alias.get(atom, atom)

        equations = [e.replace(invars=[read(a) for a in e.invars]) for e in jaxpr.eqns if e is not marker]
        self.outvars = [read(a) for a in jaxpr.outvars]
        self.results = {i: marker.outvars[i] for i in sorted(made)}
        self.gradients = list(marker.outvars[count:])
        self._makers_of_result = made
        self.holders: list[Stages] = [
            frozenset(n for n, cut in enumerate(cuts) if any(h.parameter == p for h in cut.parameters))
            for p in range(len(self.gradients))
        ]
        self._input_of = {var: i for i, var in enumerate(self.invars)}
        self._result_of = {var: i for i, var in self.results.items()}
        self.parameter_of = {var: p for p, var in enumerate(self.gradients)}
        self.rows: dict[Any, Rows] = {}
        self._find_rows()
        homes = self._find_homes(equations, jaxpr.constvars, marker)
        self.equations = homes.equations
        self.operands = [homes.read(a) for a in self.operands]
        self.contributions = homes.contributions
        self._home = homes.of
        self.at = {var: home.at for var, home in homes.of.items()}
        self.rows.update((var, home.rows) for var, home in homes.of.items() if home.rows is not None)
        self._maker = {var: i for i, e in enumerate(self.equations) for var in e.outvars}
        self._consts = {*jaxpr.constvars, *homes.constants}
        constants = [*consts_of(program.outer), *homes.constants.values()]
        self.outer = ClosedJaxpr(jaxpr.replace(constvars=[*jaxpr.constvars, *homes.constants]), constants)
        self.parts: list[set[int]] = [set() for _ in range(program.state_inputs)]
        self.stages = self._share_out()
        self._find_rounds()

    def _aliases(self, staged: StagedProgram, marker: Equation, made: Collection[int], count: int) -> dict[Any, Any]:
        """Outputs of the core that no stage computes: literals, and inputs handed through."""
        core = open_jaxpr(staged.core)
        places: dict[Any, int] = {var: i for i, var in enumerate(core.invars)}
        alias: dict[Any, Any] = {}
        for i, atom in enumerate(core.outvars[:count]):
            if i in made:
                continue
            if not is_literal(atom) and atom not in places:
                raise _refusal(
                    f"output {i} of the loss function", "a constant array", "a result, an input or a number",
                    "returning it from the step itself",
                )  # fmt: skip
            alias[marker.outvars[i]] = self._number(atom, i) if is_literal(atom) else marker.invars[places[atom]]
        return alias

    def _number(self, literal: Any, output: int) -> Any:
        """A number that the core returns: of one microbatch (a count of examples), here of all of them."""
        program = self._program
        if reduction_of(program, output) != "sum":
            return literal
        value = np.asarray(literal.val * program.microbatches, literal.aval.dtype)
        self.totals.append(type(literal)(value, literal.aval))
        return self.totals[-1]

    # Where values live

    def _find_rows(self) -> None:
        """The parts of gradients, parameters and what is laid out like them."""
        program = self._program
        for p, var in enumerate(self.gradients):
            held = [(n, h.rows) for n, cut in enumerate(self._cuts) for h in cut.parameters if h.parameter == p]
            parts = tuple(sorted((n, rows.first, rows.last) for n, rows in held if rows is not None))
            if not parts:
                continue
            (dim, *others) = {rows.dim for _, rows in held if rows is not None}
            covered = sum(last - first for _, first, last in parts)
            once = len(parts) == len(held) == len({n for n, *_ in parts})
            if others or not once or covered != var.aval.shape[dim]:
                raise _refusal(
                    f"a stacked parameter of shape {var.aval.shape}",
                    f"rows held by stages {[n + 1 for n, *_ in parts]}",
                    "each row on one stage, once", "a loop that is read by nothing else",
                )  # fmt: skip
            self.rows[var] = Rows(dim, covered, parts)
            if (source := program.parameter_inputs[p]) is not None:
                self.rows[self.invars[source]] = Rows(dim, covered, parts)
            for index in range(program.state_inputs):
                leaf = program.state[index]
                if leaf is not None and leaf.parameter == p and dim in leaf.dims:
                    self.rows[self.invars[index]] = Rows(leaf.dims.index(dim), covered, parts)

    def can_travel(self, var: Any) -> bool:
        """Whether a value is sent wherever it is read."""
        return can_travel(var, self._home[var])

    def _kept_for_operands(self, equations: Sequence[Equation], at: Mapping[Any, Stages]) -> Iterator[tuple[int, Any]]:
        """Stages whose part of the core reads an input that belongs to others (a moving average of a parameter, for a
        loss that compares with it), as it is or after operations on it alone: they keep it too."""
        several = object()
        made_of: dict[Any, Any] = {v: v for v in self.invars if at[v] != self._everywhere and v not in self.rows}
        made_of.update((v, several) for v in self.rows)
        for equation in equations:
            sources = {made_of[a] for a in equation.invars if not is_literal(a) and a in made_of}
            if sources:
                made_of.update(dict.fromkeys(equation.outvars, sources.pop() if len(sources) == 1 else several))
        for number in range(len(self._cuts)):
            for atom in self.operands_of(number):
                source = several if is_literal(atom) else made_of.get(atom, several)
                if source is not several and number not in at[source]:
                    yield number, source

    def _find_homes(self, equations: Sequence[Equation], known: Iterable[Any], marker: Equation) -> Homes:
        """Where each value lives, and the equations as they are shared out."""
        program, everywhere = self._program, self._everywhere
        at: dict[Any, Stages] = dict.fromkeys(known, everywhere)
        for index, var in enumerate(self.invars):
            leaf = program.state[index] if index < program.state_inputs else None
            if index in program.parameter_inputs:
                home = self.holders[program.parameter_inputs.index(index)]
            else:
                home = self.holders[leaf.parameter] if leaf is not None else everywhere
            at[var] = home or everywhere
        for number, var in self._kept_for_operands(equations, at):
            at[var] |= {number}
        contributions: dict[Any, tuple[str | Rows, tuple[int, ...]]] = {}
        for i, var in self.results.items():
            makers, how = self._makers_of_result[i], reduction_of(program, i)
            # Of what is that of the last microbatch, the last replica's.
            at[var] = frozenset({max(makers)})
            if len(makers) > 1 and how != "same":
                # Replicas have results of their own microbatches; their means are sums over the count of all.
                contributions[var] = ("sum" if how == "mean" else how), tuple(makers)
                at[var] = everywhere
        for p, var in enumerate(self.gradients):
            at[var] = self.holders[p] or everywhere
        homes = Homes(everywhere, program.rules, {var: Home(one, one, self.rows.get(var)) for var, one in at.items()})
        homes.contributions.update(contributions)
        homes.add(equations)
        state = program.state_inputs
        self.outvars = [
            *map(homes.read, self.outvars[:state]),
            *(homes.gather(a, marker) for a in self.outvars[state:]),
        ]
        for atom in self.outvars[:state]:
            # Stages must not keep copies of a number that differ in the last bit.
            if not is_literal(atom) and homes.of[atom].mixed:
                homes.decide_once(atom)
        return homes

    # What each stage needs

    def _share_out(self) -> list[Wanted]:
        """Every stage's values, until the state comes back where it is read."""
        program = self._program
        for index in range(program.state_inputs):
            home = self.at[self.invars[index]]
            if home != self._everywhere or self._is_parameter(index) or self.invars[index] in self.rows:
                self.parts[index] |= home
            elif is_small(self.invars[index]) and self._is_neutral(self.outvars[index]):
                # Every stage computes it, so that it lies on the devices of all, as other small state does.
                self.parts[index] |= home
        while True:
            stages = self._wanted()
            before = [set(part) for part in self.parts]
            for number, wanted in enumerate(stages):
                for index in wanted.inputs:
                    if index < program.state_inputs:
                        self.parts[index].add(number)
            if before == self.parts:
                lost = [i for i, part in enumerate(self.parts) if not part]
                if not lost:
                    return stages
                for index in lost:
                    out = self.outvars[index]
                    self.parts[index].add(0 if is_literal(out) else min(self.at[out]))

    def _is_neutral(self, atom: Any) -> bool:
        """Whether a value depends on nothing that only some stages have."""
        return all(self.at[v] == self._everywhere and v not in self.contributions for v in self.reads([atom]))

    def _is_parameter(self, index: int) -> bool:
        return index in self._program.parameter_inputs and bool(
            self.holders[self._program.parameter_inputs.index(index)]
        )

    def _wanted(self) -> list[Wanted]:
        program = self._program
        stages = [Wanted() for _ in self._cuts]
        self._readers: dict[tuple[Any, int], set[int]] = {}
        stack: list[tuple[int, Any]] = []
        for position, atom in enumerate(self.outvars):
            state = position < program.state_inputs
            where = self.parts[position] if state else self._where_made(position, atom)
            for number in sorted(where):
                stages[number].outputs.append(position)
                stack.append((number, atom))
        for number, cut in enumerate(self._cuts):
            stack += [(number, self.operands[i]) for i in cut.program_inputs]
            stack += [(number, self.operands[program.num_consts + held.parameter]) for held in cut.parameters]
        while stack:
            number, atom = stack.pop()
            if is_literal(atom) or atom in stages[number].values:
                continue
            stages[number].values.add(atom)
            sources = self.sources(number, atom)
            for source in sources:
                self._readers.setdefault((atom, source), set()).add(number)
                if atom in self.contributions:
                    made_of = self.equations[self._maker[atom]].invars if atom in self._maker else ()
                    stack += [(source, a) for a in made_of]
                else:
                    stack.append((source, atom))
            if sources:
                continue
            if atom in self._maker:
                stack += [(number, a) for a in self.equations[self._maker[atom]].invars]
        for wanted in stages:
            wanted.inputs = sorted(self._input_of[v] for v in wanted.values if v in self._input_of)
        return stages

    def _where_made(self, position: int, atom: Any) -> set[int]:
        """The stages that compute a result of the step that is no state; of what effects read, each its rows."""
        rows = self.rows_of(atom) if position >= self._program.out_tree.num_leaves else None
        return set(rows.stages) if rows is not None else {0 if is_literal(atom) else min(self.at[atom])}

    def rows_of(self, atom: Any) -> Rows | None:
        """The rows of a value that lie on several stages; None where it is whole."""
        return None if is_literal(atom) else self.rows.get(atom)

    def sources(self, number: int, var: Any) -> tuple[int, ...]:
        """The stages that send a value to a stage; none if it computes or holds it."""
        if var in self.contributions:
            return self.contributions[var][1]
        if number in self.at[var]:
            return ()
        if not self.can_travel(var) and number in self._home[var].possible and var in self._maker:
            return ()
        return (min(self.at[var]),)

    # Rounds

    def _find_rounds(self) -> None:
        rounds = [wanted.round_of for wanted in self.stages]
        sent: list[dict[Any, int]] = [{} for _ in self.stages]

        def at_hand(number: int, var: Any) -> int:
            sources = self.sources(number, var)
            return 1 + max(sent[source][var] for source in sources) if sources else rounds[number][var]

        for number, wanted in enumerate(self.stages):
            for var in wanted.values:
                if var not in self._maker and not self.sources(number, var):
                    tied = var in self.parameter_of and self.is_tied(self.parameter_of[var])
                    rounds[number][var] = 1 if tied else 0
        for (var, source), _ in self._readers.items():
            if var not in self._maker:
                sent[source][var] = 0 if var in self.contributions else rounds[source][var]
        for equation in self.equations:
            atoms = [a for a in equation.invars if not is_literal(a)]
            for number, wanted in enumerate(self.stages):
                for var in equation.outvars:
                    reads = (var, number) in self._readers
                    local = var in wanted.values and not self.sources(number, var)
                    if reads or local:
                        ready = max((at_hand(number, a) for a in atoms), default=0)
                        if reads:
                            sent[number][var] = ready
                        if local:
                            rounds[number][var] = ready
        order = {var: i for i, var in enumerate(self._in_order())}
        for var, source in sorted(self._readers, key=lambda one: (order[one[0]], one[1])):
            content = str(order[var]) if self.is_large(var) else str(var.aval.dtype)
            bundles = self.stages[source].sends.setdefault(sent[source][var], {})
            bundles.setdefault(content, []).append(var)
        for number, wanted in enumerate(self.stages):
            for var in wanted.values:
                rounds[number][var] = at_hand(number, var)
            last = [rounds[number][a] for i in wanted.outputs if not is_literal(a := self.outvars[i])]
            wanted.rounds = 1 + max([*last, *wanted.sends], default=0)
            for atom in self.operands_of(number):
                if not is_literal(atom) and rounds[number][atom]:
                    raise _refusal(
                        f"an operand of the loss function, of shape {atom.aval.shape}",
                        "one computed from parameters of several stages", "one computed from the state of one stage",
                        "computing it inside the loss function",
                        source_line(self.equations[self._maker[atom]]) if atom in self._maker else "the loss function",
                    )  # fmt: skip

    def _in_order(self) -> Iterable[Any]:
        yield from (*self.invars, *self._consts, *self.results.values(), *self.gradients)
        for equation in self.equations:
            yield from equation.outvars

    def readers(self, var: Any, source: int) -> set[int]:
        """The stages that are sent a value."""
        return self._readers.get((var, source), set())

    def is_large(self, var: Any) -> bool:
        """Whether a value is sent to other stages by itself and not bundled with others."""
        return not is_small(var) or self._sent_rows(var) is not None

    def _sent_rows(self, var: Any) -> Rows | None:
        """Of a value that is put together of rows, these."""
        kind, _ = self.contributions.get(var, ("", ()))
        return kind if isinstance(kind, Rows) else None

    def sent_shape(self, var: Any, source: int) -> tuple[int, ...]:
        """Shape of what a stage sends of a value."""
        rows = self._sent_rows(var)
        return tuple(var.aval.shape) if rows is None else rows.shape(var.aval.shape, source)

    def note(self) -> str | None:
        """What to tell of large values that stages send each other around the core; None where there are none."""
        total, lines = 0, {}
        for source, stage in enumerate(self.stages):
            for var in (v for v in stage.sent if self.is_large(v)):
                readers = self.readers(var, source) - {source}
                total += len(readers) * size_bytes(var.aval)
                for equation in (e for e in self.equations if readers and var in e.invars):
                    lines.setdefault(source_line(equation), equation.primitive.name)
        if not total:
            return None
        named = "; ".join(f"{name} at {line}" for line, name in list(lines.items())[:3]) or "a result of the step"
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        sent = f"sends {total / 2**20:.1f} MiB between stages each step"
        return f"what surrounds the loss function {sent}, for {named}{more}"

    def is_read_later(self, parameter: int, number: int) -> bool:
        """Whether a stage's gradient of a parameter is read after the first round, by the stage itself or, summed over
        the stages that hold the parameter, by another."""
        var = self.gradients[parameter]
        tied = [n for n in self.holders[parameter] if var in self.stages[n].values and self.is_tied(parameter)]
        return self.stages[number].rounds > 1 or any(n != number for n in tied)

    def is_tied(self, parameter: int) -> bool:
        """Whether several stages hold the same numbers of a parameter."""
        return len(self.holders[parameter]) > 1 and self.gradients[parameter] not in self.rows

    def shape(self, var: Any, stage: int) -> tuple[int, ...]:
        """Shape of what a stage has of a value."""
        return self.rows[var].shape(var.aval.shape, stage) if var in self.rows else tuple(var.aval.shape)

    def operands_of(self, number: int) -> list[Any]:
        """The core's operands that a stage reads: parameters, then inputs of the program."""
        cut, first = self._cuts[number], self._program.num_consts
        held = [self.operands[first + held.parameter] for held in cut.parameters]
        return [*held, *(self.operands[i] for i in cut.program_inputs)]

    def needed(self, wanted: Sequence[Any], known: Iterable[Any]) -> list[Equation]:
        """The equations that compute variables from known ones, in order."""
        stop = set(known)
        found: set[int] = set()
        stack = [a for a in wanted if not is_literal(a)]
        while stack:
            var = stack.pop()
            position = None if var in stop else self._maker.get(var)
            if position is not None and position not in found:
                found.add(position)
                stack += [a for a in self.equations[position].invars if not is_literal(a)]
        return [self.equations[i] for i in sorted(found)]

    def reads(self, wanted: Sequence[Any]) -> set[Any]:
        """All variables that variables depend on, themselves included."""
        read = {a for e in self.needed(wanted, ()) for a in e.invars if not is_literal(a)}
        return read | {a for a in wanted if not is_literal(a)}

    def is_report(self, output: int) -> bool:
        """Whether a result of the step depends on neither gradients nor state; on what the core returns, it may."""
        state = self._program.state_inputs
        return output >= state and self.reads([self.outvars[output]]).isdisjoint(
            {*self.gradients, *self.invars[:state]}
        )


def _refusal(
    refused: str, got: str, needed: str, try_: str, where: str = "what surrounds the loss function"
) -> PlanError:
    return PlanError(refused=f"to share out {refused} over stages", got=got, needed=needed, where=where, try_=try_)

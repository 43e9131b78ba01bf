"""The part of a graph that a range of top-level equations is: a stage, or a layer, as a graph of its own.

What crosses into the range becomes an input: parameters, inputs of the program, and values computed before it (whose
cotangents go back to where they came from). What is computed in it and read after it, or leaves the program, becomes an
output. Two things are not sent from stage to stage:

* Values that depend on no input (masks, positions) are made again by every stage that reads them: the equations before
  the range that make them are listed in `repeated` and belong to its graph.
* Rows of a stacked parameter (`scan_split.stacked_rows`) that only the range's own scan reads are its parameter: the
  slice is gone, and the stage holds these rows and no others.

Inputs that nothing reads belong to the range that begins the program, so that every parameter is held by some stage.

Pure data, no JAX. Cost: one pass over the program for `Cutter`, then each cut is linear in what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .fold import fold_pieces
from .graph import Graph, Operator
from .origins import Origin, operator_origins
from .stacked import StackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """A parameter that a range reads.

    Args:
      parameter: its position in the whole program's `Graph.parameters`.
      rows: those that the range reads of a stacked parameter; None for the whole parameter.
    """

    parameter: int
    rows: StackedRows | None = None


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A range of top-level equations as a graph.

    Args:
      equations: first and one past the last.
      repeated: equations before the range that make the constants it reads, ascending.
      whole: graph of the whole program.
      inside: the range's operators as the whole graph has them, but that pieces of one scan are one.
      shapes: of values that these have in another shape.
      values: for each value of the range its index in the whole graph.
      inputs: values that it reads, as the whole graph numbers them: parameters first, then inputs of the program, then
        what it receives. (Those of all of a program stand as they do there.)
      outputs: values that leave it, as the whole graph numbers them.
      parameters: what its parameters are, in the order of `graph.parameters`.
      program_inputs: which other inputs of the program it reads, as positions in the whole graph's `inputs`.
      received: values of the whole graph that it reads and earlier equations compute.
      sent: values of the whole graph that it computes and later equations read.
      made: for each of these the value of the whole graph that stands for it in the range.
      program_outputs: which outputs of the program it computes, as positions in the whole graph's `outputs`.
    """

    equations: tuple[int, int]
    repeated: tuple[int, ...]
    whole: Graph
    inside: tuple[Operator, ...]
    shapes: Mapping[int, tuple[int, ...]]
    values: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    parameters: tuple[HeldParameter, ...]
    program_inputs: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    made: tuple[int, ...]
    program_outputs: tuple[int, ...]

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for ranges that are the same program, whatever their place and their names. Made anew each time: of
        hundreds of ranges a few dozen are different programs."""
        base, renumbered = self.equations[0], self._renumbering()

        def place(path: tuple[int, ...] | None) -> tuple[int, ...] | None:
            return None if path is None else (path[0] - base, *path[1:])

        operators = tuple(
            (
                op.name, renumbered(op.operands), renumbered(op.results), op.rule, op.combine, op.repeats,
                op.outer_repeats, op.operand_repeats, place(op.region), op.flops, op.multiplied, op.backward_flops,
                op.matmul, op.differentiated,
            )
            for op in self.inside
        )  # fmt: skip
        whole = [self.whole.values[v] for v in self.values]
        values = tuple(
            (self.shapes.get(v.index, v.shape), v.dtype, v.itemsize, v.differentiated, v.constant) for v in whole
        )
        return operators, values, renumbered(self.inputs), renumbered(self.outputs), len(self.parameters)

    @cached_property
    def operators(self) -> tuple[int, ...]:
        """For each operator its index in the whole graph."""
        return tuple(op.index for op in self.inside)

    @cached_property
    def graph(self) -> Graph:
        """The range as a graph of its own, made when it is asked for: of ranges that are the same program one is
        enough. Operators keep their paths, values are numbered anew."""
        if self.inside is self.whole.operators:
            return self.whole
        renumbered, whole = self._renumbering(), self.whole
        return Graph(
            values=tuple(
                whole.values[v].placed(i, self.shapes.get(v, whole.values[v].shape)) for i, v in enumerate(self.values)
            ),
            operators=tuple(
                op.placed(i, renumbered(op.operands), renumbered(op.results)) for i, op in enumerate(self.inside)
            ),
            inputs=renumbered(self.inputs),
            outputs=renumbered(self.outputs),
            parameters=tuple(range(len(self.parameters))),
            part_of=(whole, self.operators),
        )

    @cached_property
    def origins(self) -> tuple[tuple[Origin, ...], ...]:
        """Of each operator what each factor of its rule stands for, in the whole program; its graph is not made."""
        of_whole = operator_origins(self.whole)
        return tuple(of_whole[place] for place in self.operators)

    @cached_property
    def sent_values(self) -> tuple[int, ...]:
        """For each value that is sent the value of `graph` that it is; pieces of one scan are one there."""
        return tuple(map(self.values.index, self.made))

    def _renumbering(self) -> Callable[[Sequence[int | None]], tuple[Any, ...]]:
        """What gives each value of the whole graph its number in this one."""
        numbers: dict[int | None, int | None] = {None: None, **{v: i for i, v in enumerate(self.values)}}
        return lambda values: tuple(map(numbers.__getitem__, values))


def whole_cut(graph: Graph, equations: int) -> Cut:
    """All of a program, as it is."""
    parameters = frozenset(graph.parameters)
    return Cut(
        equations=(0, equations), repeated=(), whole=graph, inside=graph.operators, shapes={},
        values=tuple(range(len(graph.values))), inputs=graph.inputs, outputs=graph.outputs,
        parameters=tuple(HeldParameter(parameter=number) for number in range(len(graph.parameters))),
        program_inputs=tuple(position for position in range(len(graph.inputs)) if position not in parameters),
        received=(), sent=(), made=(), program_outputs=tuple(range(len(graph.outputs))),
    )  # fmt: skip


class Cutter:
    """Cuts one graph, again and again.

    Args:
      graph: the whole program.
      rows: equations that take rows out of an input (`scan_split.stacked_rows`).
      pieces: for each scan that was cut, the equations of its pieces: in a range they are one scan again (`fold`), and
        the graph is that of the program in which they are. None where ranges have to be those of the program at hand.
    """

    def __init__(
        self,
        graph: Graph,
        rows: Mapping[int, StackedRows] | None = None,
        pieces: Sequence[Sequence[int]] = (),
    ) -> None:
        self.graph = graph
        self._rows = dict(rows or {})
        self._pieces = pieces
        self._at: dict[int, list[Operator]] = {}
        for operator in graph.operators:
            self._at.setdefault(operator.path[0], []).append(operator)
        self.made_at = {v: op.path[0] for op in graph.operators for v in op.results if v is not None}
        read_at: dict[int, set[int]] = {}
        for operator in graph.operators:
            for v in operator.operands:
                if v is not None:
                    read_at.setdefault(v, set()).add(operator.path[0])
        self.read_at = {v: tuple(sorted(equations)) for v, equations in read_at.items()}
        self._constant = {
            equation
            for equation, operators in self._at.items()
            if all(v is None or graph.values[v].constant for op in operators for v in op.results)
        }
        self._inputs = {v: i for i, v in enumerate(graph.inputs)}
        self._parameters = {p: i for i, p in enumerate(graph.parameters)}
        self._outputs = set(graph.outputs)

    def crosses(self, value: int) -> bool:
        """Whether a value is sent to the stages that read it: computed from inputs, and not made again by each."""
        return value in self.made_at and self.made_at[value] not in self._constant

    def cut(self, first: int, last: int) -> Cut:
        """The equations `first` to before `last` as a graph."""
        graph = self.graph
        inside = [op for e in range(first, last) for op in self._at.get(e, ())]
        later = {v: True for op in inside for v in op.results if v is not None and self._leaves(v, last)}
        folded = fold_pieces(graph, inside, self._pieces, self._rows, later) if self._pieces else None
        rows, same, shapes = self._rows, {}, {}
        if folded is not None:
            inside, same, shapes = list(folded.operators), folded.same, folded.shapes
            rows = {**self._rows, **folded.rows}
        repeated = self._repeated(inside, first)
        sliced = self._own_rows(inside)
        operators = [op for e in repeated for op in self._at[e]] + [op for op in inside if op.path[0] not in sliced]
        made = {v for op in operators for v in op.results if v is not None}
        read = [v for v in dict.fromkeys(v for op in operators for v in op.operands) if v is not None and v not in made]
        if first == 0:
            read += [v for v in graph.inputs if v not in self.read_at]
        held, program_inputs, received = self._inputs_of(read, sliced, rows)
        mine = {v: None for op in self._within(first, last) for v in op.results if v is not None}
        sent = tuple(v for v in mine if self.crosses(v) and any(e >= last for e in self.read_at.get(v, ())))
        leaving = tuple(i for i, v in enumerate(graph.outputs) if v is not None and v in mine)
        inputs = [*(v for v, _ in held), *(graph.inputs[i] for i in program_inputs), *received]
        left = [*sent, *(v for i in leaving if (v := graph.outputs[i]) is not None)]
        outputs = tuple(dict.fromkeys(same.get(v, v) for v in left))
        order = dict.fromkeys(inputs)
        for op in operators:
            order.update(dict.fromkeys(v for v in (*op.operands, *op.results) if v is not None))
        return Cut(
            equations=(first, last), repeated=repeated, whole=graph, inside=tuple(operators), shapes=shapes,
            values=tuple(order), inputs=tuple(inputs), outputs=outputs, parameters=tuple(h for _, h in held),
            program_inputs=tuple(program_inputs), received=tuple(received), sent=sent,
            made=tuple(same.get(v, v) for v in sent), program_outputs=leaving,
        )  # fmt: skip

    def _within(self, first: int, last: int) -> Iterator[Operator]:
        return (operator for equation in range(first, last) for operator in self._at.get(equation, ()))

    def _leaves(self, value: int, last: int) -> bool:
        return value in self._outputs or any(e >= last for e in self.read_at.get(value, ()))

    def _repeated(self, inside: Sequence[Operator], first: int) -> tuple[int, ...]:
        """Equations before `first` that make the constants which `inside` reads, and what those read."""
        found: set[int] = set()
        stack = [v for op in inside for v in op.operands if v is not None]
        while stack:
            equation = self.made_at.get(stack.pop())
            if equation is not None and equation < first and equation in self._constant and equation not in found:
                found.add(equation)
                stack += [v for op in self._at[equation] for v in op.operands if v is not None]
        return tuple(sorted(found))

    def _own_rows(self, inside: Sequence[Operator]) -> dict[int, Operator]:
        """The slices in the range whose result can stand for a parameter: by equation."""
        found = {}
        for op in inside:
            rows = self._rows.get(op.path[0])
            if rows is None or rows.input not in self._parameters:
                continue
            value = self.graph.inputs[rows.input]
            whole = [r for r in inside if value in r.operands and r.path[0] not in self._rows]
            if not whole:
                found[op.path[0]] = op
        return found

    def _inputs_of(
        self, read: Sequence[int], sliced: Mapping[int, Operator], rows: Mapping[int, StackedRows]
    ) -> tuple[list[tuple[int, HeldParameter]], list[int], list[int]]:
        """Parameters (value and what it is), other inputs of the program, and values from earlier equations."""
        parts = {op.results[0]: rows[e] for e, op in sliced.items()}
        held: list[tuple[int, HeldParameter]] = []
        others: list[int] = []
        received: list[int] = []
        for value in read:
            position = self._inputs.get(value)
            if value in parts:
                held.append((value, HeldParameter(parameter=self._parameters[parts[value].input], rows=parts[value])))
            elif position is not None and position in self._parameters:
                held.append((value, HeldParameter(parameter=self._parameters[position])))
            elif position is not None:
                others.append(position)
            elif value in self.made_at:
                received.append(value)
        held.sort(key=lambda one: (one[1].parameter, one[1].rows.first if one[1].rows is not None else 0))
        return held, sorted(others), sorted(received)

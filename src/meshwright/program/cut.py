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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .fold import fold_pieces
from .graph import Graph, Operator

Rows = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """A parameter that a range reads.

    Args:
      parameter: its position in the whole program's `Graph.parameters`.
      rows: the rows of dim 0 that the range reads, first and one past the last; None for the whole parameter.
    """

    parameter: int
    rows: Rows | None = None


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A range of top-level equations as a graph.

    Args:
      equations: first and one past the last.
      repeated: equations before the range that make the constants it reads, ascending.
      graph: the range; operators keep their paths, values are numbered anew, its inputs are parameters first, then
        inputs of the program, then what it receives.
      operators: for each operator its index in the whole graph.
      values: for each value its index in the whole graph.
      parameters: what its parameters are, in the order of `graph.parameters`.
      program_inputs: which other inputs of the program it reads, as positions in the whole graph's `inputs`.
      received: values of the whole graph that it reads and earlier equations compute.
      sent: values of the whole graph that it computes and later equations read.
      sent_values: for each of these the value of `graph` that it is; pieces of one scan are one there.
      program_outputs: which outputs of the program it computes, as positions in the whole graph's `outputs`.
    """

    equations: tuple[int, int]
    repeated: tuple[int, ...]
    graph: Graph
    operators: tuple[int, ...]
    values: tuple[int, ...]
    parameters: tuple[HeldParameter, ...]
    program_inputs: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    sent_values: tuple[int, ...]
    program_outputs: tuple[int, ...]

    @cached_property
    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for ranges that are the same program, whatever their place and their names."""
        base = self.equations[0]

        def place(path: tuple[int, ...] | None) -> tuple[int, ...] | None:
            return None if path is None else (path[0] - base, *path[1:])

        operators = tuple(
            (
                op.name, op.operands, op.results, op.rule, op.combine, op.repeats, op.outer_repeats,
                op.operand_repeats, place(op.region), op.flops, op.matmul, op.differentiated,
            )
            for op in self.graph.operators
        )  # fmt: skip
        values = tuple((v.shape, v.dtype, v.itemsize, v.differentiated, v.constant) for v in self.graph.values)
        return operators, values, self.graph.inputs, self.graph.outputs, self.graph.parameters


class Cutter:
    """Cuts one graph, again and again.

    Args:
      graph: the whole program.
      rows: equations that take rows out of an input: position of the input, first row, one past the last
        (`scan_split.stacked_rows`).
      pieces: for each scan that was cut, the equations of its pieces: in a range they are one scan again (`fold`), and
        the graph is that of the program in which they are. None where ranges have to be those of the program at hand.
    """

    def __init__(
        self,
        graph: Graph,
        rows: Mapping[int, tuple[int, int, int]] | None = None,
        pieces: Sequence[Sequence[int]] = (),
    ) -> None:
        self.graph = graph
        self._rows = dict(rows or {})
        self._pieces = pieces
        self._at: dict[int, list[Operator]] = {}
        for operator in graph.operators:
            self._at.setdefault(operator.path[0], []).append(operator)
        self.made_at = {v: op.path[0] for op in graph.operators for v in op.results if v is not None}
        self.read_at: dict[int, set[int]] = {}
        for operator in graph.operators:
            for v in operator.operands:
                if v is not None:
                    self.read_at.setdefault(v, set()).add(operator.path[0])
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
        outputs = list(dict.fromkeys(same.get(v, v) for v in left))
        return self._build(
            shapes,
            (first, last), repeated, operators, inputs, outputs,
            held=tuple(h for _, h in held), program_inputs=tuple(program_inputs), received=tuple(received), sent=sent,
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
            if rows is None or rows[0] not in self._parameters:
                continue
            value = self.graph.inputs[rows[0]]
            whole = [r for r in inside if value in r.operands and r.path[0] not in self._rows]
            if not whole:
                found[op.path[0]] = op
        return found

    def _inputs_of(
        self, read: Sequence[int], sliced: Mapping[int, Operator], rows: Mapping[int, tuple[int, int, int]]
    ) -> tuple[list[tuple[int, HeldParameter]], list[int], list[int]]:
        """Parameters (value and what it is), other inputs of the program, and values from earlier equations."""
        parts = {op.results[0]: rows[e] for e, op in sliced.items()}
        held: list[tuple[int, HeldParameter]] = []
        others: list[int] = []
        received: list[int] = []
        for value in read:
            position = self._inputs.get(value)
            if value in parts:
                source, start, stop = parts[value]
                held.append((value, HeldParameter(parameter=self._parameters[source], rows=(start, stop))))
            elif position is not None and position in self._parameters:
                held.append((value, HeldParameter(parameter=self._parameters[position])))
            elif position is not None:
                others.append(position)
            elif value in self.made_at:
                received.append(value)
        held.sort(key=lambda one: (one[1].parameter, one[1].rows or (0, 0)))
        return held, sorted(others), sorted(received)

    def _build(
        self,
        shapes: Mapping[int, tuple[int, ...]],
        equations: tuple[int, int],
        repeated: tuple[int, ...],
        operators: Sequence[Operator],
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        held: tuple[HeldParameter, ...],
        program_inputs: tuple[int, ...],
        received: tuple[int, ...],
        sent: tuple[int, ...],
        made: tuple[int, ...],
        program_outputs: tuple[int, ...],
    ) -> Cut:
        order = dict.fromkeys(inputs)
        for op in operators:
            order.update(dict.fromkeys(v for v in (*op.operands, *op.results) if v is not None))
        numbers = {v: i for i, v in enumerate(order)}
        whole = self.graph

        def renumbered(values: Sequence[int | None]) -> tuple[int | None, ...]:
            return tuple(None if v is None else numbers[v] for v in values)

        graph = Graph(
            values=tuple(
                replace(whole.values[v], index=i, shape=shapes.get(v, whole.values[v].shape))
                for v, i in numbers.items()
            ),
            operators=tuple(
                replace(op, index=i, operands=renumbered(op.operands), results=renumbered(op.results))
                for i, op in enumerate(operators)
            ),
            inputs=tuple(numbers[v] for v in inputs),
            outputs=tuple(numbers[v] for v in outputs),
            parameters=tuple(range(len(held))),
            part_of=(whole, tuple(op.index for op in operators)),
        )
        return Cut(
            equations=equations, repeated=repeated, graph=graph, operators=tuple(op.index for op in operators),
            values=tuple(numbers), parameters=held, program_inputs=program_inputs, received=received, sent=sent,
            sent_values=tuple(numbers[v] for v in made), program_outputs=program_outputs,
        )  # fmt: skip

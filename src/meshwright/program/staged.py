"""A program made ready to be cut into stages: its scans split, its graph, and its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .._jax.jaxpr import ClosedJaxpr, open_jaxpr, scan_parts
from ..errors import PlanError
from .build import build_graph
from .cut import Cutter
from .graph import Graph
from .layers import DEFAULT_LAYERS, cluster_layers
from .rules import Rules
from .scan_split import split_with_starts, stacked_rows, trips_for_layers
from .stacked import StackedRows
from .trace import Program


@dataclass(frozen=True, kw_only=True)
class StagedProgram:
    """The core of a program, at the size of one microbatch, in layers.

    Args:
      graph: its operators.
      rows: equations of `core` that take rows out of an input (`scan_split.stacked_rows`).
      scan_splits: what was split: by position of the scan in the unsplit core, the trips of each piece.
      layers: ranges of top-level equations of `core`, in order.
      piece_starts: the first equation of each piece of a scan, by position of the scan in the unsplit core and number
        of the piece.
      split_dims: for each input that is not differentiated, the dim that microbatches cut, or None.
      microbatches: into how many parts the batch is cut.
      alike: a traced program of the same equations, in this number of microbatches or another.
      trace: the core with its scans split, and the program as traced, its scans whole. Of a program that is expected
        (`program.expected`) they are made when they are first asked for, as `core` or `source` or `fingerprint`, which
        takes as long as tracing and raises `Unexpected` where it is another program.
    """

    graph: Graph
    rows: Mapping[int, StackedRows]
    scan_splits: Mapping[int, tuple[int, ...]]
    layers: tuple[tuple[int, int], ...]
    piece_starts: Mapping[tuple[int, int], int]
    split_dims: tuple[int | None, ...]
    microbatches: int
    alike: Program = field(compare=False)
    trace: Callable[[], tuple[ClosedJaxpr, Program]] = field(compare=False)

    @property
    def core(self) -> ClosedJaxpr:
        """With its scans split; stages are ranges of its top-level equations."""
        return self.trace()[0]

    @property
    def source(self) -> Program:
        """As traced, its scans whole."""
        return self.trace()[1]

    @property
    def rules(self) -> Rules:
        """The factor rules of its operators."""
        return self.alike.rules

    @property
    def fingerprint(self) -> str:
        """Of the program."""
        return self.source.fingerprint

    @property
    def carried(self) -> int:
        """How many leading outputs of its graph are the leading inputs of the next step: of a step that is planned
        whole, since nothing in it is marked as its loss function."""
        return 0 if self.alike.marked else self.alike.state_inputs

    @property
    def is_whole(self) -> bool:
        """Whether it is not cut at all, nor its scans."""
        return len(self.layers) == 1 and not self.scan_splits

    @property
    def equations(self) -> int:
        """How many top-level equations the core has."""
        return self.layers[-1][1]

    @cached_property
    def pieces(self) -> tuple[tuple[int, ...], ...]:
        """Of each scan that was split the equations of its pieces."""
        scans = sorted({op.path[0] for op in self.graph.operators if len(op.path) == 3 and op.path[1] == -1})
        found: dict[int, list[int]] = {}
        for (position, _), start in sorted(self.piece_starts.items()):
            found.setdefault(position, []).append(next(scan for scan in scans if scan >= start))
        return tuple(map(tuple, found.values()))

    @cached_property
    def cutter(self) -> Cutter:
        """What cuts its graph."""
        return Cutter(self.graph, self.rows)

    @cached_property
    def folding_cutter(self) -> Cutter:
        """What cuts its graph as if several pieces of a scan in one range were one scan again: the program that
        `merge_scans` makes for stages of these ranges."""
        return Cutter(self.graph, self.rows, self.pieces)


def whole_program(program: Program) -> StagedProgram:
    """A program that is not to be cut: its scans whole, all of it one layer."""
    return StagedProgram(
        graph=program.graph, rows={}, scan_splits={}, piece_starts={}, microbatches=program.microbatches,
        layers=((0, len(open_jaxpr(program.core).eqns)),), split_dims=program.split_dims, alike=program,
        trace=lambda: (program.core, program),
    )  # fmt: skip


def staged_program(
    program: Program,
    *,
    layers: int = DEFAULT_LAYERS,
    exactly: bool = False,
    cuts: Sequence[int] = (),
    scan_splits: Mapping[int, Sequence[int]] | None = None,
    like: Sequence[StagedProgram] = (),
) -> StagedProgram:
    """Split the scans of a traced step's core and cluster its equations into layers.

    Args:
      program: traced at the size of one microbatch.
      layers: the most layers there may be; where the user ended layers (`meshwright.layer_boundary`), these are taken.
      exactly: whether there have to be so many, where the user ended none.
      cuts: equations of the core, its scans split, that begin a layer, in place of the user's.
      scan_splits: the trips of the pieces of each scan; None to cut scans so that each piece is about a layer, or where
        the user ended layers.
      like: the same step in other numbers of microbatches: this one is cut as the first of them that is made of the
        same equations, in place of all this.

    Raises:
      PlanError: for cuts or trips that are not of the program.
    """
    equations = _equations(program.core) if like else []
    for one in like:
        if equations != _equations(one.source.core):
            continue
        core, starts, splits = _split(program, one.scan_splits)
        if _equations(core) == _equations(one.core):
            cuts = [first for first, _ in one.layers[1:]]
            return _staged(program, core, starts, splits, layers=1, cuts=cuts)
    _check_memory(program)
    if scan_splits is None:
        scan_splits = _trips_of_scans(program, layers)
    core, starts, splits = _split(program, scan_splits)
    cuts = cuts or _boundaries(program, core, starts, splits)
    return _staged(program, core, starts, splits, layers=layers, cuts=cuts, exactly=exactly)


def _check_memory(program: Program) -> None:
    hosted = sorted(program.host_inputs)
    if hosted or program.host_outputs:
        name = program.input_names[hosted[0]] if hosted else "results"
        raise PlanError(
            refused="several stages", got=f"{name} kept in the host's memory",
            needed="arguments and results in the memory of devices: stages keep theirs there", where=name,
            try_="stages=1, or a step that moves nothing to jax.memory.Space.Host",
        )  # fmt: skip


def _equations(core: ClosedJaxpr) -> list[tuple[str, int]]:
    """What a core is made of: names, and how often a scan's body runs."""
    return [(one.primitive.name, one.params.get("length", 1)) for one in open_jaxpr(core).eqns]


def merge_scans(staged: StagedProgram, bounds: Sequence[int]) -> StagedProgram | None:
    """The program for stages that begin at `bounds`, with the pieces of a scan that lie in one stage made one again.

    Args:
      staged: with its scans in pieces.
      bounds: the first equation of every stage but the first.

    Returns:
      The program with the stages as its layers; None where a stage begins inside a piece.
    """
    old = list(open_jaxpr(staged.core).eqns)
    merged: dict[int, tuple[int, ...]] = {}
    piece_of: dict[tuple[int, int], int] = {}
    for position, trips in staged.scan_splits.items():
        found: list[int] = []
        for number, count in enumerate(trips):
            if number == 0 or staged.piece_starts[position, number] in bounds:
                found.append(0)
                piece_of[position, number] = len(found) - 1
            found[-1] += count
        merged[position] = tuple(found)
    core, starts, splits = _split(staged.source, merged)
    new = {id(equation): place for place, equation in enumerate(open_jaxpr(core).eqns)}
    whole = open_jaxpr(staged.source.core).eqns
    begins = {start: piece for piece, start in staged.piece_starts.items()}
    cuts = []
    for bound in bounds:
        if bound in begins:
            position, number = begins[bound]
            piece = (position, piece_of[position, number])
            place = starts[piece] if piece in starts else new.get(id(whole[position]))
        else:
            place = new.get(id(old[bound]))
        if place is None:
            return None
        cuts.append(place)
    layers = len(cuts) + 1
    return _staged(staged.source, core, starts, splits, layers=1 if layers == 1 else layers, cuts=cuts)


def _trips_of_scans(program: Program, layers: int) -> dict[int, tuple[int, ...]]:
    """How to cut the scans: one trip a layer where the user ended layers in the body, else by work."""
    marked = program.boundaries
    if not marked.before and not marked.scans:
        return trips_for_layers(program.graph, layers)
    equations = open_jaxpr(program.core).eqns
    return {position: (1,) * scan_parts(equations[position]).length for position in marked.scans}


def _boundaries(
    program: Program, core: ClosedJaxpr, starts: Starts, splits: Mapping[int, Sequence[int]]
) -> tuple[int, ...]:
    """The equations of `core` that begin a layer because the user said so."""
    marked = program.boundaries
    old, new = open_jaxpr(program.core).eqns, open_jaxpr(core).eqns
    places = {id(equation): place for place, equation in enumerate(new)}
    places = {number: places[id(equation)] for number, equation in enumerate(old) if id(equation) in places}
    places |= {position: starts[position, 0] for position in splits}
    # Conversions of operands of a split scan are gone: a layer that began with one begins with what is next.
    cuts = {
        min((place for number, place in places.items() if number >= cut), default=len(new))
        for cut in (*marked.before, *marked.scans, *(position + 1 for position in marked.scans))
    }
    cuts |= {starts[position, n] for position in marked.scans for n in range(len(splits.get(position, ())))}
    return tuple(cut for cut in sorted(cuts) if 0 < cut < len(new))


Starts = Mapping[tuple[int, int], int]


def _split(
    program: Program, scan_splits: Mapping[int, Sequence[int]]
) -> tuple[ClosedJaxpr, Starts, dict[int, tuple[int, ...]]]:
    splits = {position: tuple(trips) for position, trips in sorted(scan_splits.items()) if len(trips) > 1}
    if not splits:
        return program.core, {}, {}
    core, starts = split_with_starts(program.core, splits)
    return core, starts, splits


def _staged(
    program: Program,
    core: ClosedJaxpr,
    starts: Starts,
    splits: Mapping[int, tuple[int, ...]],
    *,
    layers: int,
    cuts: Sequence[int],
    exactly: bool = False,
) -> StagedProgram:
    graph = program.graph
    if splits:
        names = [graph.values[v].name for v in graph.inputs]
        losses = [0] if program.marked else []
        graph = build_graph(core, program.rules, parameters=graph.parameters, losses=losses, input_names=names)
    return StagedProgram(
        graph=graph, rows=stacked_rows(core), scan_splits=splits, piece_starts=starts,
        layers=cluster_layers(graph, len(open_jaxpr(core).eqns), at_most=layers, cuts=cuts, exactly=exactly),
        split_dims=program.split_dims, microbatches=program.microbatches, alike=program, trace=lambda: (core, program),
    )  # fmt: skip

"""Which stages hold the same: one of them is traced and counted for all.

What `stage_memory` counts follows from a stage's equations, their layouts, and what its update reads and writes. All of
that is here one value, in which variables are numbered in the order they are met: two stages of equal values are the
same programs, whatever their place, and hold the same. (What they send, and to whom, is looked up for each.)

Known limit: of derivative rules (`jax.custom_vjp`), which are traced anew at each use, only their place in the source
is compared.

Cost: one pass over the stage's equations, a twentieth of tracing and counting them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from ..._jax.jaxpr import ClosedJaxpr, Equation, is_literal, open_jaxpr
from ...program.graph import Path
from .slots import Role, Slot
from .stage_program import StageProgram
from .surroundings import Surroundings
from .update_program import Round, UpdateProgram


def likeness(core: ClosedJaxpr, stage: StageProgram, update: UpdateProgram, around: Surroundings) -> Hashable:
    """Equal for stages that hold the same on each device.

    Args:
      core: of the program, its scans split.
      stage: of the core.
      update: around it.
      around: of all stages.
    """
    return _of_core(core, stage), _of_update(stage, update, around)


def _of_core(core: ClosedJaxpr, stage: StageProgram) -> Hashable:
    cut, plan = stage.cut, stage.stage
    at = sorted({operator.path[0] for operator in cut.graph.operators})
    local = {whole: mine for mine, whole in enumerate(cut.values)}

    def place(equation: int) -> int:
        return bisect_left(at, equation)

    def placed(path: Path) -> Path:
        return (place(path[0]), *path[1:]) if path else ()

    # Runs at the top level count in the program's equations, others in those of what they are nested in.
    remat = tuple(
        (placed(path), runs if path else tuple((place(first), place(last)) for first, last in runs))
        for path, runs in plan.rematerialised
    )
    return (
        cut.fingerprint,
        _Described().equations([open_jaxpr(core).eqns[p] for p in at], {}),
        plan.mesh,
        tuple((operator.axes, operator.broadcast) for operator in plan.operators),
        tuple((local[value], spec) for value, spec in plan.settled if value in local),
        tuple((p.shape, p.use, p.storage, p.scattered) for p in plan.parameters),
        tuple((p.shape, p.spec) for p in plan.inputs),
        plan.gradient_exchange,
        remat,
        tuple(map(placed, plan.kept_inside)),
        cut.program_inputs,
        cut.program_outputs,
        tuple(sorted(local[value] for value, _ in stage.sent)),  # to whom is looked up
        stage.asynchronous,
    )


def _of_update(stage: StageProgram, update: UpdateProgram, around: Surroundings) -> Hashable:
    own = (*stage.parameters, *stage.inputs)
    programs = (update.prepare, *update.rounds, update.report)
    parameters = {update.direct(slot) for slot in stage.parameters}
    kept = sorted(slot.position for slot in update.kept)
    arguments = {index: place for place, index in enumerate(kept)}
    return (
        tuple((arguments.get(_or(update.direct(slot))), update.is_argument(slot)) for slot in own),
        tuple(
            (_shape(update.local_shape(slot)), update.specs[slot], index in parameters, index < update.state_inputs)
            for index in kept
            for slot in (Slot(Role.ARGUMENT, index),)
        ),
        tuple(None if one is None else _of_round(one, stage, update, around) for one in programs),
    )


def _or(index: int | None) -> int:
    return -1 if index is None else index


def _of_round(program: Round, stage: StageProgram, update: UpdateProgram, around: Surroundings) -> Hashable:
    own = (*stage.parameters, *stage.inputs)
    operands = dict(zip(own, around.operands_of(stage.number), strict=True))
    held = [one.parameter for one in stage.cut.parameters]

    def atoms(slot: Slot) -> Sequence[Any]:
        match slot.role:
            case Role.PARAMETER | Role.INPUT:
                return (operands[slot],)
            case Role.ARGUMENT:
                return (around.invars[slot.position],)
            case Role.SUM | Role.JOINED | Role.COLLECTED:
                return (around.results[slot.position],)
            case Role.GRADIENT:
                return (around.gradients[held[slot.position]],)
            case Role.SYNCHRONISED:
                return (around.gradients[slot.position],)
            case Role.BUNDLE:
                return update.bundle(slot)
            case _:
                return (around.outvars[slot.position],)

    def place(slot: Slot) -> Hashable:
        """What tells a slot from others of its role, in words that hold for other stages."""
        if slot.role is Role.GRADIENT:
            return slot.position
        if slot.role is Role.SYNCHRONISED:
            mine = held.index(slot.position) if slot.position in held else None
            return mine, slot.source == stage.number, around.is_tied(slot.position)
        if slot.role is Role.BUNDLE:
            large = slot.content.isdecimal()
            return None if large else slot.content  # whose it is only matters for how much arrives from others
        return slot.position if slot.role in (Role.SUM, Role.JOINED, Role.COLLECTED) else None

    def described(slots: Iterable[Slot]) -> Hashable:
        found = []
        for slot in slots:
            core = slot.role in (Role.PARAMETER, Role.INPUT)
            shape = stage.local_shape(slot) if core else update.local_shape(slot)
            spec = stage.specs.get(slot) if core else update.specs.get(slot)
            found.append((slot.role, _shape(shape), spec, place(slot)))
        return tuple(found)

    known: dict[Any, int] = {}
    arrived = set(update.arrived(slot for slot in program.inputs if slot.role is Role.BUNDLE))
    for slot in program.inputs:
        for var in atoms(slot):
            if slot.role is not Role.BUNDLE or var in arrived:
                known.setdefault(var, len(known))
    wanted = [atom for slot in program.outputs for atom in atoms(slot)]
    equations = around.needed(wanted, [*known, *around.gradients])
    number = _Described(
        lambda var: (around.rows[var].dim, around.shape(var, stage.number)) if var in around.rows else None,
        lambda var: around.contributions[var][0] if var in around.contributions else None,
    )
    donated = set(update.donated(program)) if program in update.rounds else set()
    return (
        described(program.inputs),
        described(slot for slot in program.inputs if slot.role is Role.BUNDLE and slot.source == stage.number),
        described(program.outputs),
        tuple(slot in donated for slot in program.inputs),
        number.equations(equations, known),
        tuple(number.atom(atom, known) for atom in wanted),
    )


def _shape(array: Any) -> Hashable:
    return tuple(array.shape), array.dtype


class _Described:
    """Equations as values, equal for equations that are the same but for the names of their variables.

    Args:
      more: of a variable, what else is to be told of it.
    """

    def __init__(self, *more: Callable[[Any], Hashable]) -> None:
        self._more = more
        self._bodies: dict[int, Hashable] = {}

    def equations(self, equations: Sequence[Equation], known: dict[Any, int]) -> Hashable:
        """Equations in order; `known` numbers variables and learns those it does not."""
        found = []
        for equation in equations:
            operands = tuple(self.atom(atom, known) for atom in equation.invars)
            results = tuple(self.atom(var, known) for var in equation.outvars)
            params = tuple((name, self._param(value)) for name, value in sorted(equation.params.items()))
            found.append((equation.primitive.name, params, operands, results))
        return tuple(found)

    def atom(self, atom: Any, known: dict[Any, int]) -> Hashable:
        """An operand or a result."""
        shape = (getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None))
        if is_literal(atom):
            return "literal", str(atom.val), shape
        return known.setdefault(atom, len(known)), shape, *(more(atom) for more in self._more)

    def _param(self, value: Any) -> Hashable:
        """A parameter of an equation; of a function its place in the source, since every trace makes new ones."""
        inner = open_jaxpr(value)
        if hasattr(inner, "eqns"):
            if id(inner) not in self._bodies:
                body, known = _Described(), {}
                inputs = tuple(body.atom(var, known) for var in (*inner.constvars, *inner.invars))
                made = body.equations(inner.eqns, known)
                outputs = tuple(body.atom(atom, known) for atom in inner.outvars)
                self._bodies[id(inner)] = _source(inner), inputs, made, outputs
            return self._bodies[id(inner)]
        if isinstance(value, (tuple, list)):
            return tuple(self._param(one) for one in value)
        if callable(value) or hasattr(value, "debug_info") or type(value).__hash__ in (None, object.__hash__):
            return type(value).__name__, getattr(value, "__name__", None), _source(value)
        return value


def _source(traced: Any) -> str | None:
    """Where a traced function is written."""
    return getattr(getattr(traced, "debug_info", None), "func_src_info", None)

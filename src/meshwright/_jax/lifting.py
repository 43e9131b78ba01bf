"""Effects lifted out of a program: what it prints and calls becomes results of it, which are *replayed* afterwards.

`jax.debug.print`, `jax.debug.callback` and `io_callback` without results that are read are equations without results.
A program that is split over devices cannot run them as they stand: each device would run them on its shard, stages and
microbatches would run them in no order. So the operands of each become results of the program, which then is pure, and
is planned and split as any other. After a step the effects run in the order of the program, on one device, on whole
values.

What an effect stands in decides what its operands become: in a `scan` they are stacked, a row for each trip; in a
`cond` they come with the index of the branch, zeros for branches not taken; in a loss function (`value_and_grad`) they
are auxiliary results with a dim of one in front, along which microbatches are put side by side. Bodies of
`jax.checkpoint` hand them out like any result. All of these compose.

What cannot be lifted is refused by name and line: effects in a `while` loop, the number of whose trips is not known;
callbacks whose results are read, which would have to run in the middle of the step; effects in a function with a
derivative of its own, inside a loss function, since its rule runs in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
from jax import lax

from .effects import (
    NAMES,
    NO_EFFECTS,
    Effects,
    Lifted,
    first_effect,
    in_custom_derivative,
    outside_effects,
    refusal,
)
from .grad import MarkedCall, value_and_grad_p
from .jaxpr import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Var,
    bind,
    consts_of,
    evaluate,
    hoist_consts,
    is_dropped,
    is_inlined,
    is_literal,
    is_remat,
    open_jaxpr,
    scan_parts,
    source_line,
    user_context,
    whole_arrays,
)
from .manual import is_shard_map
from .random import is_key
from .unrolled import Level, Series, series_in

_CUSTOM = ("custom_jvp_call", "custom_vjp_call")


def lift_effects(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, Effects]:
    """The same program without effects, the operands of these as further results.

    Args:
      closed: a program, with `jit` calls or without.

    Raises:
      PlanError: where an effect cannot be lifted, by name and line.
    """
    return _lifted(closed, _Place())


def lift_from_loss(
    call: MarkedCall, microbatches: int = 1, whole: Sequence[Lifted] = ()
) -> tuple[MarkedCall, Effects]:  # fmt: skip
    """As `lift_effects`, of the loss function of a marked call. Its layer boundaries stay where they are.

    Args:
      call: at the size of one microbatch.
      microbatches: of a step: so many rows its effects are run on.
      whole: what was lifted from it at the full batch.
    """
    differentiated = call.num_consts < len(open_jaxpr(call.jaxpr).invars)
    known = {(one.primitive, one.line): one.levels for one in whole}
    place = _Place(in_loss=True, rows=True, differentiated=differentiated, known=known)
    jaxpr, effects = _lifted(call.jaxpr, place)

    def run(values: Sequence[Any], loss: Effects | None) -> None:
        _repeat(effects, values, loss, length=microbatches, reverse=False)

    lifted = MarkedCall(jaxpr=jaxpr, num_consts=call.num_consts, shapes=call.shapes)
    return lifted, replace(effects, run=run)


def _repeat(effects: Effects, values: Sequence[Any], loss: Effects | None, *, length: int, reverse: bool) -> None:
    """Run effects once for each row of values."""

    def trip(carry: Any, rows: Sequence[Any]) -> tuple[Any, None]:
        effects.run(rows, loss)
        return carry, None

    lax.scan(trip, 0, list(values), length=length, reverse=reverse)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a program stands.

    Args:
      in_loss: in a loss function.
      rows: at the top of one: what is lifted gets a dim of one in front.
      differentiated: whether derivatives are taken of it.
      in_remat: in a `jax.checkpoint` region.
      nested: in a loop or branch.
      known: as of `series_in`.
    """

    in_loss: bool = False
    rows: bool = False
    differentiated: bool = False
    in_remat: bool = False
    nested: bool = False
    known: Mapping[tuple[str, str], tuple[Level, ...]] = field(default_factory=dict)

    def inside(self, *, remat: bool = False) -> _Place:
        in_remat = self.in_remat or (remat and self.in_loss)
        return replace(self, rows=False, in_remat=in_remat, nested=True)


def _lifted(closed: ClosedJaxpr, place: _Place) -> tuple[ClosedJaxpr, Effects]:
    if not any(map(outside_effects, open_jaxpr(closed).eqns)):
        return closed, NO_EFFECTS
    return _Lifting(closed, place).result()


class _Lifting:
    """One program on its way to be without effects."""

    def __init__(self, closed: ClosedJaxpr, place: _Place) -> None:
        self._place = place
        self._top: Jaxpr = open_jaxpr(closed)
        self._constvars: list[Any] = list(self._top.constvars)
        self._consts: list[Any] = list(consts_of(closed))
        self._equations: list[Equation] = []
        self._payload: list[Any] = []
        self._runs: list[tuple[int, Effects]] = []
        self._env: dict[Any, Any] = {}
        flat: list[Equation] = []
        calls: dict[Any, Any] = {}
        self._flatten(self._top, calls, flat, fresh=False)
        outvars = _all(calls, self._top.outvars)
        self._live = _live(flat, outvars)
        self._gone: set[Any] = set()
        for one in series_in(flat, place.known):
            series = one if isinstance(one, Series) else None
            equation: Equation = one if series is None else series.equation.replace(invars=list(series.atoms))
            invars = _all(self._env, equation.invars)
            if any(not is_literal(a) and a in self._gone for a in invars):
                self._gone.update(equation.outvars)
                continue
            if any(a is not b for a, b in zip(invars, equation.invars, strict=True)):
                equation = equation.replace(invars=invars)
            if series is not None:
                self._lift_call(equation, series)
            elif outside_effects(equation):
                self._lift(equation)
            else:
                self._equations.append(equation)
        self._outvars = _all(self._env, outvars)

    def result(self) -> tuple[ClosedJaxpr, Effects]:
        """The program and its effects."""
        jaxpr = self._top.replace(
            constvars=self._constvars, eqns=self._equations, outvars=[*self._outvars, *self._payload],
            effects=frozenset(effect for equation in self._equations for effect in equation.effects),
            debug_info=self._top.debug_info.with_unknown_names(),
        )  # fmt: skip
        runs = tuple(self._runs)

        def run(values: Sequence[Any], loss: Effects | None) -> None:
            for start, effects in runs:
                effects.run(values[start : start + effects.count], loss)

        lifted = tuple(one for _, effects in runs for one in effects.lifted)
        return ClosedJaxpr(jaxpr, self._consts), Effects(count=len(self._payload), run=run, lifted=lifted)

    def _flatten(self, jaxpr: Jaxpr, env: dict[Any, Any], found: list[Equation], *, fresh: bool) -> None:
        """The equations of a program, calls that have effects written in line."""
        for equation in jaxpr.eqns:
            invars = _all(env, equation.invars)
            body = self._call_body(equation) if outside_effects(equation) else None
            if body is None:
                outvars = equation.outvars
                if fresh:
                    # A jaxpr object may be called twice: each call needs variables of its own.
                    outvars = [var if is_dropped(var) else Var(var.aval) for var in outvars]
                    env.update(zip(equation.outvars, outvars, strict=True))
                found.append(equation.replace(invars=invars, outvars=outvars) if env else equation)
                continue
            inner = open_jaxpr(body)
            inner_env: dict[Any, Any] = dict(zip(inner.invars, invars, strict=True))
            for var, const in zip(inner.constvars, consts_of(body), strict=True):
                inner_env[var] = self._const(var.aval, const)
            self._flatten(inner, inner_env, found, fresh=True)
            env.update(zip(equation.outvars, _all(inner_env, inner.outvars), strict=True))

    def _const(self, aval: Any, value: Any) -> Any:
        self._constvars.append(Var(aval))
        self._consts.append(value)
        return self._constvars[-1]

    def _call_body(self, equation: Equation) -> Any:
        """What a call is when written in line, None for other equations."""
        params = equation.params
        if is_shard_map(equation):
            return whole_arrays(equation)
        if is_inlined(equation):
            return params.get("jaxpr", params.get("call_jaxpr"))
        if equation.primitive.name in _CUSTOM:
            if self._place.differentiated:
                raise in_custom_derivative(first_effect(params["call_jaxpr"]))
            return params["call_jaxpr"]
        return None

    def _lift(self, equation: Equation) -> None:
        """Take the effects out of an equation."""
        name = equation.primitive.name
        if name in NAMES:
            self._lift_call(equation)
        elif name == "scan":
            self._lift_scan(equation)
        elif name == "cond":
            self._lift_cond(equation)
        elif is_remat(equation):
            self._lift_remat(equation)
        elif equation.primitive is value_and_grad_p:
            self._lift_loss(equation)
        elif name == "while":
            raise refusal(
                first_effect(equation.params["cond_jaxpr"]) or first_effect(equation.params["body_jaxpr"]),
                "a while loop, whose number of trips is not known before it runs", "loops of a known number of trips",
                "jax.lax.scan, or fori_loop with bounds that are Python numbers; or returning the value",
            )  # fmt: skip
        elif name == "check":
            raise refusal(
                equation, "a check that is not functionalised, which jax.jit refuses too",
                "errors that are results of the step", "checkify.checkify(step), or returning the condition",
            )  # fmt: skip
        else:
            raise refusal(
                equation, "an effect on a device, or of a kind that is not known",
                f"{', '.join(NAMES.values())}, in loops of known length, branches and checkpointed regions",
                "leaving it out of the step",
            )  # fmt: skip

    def _lift_call(self, equation: Equation, series: Series | None = None) -> None:
        """Lift a call, or a series of calls of which the equation has the operands."""
        if any(var in self._live for var in equation.outvars):
            raise refusal(
                equation, "a callback whose result the step reads",
                "one whose result nothing reads: the step runs on many devices, and its effects after it",
                "jax.pure_callback, for a function without effects; or calling it before the step and handing its "
                "result in as an argument",
            )  # fmt: skip
        self._gone.update(equation.outvars)
        atoms = list(dict.fromkeys(a for a in equation.invars if not is_literal(a)))
        kinds: dict[Any, str] = {}
        if any(is_key(a.aval) for a in atoms):

            def words(*xs: Any) -> list[Any]:
                # There are no keys of zeros, for a branch that is not taken.
                kinds.update((a, str(jax.random.key_impl(x))) for a, x in zip(atoms, xs, strict=True) if is_key(x))
                return [jax.random.key_data(x) if is_key(x) else x for x in xs]

            words_of = self._splice(equation, words, atoms)
        else:
            words_of = atoms
        called = _in_order(equation)

        def run(values: Sequence[Any], loss: Effects | None) -> None:
            del loss
            given = dict(zip(atoms, values, strict=True))
            for atom, kind in kinds.items():
                given[atom] = jax.random.wrap_key_data(given[atom], impl=kind)
            operands = [a.val if is_literal(a) else given[a] for a in equation.invars]
            _run_series(called, operands, () if series is None else series.levels)

        one = Lifted(
            primitive=equation.primitive.name, line=source_line(equation), in_loss=self._place.in_loss,
            in_remat=self._place.in_remat, levels=() if series is None else series.levels,
            times=1 if series is None else prod(series.sizes),
        )  # fmt: skip
        self._add(words_of, Effects(count=len(words_of), run=run, lifted=(one,)), equation)

    def _lift_scan(self, equation: Equation) -> None:
        parts = scan_parts(equation)
        body, effects = _lifted(parts.body, self._place.inside())
        first_xs = parts.num_consts + parts.num_carry

        def scanned(*operands: Any) -> list[Any]:
            consts, carry = operands[: parts.num_consts], operands[parts.num_consts : first_xs]

            def trip(carried: Any, row: Any) -> tuple[list[Any], list[Any]]:
                outs = evaluate(body, *consts, *carried, *row)
                return outs[: parts.num_carry], outs[parts.num_carry :]

            last, stacked = lax.scan(
                trip, list(carry), list(operands[first_xs:]), length=parts.length, reverse=parts.reverse,
                unroll=parts.unroll,
            )  # fmt: skip
            return [*last, *stacked]

        def run(values: Sequence[Any], loss: Effects | None) -> None:
            _repeat(effects, values, loss, length=parts.length, reverse=parts.reverse)

        made = self._replace(equation, scanned)
        lifted = tuple(replace(one, times=one.times * parts.length) for one in effects.lifted)
        self._add(made, replace(effects, run=run, lifted=lifted), equation)

    def _lift_cond(self, equation: Equation) -> None:
        lifted = [_lifted(branch, self._place.inside()) for branch in equation.params["branches"]]
        results = len(equation.outvars)
        handed_out = [
            [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in open_jaxpr(branch).outvars[results:]]
            for branch, _ in lifted
        ]

        def taken(number: int, operands: Sequence[Any]) -> list[Any]:
            outs = evaluate(lifted[number][0], *operands)
            zeros = [[jax.numpy.zeros(one.shape, one.dtype) for one in shapes] for shapes in handed_out]
            zeros[number] = outs[results:]
            return [*outs[:results], *(x for part in zeros for x in part)]

        def chosen(index: Any, *operands: Any) -> list[Any]:
            index = index.astype("int32")
            branches = [lambda *xs, number=number: taken(number, xs) for number in range(len(lifted))]
            return [*lax.switch(index, branches, *operands), index]

        def run(values: Sequence[Any], loss: Effects | None) -> None:
            *values, index = values
            branches, start = [], 0
            for _, effects in lifted:
                given = values[start : start + effects.count]
                branches.append(lambda effects=effects, given=given: effects.run(given, loss))
                start += effects.count
            lax.switch(index, branches)

        made = self._replace(equation, chosen)
        names = tuple(one for _, effects in lifted for one in effects.lifted)
        self._add(made, Effects(count=len(made), run=run, lifted=names), equation)

    def _lift_remat(self, equation: Equation) -> None:
        body = equation.params["jaxpr"]
        closed = ClosedJaxpr(open_jaxpr(body), consts_of(body))
        lifted, effects = _lifted(closed, self._place.inside(remat=True))
        hoisted = [
            self._const(var.aval, const)
            for var, const in zip(open_jaxpr(lifted).constvars, consts_of(lifted), strict=True)
        ]
        inner = open_jaxpr(hoist_consts(lifted))
        more = [Var(atom.aval) for atom in inner.outvars[len(equation.outvars) :]]
        self._equations.append(
            equation.replace(
                invars=[*hoisted, *equation.invars],
                outvars=[*equation.outvars, *more],
                params=equation.params | {"jaxpr": inner},
                effects=inner.effects,
            )
        )
        self._add(more, effects, equation)

    def _lift_loss(self, equation: Equation) -> None:
        call = MarkedCall(
            jaxpr=equation.params["jaxpr"], num_consts=equation.params["num_consts"],
            shapes=tuple(tuple(a.aval.shape) for a in equation.invars),
        )  # fmt: skip
        lifted, effects = lift_from_loss(call)
        if not self._place.in_loss and not self._place.nested:  # microbatches may be made of it
            full = effects
            effects = replace(full, run=lambda values, loss: (loss or full).run(values, None))
        results = len(open_jaxpr(call.jaxpr).outvars)
        more = [Var(atom.aval) for atom in open_jaxpr(lifted.jaxpr).outvars[results:]]
        self._equations.append(
            equation.replace(
                outvars=[*equation.outvars[:results], *more, *equation.outvars[results:]],
                params=equation.params | {"jaxpr": lifted.jaxpr},
                effects=open_jaxpr(lifted.jaxpr).effects,
            )
        )
        self._add(more, effects, equation)

    def _add(self, atoms: Sequence[Any], effects: Effects, origin: Equation) -> None:
        """Hand out the operands of what was lifted out of an equation."""
        if self._place.rows and atoms:
            atoms = self._splice(origin, _with_dim_in_front, atoms)
        self._runs.append((len(self._payload), effects))
        self._payload.extend(atoms)

    def _replace(self, equation: Equation, function: Callable[..., list[Any]]) -> Sequence[Any]:
        """Put a function of its operands in the place of an equation; its further results."""
        made = self._splice(equation, function, equation.invars)
        self._env.update(zip(equation.outvars, made, strict=False))
        return made[len(equation.outvars) :]

    def _splice(self, origin: Equation, function: Callable[..., list[Any]], atoms: Sequence[Any]) -> list[Any]:
        """The results of a function of values of the program, whose equations carry the line of `origin`."""
        with user_context(origin):
            made = jax.make_jaxpr(function)(*(_like(a.aval) for a in atoms))
        inner = open_jaxpr(made)
        env: dict[Any, Any] = dict(zip(inner.invars, atoms, strict=True))
        for var, const in zip(inner.constvars, consts_of(made), strict=True):
            env[var] = self._const(var.aval, const)
        for one in inner.eqns:
            # JAX remembers what it traced: each use needs variables of its own.
            outvars = [var if is_dropped(var) else Var(var.aval) for var in one.outvars]
            self._equations.append(one.replace(invars=_all(env, one.invars), outvars=outvars))
            env.update(zip(one.outvars, outvars, strict=True))
        return _all(env, inner.outvars)


def _run_series(called: Equation, operands: Sequence[Any], levels: Sequence[Level]) -> None:
    """Call for each row of the operands, the outermost level first."""
    if not levels:
        bind(called, *operands)
        return
    level, *rest = levels
    rows = {n: lax.transpose(operands[n], dims) for n, dims in enumerate(level) if dims is not None}

    def trip(carry: Any, row: Mapping[int, Any]) -> tuple[Any, None]:
        _run_series(called, [row.get(n, operand) for n, operand in enumerate(operands)], rest)
        return carry, None

    lax.scan(trip, 0, rows)


def _in_order(equation: Equation) -> Equation:
    """A callback that runs after those before it, whether the user asked for that or not, and on any device."""
    params = dict(equation.params)
    if "effect" in params:
        ordered = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None, ordered=True))()
        params["effect"] = open_jaxpr(ordered).eqns[0].params["effect"]
    if "ordered" in params:
        params["ordered"] = True
    if "sharding" in params:
        params["sharding"] = None
    return equation.replace(params=params)


def _with_dim_in_front(*xs: Any) -> list[Any]:
    return [lax.expand_dims(x, (0,)) for x in xs]


def _like(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _all(env: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    return [a if is_literal(a) else env.get(a, a) for a in atoms]


def _live(equations: Sequence[Equation], outvars: Sequence[Any]) -> set[Any]:
    """The variables that a result of the program, or an operand of an effect, depends on."""
    live = {a for a in outvars if not is_literal(a)}
    for equation in reversed(equations):
        if outside_effects(equation) or any(var in live for var in equation.outvars):
            live.update(a for a in equation.invars if not is_literal(a))
    return live

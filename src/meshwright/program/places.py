"""Where the examples of a microbatch stand in the whole batch: what draws and counts have to know.

A draw of the shape of the batch (dropout, noise), or keys split one for each example, have to be those that the whole
batch would have: other examples, other numbers, and the same ones in any number of microbatches. So does a count of the
examples that is used as a number (`fold_in(key, arange(batch))`, a weight that falls along the batch). A count that is
an index into an array of the batch (`x[arange(batch), label]`) has to count the microbatch instead.

The program of a microbatch and that of the whole batch are the same equations in other shapes. Where the shape of a
draw or count differs, `placed` writes the whole shape into the equation, and `evaluate_local` draws the elements where
the microbatch's examples stand, as `microbatch_rows` says. No key is changed: draws that do not grow with the batch
(noise of weights, dropped layers) are the same in every microbatch, and a key that comes back from the loss is the one
that went in.

Keys of another kind than threefry2x32 (rbg) draw other numbers in parts than at once, which `notes_on_draws` says.

Known limits, all refused by name and line: a count that is both a number and an index, draws that grow inside of a
function with its own derivative, loops over the examples that carry a key from one to the next, and draws whose extent
is no multiple of the batch. A dim into which the batch was merged (batch x tokens)
is taken to have the batch as its major part, as `reshape` merges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from .._jax.jaxpr import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    consts_of,
    is_literal,
    is_remat,
    open_jaxpr,
    scan_parts,
    source_line,
)
from .._jax.random import is_drawn_by_position, is_key, of_whole_batch
from ..errors import PlanError
from .rules import Rules

_DRAWS = ("random_bits", "random_split")
# Generators of which no part can be drawn by itself, and steps of one that are written out.
_IN_ONE_PIECE = ("rng_bit_generator", "rng_uniform", "threefry2x32", "random_gamma")

# What makes an index of other indices; all else makes a number of them.
INDEX_ARITHMETIC = frozenset(
    """add add_any and broadcast_in_dim clamp concatenate convert_element_type copy eq expand_dims ge gt le lt max min
    ne not or rem reshape select_n squeeze stop_gradient sub transpose""".split()  # noqa: SIM905 (a table)
)
# Operators that read at indices: the first operand is read, or written to; the indices come after it.
_INDEXED = ("gather", "dynamic_slice", "dynamic_update_slice")


def placed(full: ClosedJaxpr, small: ClosedJaxpr, microbatches: int, rules: Rules) -> ClosedJaxpr:
    """The program of a microbatch whose draws and counts know the whole batch.

    Args:
      full: of the whole batch.
      small: of a microbatch: the same equations in other shapes.
      microbatches: how many there are.
      rules: which know the derivatives of functions that have their own.

    Raises:
      PlanError: for draws and counts that cannot be those of the whole batch.
    """
    return ClosedJaxpr(_Placing(microbatches, rules).program(open_jaxpr(full), open_jaxpr(small)), consts_of(small))


def notes_on_draws(core: ClosedJaxpr) -> tuple[str, ...]:
    """What a plan has to say of a program's random numbers: that those of some keys are others than on one device."""
    found: dict[str, None] = {}

    def look(jaxpr: Jaxpr) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "random_bits" and not is_drawn_by_position(equation.invars[0].aval):
                found.setdefault(source_line(equation) or "the loss function")
            inside = (*_bodies(equation).values(), equation.params.get("call_jaxpr"))
            for body in inside:
                for one in body if isinstance(body, tuple) else (body,):
                    if one is not None:
                        look(open_jaxpr(one))

    look(open_jaxpr(core))
    if not found:
        return ()
    return (
        f"random numbers drawn at {', '.join(found)} are others than on one device where devices or microbatches have "
        'parts of them: only keys of the kind "threefry2x32" with jax_threefry_partitionable draw parts as one device '
        "draws them",
    )


class _Placing:
    def __init__(self, microbatches: int, rules: Rules) -> None:
        self._count = microbatches
        self._rules = rules
        self._in_derivative = False  # inside a function that has its own: those in it are not differentiated again

    def program(self, full: Jaxpr, small: Jaxpr) -> Jaxpr:
        if [e.primitive.name for e in full.eqns] != [e.primitive.name for e in small.eqns]:
            drawing = next((e for e in small.eqns if _draws(e)), None)
            if drawing is not None:
                raise self._refusal(drawing, "random numbers in a program whose operations change with the batch size")
            return small
        equations = [self._equation(a, b, full, small) for a, b in zip(full.eqns, small.eqns, strict=True)]
        if all(a is b for a, b in zip(equations, small.eqns, strict=True)):
            return small
        return small.replace(eqns=equations, debug_info=small.debug_info.with_unknown_names())

    def _equation(self, full: Equation, small: Equation, a: Jaxpr, b: Jaxpr) -> Equation:
        name, params = small.primitive.name, small.params
        if name in _DRAWS and params["shape"] != full.params["shape"]:
            self._check_grown(small, full.params["shape"], params["shape"])
            return of_whole_batch(small, full.params["shape"])
        if name == "iota":
            along = params["dimension"]
            grows = full.params["shape"][along] != params["shape"][along]
            if grows and self._is_number(small.outvars[0], a, b, small):
                self._check_grown(small, full.params["shape"], params["shape"], along)
                return of_whole_batch(small, full.params["shape"])
            return small
        if name in _IN_ONE_PIECE and _shapes(full.outvars) != _shapes(small.outvars) and not _has_keys(small):
            raise self._refusal(small, f"{name} of the shape of the batch, of which no part is drawn by itself")
        if name in ("custom_jvp_call", "custom_vjp_call"):
            self._check_own_derivative(full, small)
            return small
        bodies = _bodies(small)
        if not bodies:
            return small
        if name == "scan" and scan_parts(full).length != scan_parts(small).length:
            self._check_loop_over_examples(small)
        theirs = _bodies(full)
        changed: dict[str, Any] = {}
        for key, body in bodies.items():
            ours, whole = (body, theirs[key]) if isinstance(body, tuple) else ((body,), (theirs[key],))
            made = tuple(
                _with(one, self.program(open_jaxpr(x), open_jaxpr(one))) for x, one in zip(whole, ours, strict=True)
            )
            if any(x is not y for x, y in zip(made, ours, strict=True)):
                changed[key] = made if isinstance(body, tuple) else made[0]
        return small.replace(params={**params, **changed}) if changed else small

    def _check_own_derivative(self, full: Equation, small: Equation) -> None:
        """Refuse a function with a derivative of its own that draws numbers of the shape of the batch, or counts the
        examples, in either pass: JAX evaluates it by itself."""
        pairs = [(full.params["call_jaxpr"], small.params["call_jaxpr"])]
        if not self._in_derivative and any(jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in small.invars):
            try:
                ours, theirs = self._rules.derivative(full), self._rules.derivative(small)
                pairs += [(ours.forward, theirs.forward), (ours.backward, theirs.backward)]
            except (TypeError, ValueError):  # it is not differentiated
                pass
        outermost, self._in_derivative = not self._in_derivative, True
        try:
            inner = [self.program(open_jaxpr(a), open_jaxpr(b)) for a, b in pairs]
        finally:
            self._in_derivative = not outermost
        placed = next((e for program in inner for e in program.eqns if "whole" in e.params), None)
        if placed is not None:
            raise self._refusal(
                placed,
                "random numbers or positions of the shape of the batch in a function with a derivative of its own",
            )

    def _check_grown(
        self, small: Equation, whole: Sequence[int], shape: Sequence[int], along: int | None = None
    ) -> None:
        grown = [d for d, (x, y) in enumerate(zip(whole, shape, strict=True)) if x != y and along in (None, d)]
        if len(grown) > 1:
            raise self._refusal(small, f"random numbers of shape {tuple(whole)}, which has the batch in several dims")
        if any(whole[d] != self._count * shape[d] for d in grown):
            raise self._refusal(
                small, f"random numbers or positions of shape {tuple(whole)}, where a microbatch has {tuple(shape)}"
            )

    def _check_loop_over_examples(self, small: Equation) -> None:
        """Refuse a loop over the examples whose random numbers depend on the loop's own state."""
        parts = scan_parts(small)
        body = open_jaxpr(parts.body)
        carried = set(body.invars[parts.num_consts : parts.num_consts + parts.num_carry])
        for equation in body.eqns:
            if any(not is_literal(atom) and atom in carried for atom in equation.invars):
                if _draws(equation):
                    raise self._refusal(equation, "a loop over the examples that draws from a key it carries")
                carried.update(equation.outvars)

    def _is_number(self, var: Any, full: Jaxpr, small: Jaxpr, origin: Equation) -> bool:
        """Whether a count of the examples is used as a number and not as an index into arrays of the batch."""
        kinds, left = _uses(var, full, small)
        if left:
            kinds.add("number")
        if len(kinds) > 1:
            raise self._refusal(origin, "positions in the batch that are both an index and a number")
        return kinds == {"number"}

    def _refusal(self, equation: Equation, got: str) -> PlanError:
        return PlanError(
            refused=f"microbatches={self._count}", got=got,
            needed="numbers that each microbatch can make as the whole batch has them",
            where=source_line(equation) or "the loss function",
            try_="microbatches=1, or making them before the loss function, where they are cut with the batch",
        )  # fmt: skip


def _uses(var: Any, full: Jaxpr, small: Jaxpr) -> tuple[set[str], set[int]]:
    """What a count of the examples is used as ("index" into arrays of the batch, "number"), and the program's results
    that hold it."""
    kinds: set[str] = set()
    waiting, seen = [var], {var}
    while waiting:
        one = waiting.pop()
        for theirs, equation in zip(full.eqns, small.eqns, strict=True):
            places = [i for i, atom in enumerate(equation.invars) if not is_literal(atom) and atom is one]
            if not places:
                continue
            name, made = equation.primitive.name, set[int]()
            inside = list(_inside(theirs, equation))
            if (name in _INDEXED or name.startswith("scatter")) and min(places) > 0:
                grows = _shapes(theirs.invars[:1]) != _shapes(equation.invars[:1])
                kinds.add("index" if grows else "number")
            elif name in INDEX_ARITHMETIC:
                made = set(range(len(equation.outvars)))
            elif inside:
                for a, b, first in inside:
                    for place in places:
                        if 0 <= place - first < len(b.invars):
                            found, results = _uses(b.invars[place - first], a, b)
                            kinds |= found
                            made |= {i for i in results if i < len(equation.outvars)}
            else:
                kinds.add("number")
            fresh = [out for i, out in enumerate(equation.outvars) if i in made and out not in seen]
            waiting += fresh
            seen.update(fresh)
    return kinds, {i for i, atom in enumerate(small.outvars) if not is_literal(atom) and atom in seen}


def _inside(full: Equation, small: Equation) -> Iterator[tuple[Jaxpr, Jaxpr, int]]:
    """The programs inside an equation, in both sizes, and which of its operands is the first that each takes."""
    name, params = small.primitive.name, small.params
    if name in ("custom_jvp_call", "custom_vjp_call"):
        pairs = [(full.params["call_jaxpr"], params["call_jaxpr"], 0)]
    elif name == "while":
        pairs = [
            (full.params["cond_jaxpr"], params["cond_jaxpr"], params["body_nconsts"]),
            (full.params["body_jaxpr"], params["body_jaxpr"], params["cond_nconsts"]),
        ]
    elif name == "cond":
        pairs = [(a, b, 1) for a, b in zip(full.params["branches"], params["branches"], strict=True)]
    else:
        pairs = [(full.params[key], body, 0) for key, body in _bodies(small).items()]
    for a, b, first in pairs:
        yield open_jaxpr(a), open_jaxpr(b), first


def _draws(equation: Equation) -> bool:
    """Whether an equation, or one inside it, draws random numbers or makes keys."""
    if equation.primitive.name.startswith(("random_", "rng_", "threefry")):
        return True
    inside = [*_bodies(equation).values(), equation.params.get("call_jaxpr")]
    programs = [one for body in inside if body is not None for one in (body if isinstance(body, tuple) else (body,))]
    return any(_draws(inner) for program in programs for inner in open_jaxpr(program).eqns)


def _bodies(equation: Equation) -> dict[str, Any]:
    """The programs of a loop, branch or checkpoint, by the name of the parameter."""
    name, params = equation.primitive.name, equation.params
    if name == "scan" or is_remat(equation):
        return {"jaxpr": params["jaxpr"]}
    if name == "cond":
        return {"branches": params["branches"]}
    if name == "while":
        return {"cond_jaxpr": params["cond_jaxpr"], "body_jaxpr": params["body_jaxpr"]}
    return {}


def _with(program: Any, jaxpr: Jaxpr) -> Any:
    """A closed or bare program with other equations."""
    if jaxpr is open_jaxpr(program):
        return program
    return ClosedJaxpr(jaxpr, consts_of(program)) if hasattr(program, "consts") else jaxpr


def _has_keys(equation: Equation) -> bool:
    """Whether it draws from keys that are one for each element."""
    return any(is_key(atom.aval) and atom.aval.shape for atom in equation.invars)


def _shapes(atoms: Sequence[Any]) -> list[Any]:
    return [getattr(atom.aval, "shape", ()) for atom in atoms]

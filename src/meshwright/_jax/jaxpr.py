"""Jaxprs, read and rewritten the same way on every supported JAX.

Since 0.11 `ClosedJaxpr` and `Jaxpr` are one class and `scan` describes its operands with `ft_in`/`ft_out` where 0.10
has `num_consts`/`num_carry`; nothing outside this package may notice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util  # the line of user code an equation came from; no public form up to 0.12
from jax._src.core import DropVar  # a result that nobody reads; no public form up to 0.12
from jax._src.interpreters import partial_eval as pe  # dead-code elimination of a jaxpr; no public form up to 0.12
from jax.extend import core as jex_core

from ..errors import PlanError
from .boundary import Boundaries, layer_boundary_p
from .manual import axes_of_one, is_shard_map, mentions, on_whole_arrays, over_one, plain_body
from .transposed import in_two, transposes

ClosedJaxpr = jex_core.ClosedJaxpr
ShapedArray = jax.core.ShapedArray
Equation = jex_core.JaxprEqn
Jaxpr = jex_core.Jaxpr
Literal = jex_core.Literal
Var = jex_core.Var

# Parameters in which calls have their bodies.
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# Primitives whose one result may have the shape of their operands although they are no arithmetic.
OWN_KERNEL = frozenset(
    """attention attention_backward cholesky cholesky_update cumlogsumexp cummax cummin cumprod cumsum
    custom_partitioning
    dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper fft ffi_call householder_product io_callback
    ormqr pallas_call pbroadcast ppermute pure_callback random_bits reduce_window reduce_window_max reduce_window_min
    reduce_window_sum scaled_dot scaled_matmul_wrapper select_and_gather_add select_and_scatter select_and_scatter_add
    sort symmetric_product threefry2x32 triangular_solve tridiagonal_solve""".split()  # noqa: SIM905 (a table)
)
# Calls whose body means the same when written in line. `jit` inside a planned program has no layout of its own.
_INLINED = ("jit", "pjit", "closed_call", "core_call", "core_closed_call")

# Equations with programs inside that are not in line.
_REMAT = ("remat2", "checkpoint", "remat")
_STRUCTURED = (*_REMAT, "scan", "cond", "while", "custom_jvp_call", "custom_vjp_call")

_PRODUCTS = ("dot_general", "conv_general_dilated")

# Wishes about the layout of a value, on a mesh of the user's: what users call them, by primitive. The plan decides
# layouts; the values stay the same.
LAYOUT_WISHES: Mapping[str, str] = {
    "sharding_constraint": "with_sharding_constraint", "layout_constraint": "with_layout_constraint",
    "mesh_cast": "reshard", "reshard": "reshard",
}  # fmt: skip
_STATEMENTS = (*LAYOUT_WISHES, "device_put", "pvary", "pcast")


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """The bare jaxpr of a closed or bare one."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def consts_of(jaxpr: Any) -> Sequence[Any]:
    return getattr(jaxpr, "consts", ())


def is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def is_traced(x: Any) -> bool:
    """Whether a value stands for one, inside `jax.jit` or `jax.grad`."""
    return isinstance(x, jax.core.Tracer)


def is_dropped(var: Any) -> bool:
    """Whether an equation's result is thrown away."""
    return isinstance(var, DropVar)


def source_line(equation: Equation) -> str:
    """`file.py:line (function)` of the user code behind an equation."""
    return _line_of(equation.source_info.traceback)


def calling_line(equation: Equation) -> str:
    """As `source_line`, of the innermost code that is in no installed package; "" if there is none."""
    frames = source_info_util.user_frames(equation.source_info.traceback)
    mine = (one for one in frames if not {"site-packages", "dist-packages"} & {*PurePath(one.file_name).parts})
    found = next(mine, None)
    return "" if found is None else f"{found.file_name}:{found.start_line} ({found.function_name})"


# The pieces of a scan and the numbers of microbatches have equations from the same lines.
@lru_cache(maxsize=1 << 14)
def _line_of(traceback: Any) -> str:
    return source_info_util.summarize(source_info_util.new_source_info().replace(traceback=traceback))


def inline(closed: ClosedJaxpr, *, boundaries: Boundaries | None = None, caller: Equation | None = None) -> ClosedJaxpr:
    """The same program with every `jit` call and `shard_map`, at any depth, replaced by its equations.

    A matrix product or convolution written twice is kept once, as the compiler would. Layer boundaries are gone;
    where they were is added to `boundaries`. Equations of a library's function (`jnp.linalg.inv`), traced without the
    user's lines, have that of its caller: the innermost call that has one, or else `caller`.
    """
    boundaries = Boundaries() if boundaries is None else boundaries
    top = open_jaxpr(closed)
    constvars: list[Any] = list(top.constvars)
    consts: list[Any] = list(consts_of(closed))
    equations: list[Any] = []

    def read(env: dict[Any, Any], atom: Any) -> Any:
        return atom if is_literal(atom) else env.get(atom, atom)

    def walk(jaxpr: Jaxpr, env: dict[Any, Any], fresh: bool, caller: Equation | None) -> None:
        for equation in jaxpr.eqns:
            equation = _located(equation, caller)
            invars = [read(env, atom) for atom in equation.invars]
            if equation.primitive.name in _STATEMENTS:
                env.update(zip(equation.outvars, invars, strict=True))
                continue
            if equation.primitive is layer_boundary_p:
                boundaries.before.append(len(equations))
                continue
            if is_inlined(equation) or is_shard_map(equation) or transposes(equation):
                body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
                if is_shard_map(equation):
                    body = whole_arrays(equation)
                elif transposes(equation):
                    with user_context(equation):  # else refusals and profiles name the line of `in_two`
                        body = in_two(equation)
                inner = open_jaxpr(body)
                inner_env: dict[Any, Any] = dict(zip(inner.invars, invars, strict=True))
                for var, const in zip(inner.constvars, consts_of(body), strict=True):
                    hoisted = Var(var.aval)
                    constvars.append(hoisted)
                    consts.append(const)
                    inner_env[var] = hoisted
                walk(inner, inner_env, True, equation)
                for outvar, result in zip(equation.outvars, inner.outvars, strict=True):
                    env[outvar] = read(inner_env, result)
                continue
            params = equation.params
            if equation.primitive.name in _STRUCTURED:
                inside = Boundaries()
                params = _inline_params(equation, inside)
                boundaries.add_body(inside, len(equations), is_scan=equation.primitive.name == "scan")
            if is_remat(equation) and consts_of(params["jaxpr"]):
                # A checkpointed body has no place for constants: they become operands.
                body = open_jaxpr(params["jaxpr"])
                hoisted = [Var(var.aval) for var in body.constvars]
                constvars.extend(hoisted)
                consts.extend(consts_of(params["jaxpr"]))
                invars = [*hoisted, *invars]
                params["jaxpr"] = open_jaxpr(hoist_consts(params["jaxpr"]))
            elif is_remat(equation):
                params["jaxpr"] = open_jaxpr(params["jaxpr"])
            outvars = equation.outvars
            key = None
            if equation.primitive.name in _PRODUCTS and not any(map(is_literal, invars)):
                key = (equation.primitive.name, *invars, str(sorted(params.items())))
            if key in products:
                env.update(zip(outvars, products[key], strict=True))
                continue
            if fresh:
                # A jaxpr object may be called twice: each inlining needs variables of its own.
                outvars = [var if is_dropped(var) else Var(var.aval) for var in outvars]
                env.update(zip(equation.outvars, outvars, strict=True))
            if equation.primitive.name == "optimization_barrier":
                # Values that only wait for each other share no dims: each gets a barrier of its own.
                pairs = zip(invars, outvars, strict=True)
                equations.extend(equation.replace(invars=[a], outvars=[b]) for a, b in pairs if not is_literal(a))
                env.update((b, a) for a, b in zip(invars, outvars, strict=True) if is_literal(a))
                continue
            equations.append(equation.replace(invars=invars, outvars=outvars, params=params))
            if key is not None:
                products[key] = outvars

    products: dict[Any, Any] = {}
    env: dict[Any, Any] = {}
    walk(top, env, False, caller)
    outvars = [read(env, atom) for atom in top.outvars]
    jaxpr = top.replace(
        constvars=constvars, eqns=_without_unread(equations, outvars), outvars=outvars,
        debug_info=top.debug_info.with_unknown_names(),
    )  # fmt: skip
    return ClosedJaxpr(jaxpr, consts)


def _without_unread(equations: list[Any], outvars: Sequence[Any]) -> list[Any]:
    """Equations of which Pallas kernels drop the results that nobody reads: some are their scratch memory."""
    if not any(one.primitive.name == "pallas_call" for one in equations):
        return equations
    read = {atom for one in equations for atom in one.invars if not is_literal(atom)}
    read |= {atom for atom in outvars if not is_literal(atom)}
    return [
        one.replace(outvars=[var if var in read else DropVar(var.aval) for var in one.outvars])
        if one.primitive.name == "pallas_call"
        else one
        for one in equations
    ]


def jit_donations(closed: ClosedJaxpr) -> frozenset[int]:
    """The inputs that a program which is one `jit` call donates (`donate_argnums`)."""
    jaxpr = open_jaxpr(closed)
    if len(jaxpr.eqns) != 1 or jaxpr.eqns[0].primitive.name not in ("jit", "pjit"):
        return frozenset()
    (call,) = jaxpr.eqns
    donated = {a for a, flag in zip(call.invars, call.params["donated_invars"], strict=True) if flag}
    return frozenset(i for i, var in enumerate(jaxpr.invars) if var in donated)


def _located(equation: Equation, caller: Equation | None) -> Equation:
    """The equation, with the line of its caller where it has none of the user's."""
    if caller is None or source_line(equation):
        return equation
    return equation.replace(source_info=equation.source_info.replace(traceback=caller.source_info.traceback))


def whole_arrays(equation: Equation) -> ClosedJaxpr:
    """A `shard_map` as a program on whole arrays."""
    body, alone = plain_body(equation), axes_of_one(equation)
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]

    def on_equation(inner: Equation, operands: Sequence[Any]) -> Any:
        names = [name for name in alone if mentions(inner, name)]
        return over_one(lambda *given: bind(inner, *given), names, operands) if names else None

    run = on_whole_arrays(equation, lambda *blocks: evaluate(body, *blocks, on_equation=on_equation))
    try:
        with user_context(equation):
            return jax.make_jaxpr(run)(*avals)
    except NotImplementedError as error:
        raise PlanError(
            refused="a shard_map", got=f"an operator in it that JAX cannot map over blocks ({error})",
            needed="operators that have a batching rule: its blocks become a dim of whole arrays",
            where=source_line(equation),
            try_="the same without jax.shard_map (the plan decides what is split), or over mesh axes of one device",
        ) from error  # fmt: skip


def _inline_params(equation: Equation, inside: Boundaries) -> dict[str, Any]:
    """Parameters of a structured equation with the jaxprs inside it inlined too; adds the boundaries inside it."""
    name, params = equation.primitive.name, dict(equation.params)
    if name == "scan":
        params["jaxpr"] = inline(params["jaxpr"], boundaries=inside, caller=equation)
    elif name in _REMAT:
        body = ClosedJaxpr(open_jaxpr(params["jaxpr"]), consts_of(params["jaxpr"]))
        params["jaxpr"] = inline(body, boundaries=inside, caller=equation)
    elif name == "cond":
        params["branches"] = tuple(inline(branch, boundaries=inside, caller=equation) for branch in params["branches"])
    elif name == "while":
        params["cond_jaxpr"] = inline(params["cond_jaxpr"], caller=equation)
        params["body_jaxpr"] = inline(params["body_jaxpr"], boundaries=inside, caller=equation)
    elif name in ("custom_jvp_call", "custom_vjp_call"):
        # Stays a call, and keeps its marks: its derivative is made by calling the user's function again.
        inline(params["call_jaxpr"], boundaries=inside, caller=equation)
    return params


def hoist_consts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with its constants as leading inputs."""
    jaxpr = open_jaxpr(closed)
    opened = jaxpr.replace(
        constvars=(), invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=jaxpr.debug_info.with_unknown_names()
    )
    return ClosedJaxpr(opened, ())


def with_result_shapes(closed: ClosedJaxpr, position: int, shapes: Mapping[int, tuple[int, ...]]) -> ClosedJaxpr:
    """The same program with results of one equation, which become results of the program alone, of other shapes.

    Args:
      closed: a program.
      position: of the equation.
      shapes: by number of the result.
    """
    jaxpr = open_jaxpr(closed)
    equation = jaxpr.eqns[position]
    outvars = list(equation.outvars)
    for number, shape in shapes.items():
        outvars[number] = Var(outvars[number].aval.update(shape=shape))
    renamed: dict[Any, Any] = dict(zip(equation.outvars, outvars, strict=True))
    equations = list(jaxpr.eqns)
    equations[position] = equation.replace(outvars=outvars)
    results = [atom if is_literal(atom) else renamed.get(atom, atom) for atom in jaxpr.outvars]
    # Other equations read none of these; the variables that keep their shapes stay the ones they were.
    return ClosedJaxpr(jaxpr.replace(eqns=equations, outvars=results), consts_of(closed))


def eliminate_dead_code(closed: ClosedJaxpr, *, first_output: int = 0) -> ClosedJaxpr:
    """Drop the outputs before the first one asked for, and equations that no other needs; inputs stay as they are."""
    jaxpr = open_jaxpr(closed)
    kept, _ = pe.dce_jaxpr(jaxpr, [i >= first_output for i in range(len(jaxpr.outvars))], instantiate=True)
    return ClosedJaxpr(open_jaxpr(kept), consts_of(closed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The parts of a `scan` equation, whose operands are constants, carries and stacked inputs, in that order."""

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int


def scan_parts(equation: Equation) -> Scan:
    params = equation.params
    if "num_consts" in params:  # up to JAX 0.10
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:  # from JAX 0.11
        num_consts, num_carry = (len(part) for part in params["ft_in"].unpack()[:2])
    return Scan(
        body=params["jaxpr"],
        num_consts=num_consts,
        num_carry=num_carry,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )


def is_inlined(equation: Equation) -> bool:
    """Whether an equation is a call that means the same when written in line."""
    return equation.primitive.name in _INLINED


def is_remat(equation: Equation) -> bool:
    return equation.primitive.name in _REMAT


def bind(equation: Equation, *operands: Any) -> Sequence[Any]:
    """Run one equation on `operands`; always a sequence of results."""
    # JAX converts constants by NumPy, which warns of what becomes an infinity: under `jax.jit` nobody does.
    with user_context(equation), np.errstate(over="ignore"):
        out = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return out if equation.primitive.multiple_results else (out,)


def user_context(equation: Equation) -> Any:
    """A context in which traced operations carry the source line of `equation`, and the names of its scopes, by which
    profiles show them."""
    source = equation.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    return source_info_util.user_context(source.traceback, name_stack=names)


def evaluate(
    closed: ClosedJaxpr, *args: Any, on_equation: Callable[[Equation, Sequence[Any]], Any] | None = None
) -> Any:
    """Evaluate a jaxpr; `on_equation` may take over an equation by returning its results instead of None."""
    jaxpr = open_jaxpr(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts_of(closed), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        results = on_equation(equation, operands) if on_equation is not None else None
        if results is None:
            results = bind(equation, *operands)
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def result_avals(equation: Equation, operands: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Any] | None:
    """Shapes an equation gives on operands of other shapes, or None where it refuses them."""
    primitive, avals = equation.primitive, [ShapedArray(one.shape, one.dtype) for one in operands]
    try:
        try:
            found, _ = primitive.abstract_eval(*avals, **equation.params)
        except NotImplementedError:  # a call, which JAX only knows how to trace
            return jax.eval_shape(lambda *xs: list(bind(equation, *xs)), *operands)
    except (TypeError, ValueError, AssertionError, NotImplementedError, IndexError):  # each primitive has its own
        return None
    return found if primitive.multiple_results else [found]


# What JAX wraps a rule into, by what each wrapper closes over: the name of what is inside, and of what else counts.
_WRAPPERS: Mapping[frozenset[str], tuple[str, tuple[str, ...]]] = {
    frozenset(["cells", "fn", "sentinel"]): ("fn", ()),  # remembers its results
    frozenset(["eqn", "jvp_jaxpr_fun", "used_outs"]): ("jvp_jaxpr_fun", ("used_outs",)),  # of a call without dead code
    frozenset(["jvp_jaxpr_fun", "num_consts"]): ("jvp_jaxpr_fun", ("num_consts",)),  # of a call that is traced again
    frozenset(["in_avals", "in_tangent_avals", "jvp", "self"]): ("jvp", ()),  # traces it
}


def custom_jvp_of(equation: Equation) -> Hashable:
    """What a call of a function with a custom JVP computes: equal for calls of the same function on the same shapes.
    None for other equations, and where it cannot be told: with static arguments, or arrays that are closed over.

    Every such call has a program and a rule of its own, of which JAX compares nothing but the identity. The user's rule
    is found in what they close over; that is no interface of JAX, and where it is not there, None is the answer.
    """
    if equation.primitive.name != "custom_jvp_call" or equation.params.get("num_consts") != 0:
        return None
    rule, said = equation.params.get("jvp_jaxpr_fun"), [equation.params.get("symbolic_zeros")]
    while not getattr(rule, "transforms", ()):
        function = getattr(rule, "f", rule)
        cells = getattr(function, "__closure__", None) or ()
        names = function.__code__.co_freevars if cells else ()
        closed = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
        if frozenset(names) not in _WRAPPERS:
            return None
        inside, counts = _WRAPPERS[frozenset(names)]
        said += [str(closed[name]) for name in counts]
        rule = closed[inside]
    # Each call has a store of its own for the tree of its results; all else is the user's.
    static = tuple(
        (step, *(one for one in given if not getattr(one, "__qualname__", "").startswith("transformation_with_aux")))
        for step, given in rule.transforms
    )
    # Functions may share a rule.
    found = rule.f, static, tuple(said), str(equation.params["call_jaxpr"])
    try:
        hash(found)
    except TypeError:
        return None
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Vjp:
    """The two programs behind a differentiable call.

    Args:
      forward: operands -> results, then residuals.
      backward: residuals, then cotangents of the differentiable results -> cotangents of the differentiable operands.
      operands: which operands are differentiable.
      results: which results are differentiable.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    operands: tuple[bool, ...]
    results: tuple[bool, ...]


def vjp_parts(equation: Equation) -> Vjp:
    """Trace an equation's own derivative rule (custom JVP or VJP, or a `cond`) into plain programs."""

    def smooth(aval: Any) -> bool:
        return jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)

    operand_avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in equation.invars]
    # What a function closes over comes first, and its rule has no cotangents for that.
    closed_over = equation.params.get("num_consts", 0) if equation.primitive.name != "cond" else 0
    operands = tuple(at >= closed_over and smooth(a) for at, a in enumerate(operand_avals))
    results = tuple(smooth(v.aval) for v in equation.outvars)

    def forward(*args: Any) -> Any:
        moving = [a for a, s in zip(args, operands, strict=True) if s]

        def moved(*moving: Any) -> tuple[list[Any], list[Any]]:
            given = iter(moving)
            outs = bind(equation, *(next(given) if s else a for a, s in zip(args, operands, strict=True)))
            split = list(zip(outs, results, strict=True))
            return [o for o, s in split if s], [o for o, s in split if not s]

        outs, pullback, fixed = jax.vjp(moved, *moving, has_aux=True)
        smooth_outs, fixed_outs = iter(outs), iter(fixed)
        return [next(smooth_outs) if s else next(fixed_outs) for s in results], pullback

    forward_jaxpr, (_, pullback) = jax.make_jaxpr(forward, return_shape=True)(*operand_avals)
    cotangent_avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v, s in zip(equation.outvars, results, strict=True) if s
    ]
    backward_jaxpr = jax.make_jaxpr(lambda pull, cts: list(pull(cts)))(pullback, cotangent_avals)
    return Vjp(
        forward=inline(forward_jaxpr, caller=equation),
        backward=eliminate_dead_code(inline(backward_jaxpr, caller=equation)),
        operands=operands,
        results=results,
    )


def called_body(equation: Any) -> Any:
    """The body of a call, if the equation is one: as many inputs and outputs, of the same shapes."""
    for key in _CALLS:
        body = equation.params.get(key)
        inner = open_jaxpr(body)
        if not hasattr(inner, "eqns") or len(inner.invars) != len(equation.invars):
            continue
        shapes = [getattr(atom.aval, "shape", None) for atom in inner.outvars]
        if shapes == [getattr(var.aval, "shape", None) for var in equation.outvars]:
            return body
    return None

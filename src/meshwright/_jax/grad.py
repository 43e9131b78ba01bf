"""`value_and_grad` that leaves a mark in the trace.

A planner must know where the forward program ends and where the gradients begin: the forward graph alone prices both
passes, and microbatches are a loop around exactly this call. `jax.value_and_grad` leaves no trace of itself in a jaxpr,
so ours binds a primitive that holds the loss function's own jaxpr. Wherever the step is not parallelised (run eagerly,
inside a plain `jax.jit`, on one device) the primitive lowers to what `jax.value_and_grad` would have produced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import jax
import numpy as np
from jax._src import (
    checkify,  # the table of its rules; no public form up to 0.12
    source_info_util,  # the line of user code an equation came from; no public form up to 0.12
)
from jax.extend import core as jex_core
from jax.interpreters import mlir

from ..errors import StepError
from .context import as_user
from .jaxpr import consts_of, evaluate, hoist_consts, inline, open_jaxpr
from .placement import placed
from .plain import Region, programs_in, unmeshed

# A marked call is at the user's line, not at ours.
source_info_util.register_exclusion(__file__)

value_and_grad_p = jex_core.Primitive("meshwright_value_and_grad")
value_and_grad_p.multiple_results = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCall:
    """A call of `value_and_grad` in a step that was traced.

    Args:
      jaxpr: of the loss function: constants first, then what is differentiated.
      num_consts: how many of its inputs are constants.
      shapes: of its inputs.
    """

    jaxpr: jex_core.ClosedJaxpr
    num_consts: int
    shapes: tuple[tuple[int, ...], ...]


class _Reached(BaseException):
    """What was traced has come to its first marked call. Not for users' code to catch."""

    def __init__(self, call: MarkedCall) -> None:
        super().__init__()
        self.call = call


# Whether the first marked call ends the trace.
_stopping: ContextVar[bool] = ContextVar("stopping", default=False)


@contextmanager
def _set_stopping(stops: bool) -> Iterator[None]:
    token = _stopping.set(stops)
    try:
        yield
    finally:
        _stopping.reset(token)


def traced_to_call(fun: Callable[..., Any], shapes: Sequence[Any]) -> MarkedCall | None:
    """The first marked call of a function that no other one holds; what comes after it is not traced. None if it comes
    to none.

    Args:
      fun: of arrays.
      shapes: its arguments.
    """
    region = as_user()
    try:
        with _set_stopping(True), region():
            jax.make_jaxpr(placed(fun, shapes))(*shapes)
    except _Reached as reached:
        return replace(reached.call, jaxpr=unmeshed(reached.call.jaxpr, Region(enter=region)))
    return None


def marked_calls(program: jex_core.ClosedJaxpr | jex_core.Jaxpr) -> int:
    """How many marked calls a program has, those in loops, branches and loss functions included."""
    return sum((e.primitive is value_and_grad_p) + marked_calls_inside(e) for e in open_jaxpr(program).eqns)


def marked_calls_inside(equation: jex_core.JaxprEqn) -> int:
    """How many marked calls the programs inside an equation have."""
    return sum(map(marked_calls, programs_in(equation)))


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    reduction: Literal["mean", "sum"] | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` with the same arguments and results, recognised by `meshwright.parallelize`.

    The differentiated arguments must be pytrees of floating-point arrays. Higher derivatives through it are not
    supported; use `jax.value_and_grad` for the inner ones.

    Args:
      fun: the loss function, of arrays.
      argnums: which of its arguments to differentiate.
      has_aux: whether it returns a pair, of the loss and other results.
      reduction: how the losses of microbatches combine, where that cannot be read from the loss function: "mean" or
        "sum". What needs the whole batch (the statistics of batch normalisation) is then that of each microbatch.

    >>> import jax.numpy as jnp
    >>> value, grad = value_and_grad(lambda w: jnp.sum(w**2))(jnp.array([1.0, 2.0]))
    >>> float(value), grad.tolist()
    (5.0, [2.0, 4.0])
    """
    if reduction not in (None, "mean", "sum"):
        raise StepError(
            refused="the reduction", got=repr(reduction), needed='"mean", "sum" or None',
            where="meshwright.value_and_grad(reduction=)", try_='reduction="mean"',
        )  # fmt: skip
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        wrt = tuple(args[i] for i in positions)
        wrt_leaves, wrt_tree = jax.tree.flatten(wrt)
        for path, leaf in jax.tree_util.tree_leaves_with_path(wrt):
            dtype = getattr(leaf, "dtype", None)
            if not isinstance(leaf, float) and (dtype is None or not jax.numpy.issubdtype(dtype, jax.numpy.inexact)):
                got = type(leaf).__name__ if dtype is None else f"an array of {dtype}"
                raise StepError(
                    refused=f"the differentiated argument at {jax.tree_util.keystr(path)}", got=got,
                    needed="a floating-point array", where="meshwright.value_and_grad",
                    try_="splitting such leaves off (eqx.partition, nnx.split) and closing over them",
                )  # fmt: skip

        trees: dict[str, Any] = {}

        def flat_fun(*leaves: Any) -> tuple[Any, ...]:
            full = list(args)
            for position, value in zip(positions, jax.tree.unflatten(wrt_tree, leaves), strict=True):
                full[position] = value
            out = fun(*full, **kwargs)
            if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
                raise StepError(
                    refused="the loss function", got=f"one {type(out).__name__}", needed="a pair (loss, aux)",
                    where="meshwright.value_and_grad(has_aux=True)", try_="returning loss, aux, or has_aux=False",
                )  # fmt: skip
            loss, aux = out if has_aux else (out, ())
            shape = jax.numpy.shape(cast(Any, loss))
            if shape != ():
                raise StepError(
                    refused="the loss function", got=f"a loss of shape {shape}", needed="a scalar",
                    where="meshwright.value_and_grad", try_="jnp.mean or jnp.sum over it",
                )  # fmt: skip
            aux_leaves, trees["aux"] = jax.tree.flatten(aux)
            return (loss, *aux_leaves)

        # Closed-over tracers (the batch, keys, anything computed before) come back as the jaxpr's constants.
        with _set_stopping(False):
            closed = jax.make_jaxpr(flat_fun)(*wrt_leaves)
        consts = closed.consts
        jaxpr = hoist_consts(closed)
        if _stopping.get():
            shapes = tuple(np.shape(one) for one in (*consts, *wrt_leaves))
            raise _Reached(MarkedCall(jaxpr=jaxpr, num_consts=len(consts), shapes=shapes))
        outs = value_and_grad_p.bind(*consts, *wrt_leaves, jaxpr=jaxpr, num_consts=len(consts), reduction=reduction)
        num_aux = len(closed.out_avals) - 1
        value, aux, grads = outs[0], outs[1 : 1 + num_aux], outs[1 + num_aux :]
        grads = jax.tree.unflatten(wrt_tree, grads)
        grads = grads[0] if isinstance(argnums, int) else grads
        if has_aux:
            value = (value, jax.tree.unflatten(trees["aux"], aux))
        return value, grads

    return value_and_grad_fun


def _reference(*args: Any, jaxpr: jex_core.ClosedJaxpr, num_consts: int, reduction: str | None) -> list[Any]:
    """What the primitive means: the loss, the auxiliary results, then the gradients of the non-constant inputs."""
    del reduction
    consts, wrt = args[:num_consts], args[num_consts:]

    def loss_and_aux(*leaves: Any) -> tuple[Any, list[Any]]:
        loss, *aux = jex_core.jaxpr_as_fun(jaxpr)(*consts, *leaves)
        return loss, aux

    (loss, aux), grads = jax.value_and_grad(loss_and_aux, argnums=tuple(range(len(wrt))), has_aux=True)(*wrt)
    return [loss, *aux, *grads]


@value_and_grad_p.def_effectful_abstract_eval
def _abstract_eval(
    *avals: Any, jaxpr: jex_core.ClosedJaxpr, num_consts: int, reduction: str | None
) -> tuple[list[Any], Any]:  # fmt: skip
    del reduction
    return [*jaxpr.out_avals, *avals[num_consts:]], jaxpr.effects


value_and_grad_p.def_impl(jax.jit(_reference, static_argnames=("jaxpr", "num_consts", "reduction")))
mlir.register_lowering(value_and_grad_p, mlir.lower_fun(_reference, multiple_results=True))


def _checked(*given: Any, **params: Any) -> tuple[Any, Any]:
    """The primitive under `checkify.checkify`: where checks are wanted of the loss function, it is written out, with
    them, and is no marked call any more.

    Args:
      given: from JAX 0.12 on a context; the error so far, which checks are wanted, and the operands.
      params: of the primitive.
    """
    context = () if isinstance(given[0], checkify.Error) else given[:1]
    error, enabled, *args = given[len(context) :]
    has_checks = any(hasattr(effect, "error_type") for effect in params["jaxpr"].effects)
    if not has_checks and not set(enabled) - {checkify.FailedCheckError}:
        return error, value_and_grad_p.bind(*args, **params)
    written_out = jax.make_jaxpr(lambda *xs: _reference(*xs, **params))(*args)
    return checkify.checkify_jaxpr(*context, written_out, enabled, error, *args)


checkify.error_checks[value_and_grad_p] = _checked


def inline_value_and_grad(closed: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """The same program with every marked call, in loops and branches too, replaced by the equations of its forward and
    backward passes."""
    closed = _inline_nested(closed)

    def on_equation(equation: jex_core.JaxprEqn, operands: Sequence[Any]) -> Any:
        return _reference(*operands, **equation.params) if equation.primitive is value_and_grad_p else None

    if not any(equation.primitive is value_and_grad_p for equation in open_jaxpr(closed).eqns):
        return closed
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
    return inline(jax.make_jaxpr(lambda *args: evaluate(closed, *args, on_equation=on_equation))(*avals))


def _inline_nested(closed: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """The same program without marked calls inside its loops and branches."""

    def replaced(value: Any) -> Any:
        if isinstance(value, jex_core.ClosedJaxpr):
            return inline_value_and_grad(value)
        if isinstance(value, tuple) and any(isinstance(part, jex_core.ClosedJaxpr) for part in value):
            return tuple(replaced(part) for part in value)
        return value

    jaxpr = open_jaxpr(closed)
    equations = [
        equation.replace(params={name: replaced(value) for name, value in equation.params.items()})
        if equation.primitive.name in ("scan", "while", "cond")
        else equation
        for equation in jaxpr.eqns
    ]
    return jex_core.ClosedJaxpr(jaxpr.replace(eqns=equations), consts_of(closed))

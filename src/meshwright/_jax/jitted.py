"""Steps that are `jax.jit` functions: their static arguments bound, and what their other options say.

A static argument is a Python value that a function is traced for, not with. Bound to it, a step is a function of arrays
like any other; other values make another step. Layouts and donations of `jax.jit` are in the trace of its call
(`trace`, `jaxpr.jit_donations`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import jax

from ..errors import PlanError

# Of `jax.jit`, there is no public name for it.
_JITTED = type(jax.jit(lambda: None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A step and its arguments, the static ones bound.

    Args:
      step: of the others.
      args: those with a position.
      kwargs: those given by name.
      key: of the static values: equal for equal ones.
      positions: for each argument with a position, by name or not, which one of the step as it was it is.
      count: how many arguments with a position that one was given.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: tuple[Any, ...] = ()
    positions: tuple[int, ...] = ()
    count: int = 0

    def donate(self, numbers: Any) -> Any:
        """What is to be donated, by numbers of the arguments that are left.

        Args:
          numbers: of arguments with the static ones, as of `plan_for`'s `donate`; what is none is left as it is.

        Raises:
          PlanError: for a static argument.
        """
        if isinstance(numbers, Sequence) and not isinstance(numbers, str):
            return tuple(self.donate(one) for one in numbers)
        is_number = isinstance(numbers, int) and not isinstance(numbers, bool)
        if not self.key or not is_number or not -self.count <= numbers < self.count:
            return numbers
        if numbers % self.count not in self.positions:
            raise PlanError(
                refused="what is to be donated", got=f"{numbers}, a static argument",
                needed="arguments that are arrays", where="donate=",
                try_=f"donate={self.positions[0] if self.positions else ()}",
            )  # fmt: skip
        return self.positions.index(numbers % self.count)


def bound_to_static(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Bound:
    """A step and its arguments, with what its `jax.jit` calls static bound to it; any other step as it is.

    Args:
      step: of the user.
      args: of it.
      kwargs: of it, by name.

    Raises:
      PlanError: for a static argument without a hash, or options of `jax.jit` that a plan cannot follow.

    >>> step = jax.jit(lambda x, power: x**power, static_argnames="power")
    >>> bound = bound_to_static(step, (jax.numpy.float32(3), 2))
    >>> bound.args, float(bound.step(*bound.args))
    ((Array(3., dtype=float32),), 9.0)
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    jitted, before = _jitted(step)
    if jitted is None:
        return Bound(step=step, args=args, kwargs=kwargs)
    options = jitted._jit_info
    step = as_one_call(step)
    if not options.static_argnums and not options.static_argnames:
        return Bound(step=step, args=args, kwargs=kwargs)
    signature = inspect.signature(step)
    given = signature.bind(*args, **kwargs)  # Python's own TypeError where they do not fit
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = dict(enumerate(name for name, one in signature.parameters.items() if one.kind in positional))
    count = before + max(len(args), len(names))
    numbers = {(n if n >= 0 else n + count) - before for n in options.static_argnums}
    # As `jax.jit` has it: what is given by position is static by its number, what is given by name by its name.
    by_number = {n: value for n, value in enumerate(args) if n in numbers}
    by_name = {name: kwargs.pop(name) for name in options.static_argnames if name in kwargs}
    if kwargs:  # those behind one that is left out have a position only without it
        left_out = [name for name in options.static_argnames if name in signature.parameters.keys() - given.arguments]
        by_name |= {name: signature.parameters[name].default for name in left_out}
        given.apply_defaults()
    by_number |= {n: kwargs.pop(names[n]) for n in sorted(numbers) if names.get(n) in kwargs}
    key = (
        *((n, type(value), _hashable(value, names.get(n, str(n)), step)) for n, value in sorted(by_number.items())),
        *((name, type(value), _hashable(value, name, step)) for name, value in sorted(by_name.items())),
    )
    if not key:
        return Bound(step=step, args=args, kwargs=kwargs)
    left = tuple(value for n, value in enumerate(args) if n not in by_number)

    def of_arrays(*given: Any) -> Any:
        """The step, of what is not static."""
        placed, others, rest = [], list(given), dict(by_number)
        while (others or len(placed) in rest) and names.get(len(placed)) not in by_name:
            placed.append(rest.pop(len(placed)) if len(placed) in rest else others.pop(0))
        # Behind an argument that is given by name, or left out, all are.
        free = [name for n, name in names.items() if n >= len(placed) and n not in rest and name not in by_name]
        return step(*placed, **dict(zip(free, others, strict=False)), **{names[n]: rest[n] for n in rest}, **by_name)

    functools.update_wrapper(of_arrays, step, updated=())
    static = {names[n] for n in by_number if n in names} | set(by_name)
    kept = [parameter for name, parameter in signature.parameters.items() if name not in static]
    of_arrays.__signature__ = signature.replace(parameters=kept)  # pyrefly: ignore[missing-attribute]
    taken = by_number.keys() | {n for n, name in names.items() if name in by_name}
    return Bound(
        step=of_arrays, args=left, kwargs=kwargs, key=key, count=len(given.args),
        positions=tuple(n for n in range(len(given.args)) if n not in taken),
    )  # fmt: skip


def _jitted(step: Any) -> tuple[Any, int]:
    """The `jax.jit` function that a step is, by itself, as a method or with its first arguments given; and how many
    arguments come before those of the step."""
    if isinstance(step, MethodType) and isinstance(step.__func__, _JITTED):
        return step.__func__, 1
    if isinstance(step, functools.partial) and isinstance(step.func, _JITTED):
        return step.func, len(step.args)
    return (step, 0) if isinstance(step, _JITTED) else (None, 0)


def as_one_call(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that is a `jax.jit` function as one that is a call in a trace, which says what it donates and wishes
    (`inline=True` leaves none); any other as it is.

    Raises:
      PlanError: for options of `jax.jit` that say where and how it is compiled.
    """
    jitted, _ = _jitted(step)
    if jitted is None:
        return step
    options = jitted._jit_info
    for name in ("compiler_options", "device", "backend"):
        if given := getattr(options, f"{name}_kvs", None) or getattr(options, name, None):
            raise PlanError(
                refused=f"{name}= of jax.jit", got=f"{name}={given!r}", needed="a step that leaves this to its plan",
                where=getattr(step, "__name__", "the step"),
                try_="XLA_FLAGS in the environment, for all programs" if name == "compiler_options" else "devices= of "
                "parallelize",
            )  # fmt: skip
    # From JAX 0.12 on one of several words.
    inline = getattr(options.inline, "value", options.inline) not in (False, "auto")
    if not inline or jitted is not step:
        return step
    return jax.jit(
        jitted.__wrapped__,
        in_shardings=jax.tree.unflatten(options.in_shardings_treedef, options.in_shardings_leaves),
        out_shardings=jax.tree.unflatten(options.out_shardings_treedef, options.out_shardings_leaves),
        static_argnums=options.static_argnums or None, static_argnames=options.static_argnames or None,
        donate_argnums=options.donate_argnums or None, donate_argnames=options.donate_argnames or None,
    )  # fmt: skip


def _hashable(value: Any, name: str, step: Callable[..., Any]) -> Any:
    try:
        hash(value)
    except TypeError as error:
        raise PlanError(
            refused=f"the static argument {name}", got=f"{type(value).__name__} {value!r:.60}, which has no hash",
            needed="a value with a hash, as under jax.jit: the step is planned anew for each",
            where=getattr(step, "__name__", "the step"),
            try_=f"leaving {name} out of static_argnums and static_argnames"
            if isinstance(value, jax.Array)
            else "a tuple for a list, a frozen dataclass for a dictionary; or closing over it",
        ) from error  # fmt: skip
    return value

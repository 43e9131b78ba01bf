"""What an effect is, in a program and lifted out of it, and how it is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PlanError
from .jaxpr import Equation, open_jaxpr, source_line

# The effects that are lifted, by primitive, as users write them.
NAMES = {
    "debug_callback": "jax.debug.callback",
    "debug_print": "jax.debug.print",
    "io_callback": "io_callback",
}

# Effects that are none outside a program, by the name of their class.
_INSIDE = ("NamedAxisEffect", "InternalMutableArrayEffect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifted:
    """One effect that was lifted, for messages.

    Args:
      name: of the function that the user called.
      line: where.
      in_loss: whether it stands in a loss function, which every microbatch runs.
      in_remat: whether it stands in a `jax.checkpoint` region inside one.
    """

    name: str
    line: str
    in_loss: bool = False
    in_remat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """The effects of a program, in order.

    Args:
      count: how many results of the program, its last ones, are operands of theirs.
      run: runs them on these results, inside `jax.jit` on one device; with microbatches, those of the marked loss
        function as they are lifted from it at the size of a microbatch, which come second.
      lifted: what they are.
    """

    count: int
    run: Callable[[Sequence[Any], Effects | None], None]
    lifted: tuple[Lifted, ...]


NO_EFFECTS = Effects(count=0, run=lambda values, loss: None, lifted=())


def outside_effects(equation: Equation) -> bool:
    """Whether an equation, or what it holds, does something outside the program."""
    return any(map(_is_outside, equation.effects))


def _is_outside(effect: Any) -> bool:
    # Reading and writing of references are effects on an input.
    return type(effect).__name__ not in _INSIDE and not hasattr(effect, "input_index")


def first_effect(program: Any) -> Equation | None:
    """The first equation of a program that has an effect by itself, the programs in it included."""
    for equation in open_jaxpr(program).eqns:
        if not outside_effects(equation):
            continue
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(open_jaxpr(part), "eqns") and (found := first_effect(part)) is not None:
                    return found
        return equation
    return None


def in_custom_derivative(equation: Equation | None) -> PlanError:
    """The refusal of an effect inside a function with a derivative rule of its own."""
    return refusal(
        equation, "a function with a derivative rule of its own (custom_vjp, custom_jvp) inside the loss function",
        "effects outside such functions: their rules run in pieces, forwards and backwards",
        "jax.value_and_grad in place of meshwright's, without microbatches or stages; or calling it on what the "
        "function takes or returns, or on the gradients that value_and_grad returns",
    )  # fmt: skip


def refusal(equation: Equation | None, got: str, needed: str, try_: str) -> PlanError:
    """The refusal of one effect, by name and line."""
    name = equation.primitive.name if equation is not None else "effect"
    return PlanError(
        refused=NAMES.get(name, {"check": "checkify.check"}.get(name, name)), got=got, needed=needed,
        where=(source_line(equation) if equation is not None else "") or "the step", try_=try_,
    )  # fmt: skip

"""What an effect is, in a program and lifted out of it, and how it is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
      primitive: that it is.
      line: where.
      in_loss: whether it stands in a loss function, which every microbatch runs.
      in_remat: whether it stands in a `jax.checkpoint` region inside one.
      levels: of a call under `jax.vmap`, the dims that it goes through (`unrolled.Series`).
      times: how often its program runs it, as far as that is known.
      each_example: whether it runs for each example: as often in microbatches as in the whole batch.
    """

    primitive: str
    line: str
    in_loss: bool = False
    in_remat: bool = False
    levels: tuple[tuple[tuple[int, ...] | None, ...], ...] = ()
    times: int = 1
    each_example: bool = False

    @property
    def name(self) -> str:
        """Of the function that the user called."""
        return NAMES[self.primitive]


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


def with_examples(effects: Effects, in_loss: Effects, microbatches: int) -> Effects:
    """The effects of a step, of which is known what runs for each example.

    Args:
      effects: of the step at its full batch.
      in_loss: those of its loss function at the size of a microbatch.
      microbatches: how many of these make the batch.

    Raises:
      PlanError: where a microbatch has other effects.
    """
    small, found = list(in_loss.lifted), []
    for one in effects.lifted:
        if one.in_loss:
            other = small.pop(0) if small else None
            if other is None or (other.primitive, other.line, other.levels) != (one.primitive, one.line, one.levels):
                raise _other_effects(one, microbatches)
            one = replace(one, each_example=one.times == other.times * microbatches)
        found.append(one)
    if small:
        raise _other_effects(small[0], microbatches)
    return replace(effects, lifted=tuple(found))


def _other_effects(effect: Lifted, microbatches: int) -> PlanError:
    return PlanError(
        refused=f"microbatches={microbatches}",
        got=f"{effect.name} in the loss function that is called another number of times, or on other values, at the "
        "size of a microbatch",
        needed="calls that do not depend on the batch size, or one for each example under jax.vmap or jax.lax.map",
        where=effect.line or "the step", try_="printing the whole array at once, or microbatches=1",
    )  # fmt: skip


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

"""The effects of a step (`_jax.effects`), as its plan has them: left out, or in words for the plan's notes."""

from __future__ import annotations

from dataclasses import replace

from .._jax.effects import NO_EFFECTS
from .trace import Program


def without_effects(program: Program) -> Program:
    """The same step without its effects: what they read is computed, and nothing is done with it."""
    return replace(program, effects=NO_EFFECTS)


def effect_notes(program: Program, schedule: str) -> tuple[str, ...]:
    """One note for each effect of the step that runs more or less often than under `jax.jit`.

    Args:
      program: the traced step.
      schedule: of the plan.
    """
    found: list[str] = []
    times = program.microbatches
    for effect in program.effects.lifted:
        what = f"{effect.name} at {effect.line or 'the step'}"
        if effect.in_loss and times > 1 and not effect.each_example:
            found.append(f"{what} runs once a microbatch, {times} times a step, on the microbatch's values")
        if effect.in_remat:
            found.append(f"{what} runs once, and not again where jax.checkpoint computes its region again")
        if not effect.in_loss and schedule == "pipedream":
            found.append(f"{what} runs once a step; what updates change it sees after the last one")
    return tuple(dict.fromkeys(found))

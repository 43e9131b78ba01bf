"""What a plan's notes say of a step's effects: how often they run, and on which values, where `jax.jit` does otherwise."""

from __future__ import annotations

from .trace import Program


def effect_notes(program: Program, schedule: str) -> tuple[str, ...]:
    """One note for each effect of the step that runs more or less often than under `jax.jit`.

    Args:
      program: the traced step.
      schedule: of the plan.
    """
    found: dict[str, None] = {}
    for effect in program.effects.lifted:
        what = f"{effect.name} at {effect.line or 'the step'}"
        if effect.in_loss and program.microbatches > 1:
            found[f"{what} runs once a microbatch, {program.microbatches} times a step, on the microbatch's values"] = None
        if effect.in_remat:
            found[f"{what} runs once, and not again where jax.checkpoint computes its region again"] = None
        if not effect.in_loss and schedule == "pipedream":
            found[f"{what} runs once a step; what updates change it sees after the last one"] = None
    return tuple(found)

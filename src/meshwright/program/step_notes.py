"""What a plan has to say of the step itself: what of it is not followed."""

from __future__ import annotations

from collections.abc import Sequence

from .traced_step import TracedStep

# How many of the step's lines a note lists.
_MOST_LISTED = 4


def step_notes(whole: TracedStep, *, said: bool) -> tuple[str, ...]:
    """What a plan is to say about the step.

    Args:
      whole: the step.
      said: whether the user has said what is donated.
    """
    notes = []
    if whole.state_inputs and not whole.donated and not said:
        why = "no meshwright.value_and_grad differentiates by it"
        notes.append(f"args[0] comes back as the first result and is not donated, since {why}: donate=0 does donate it")
    if whole.wishes:
        listed = _listed(whole.wishes)
        notes.append(f"layouts are the plan's (pins= fixes those of parameters and inputs), not followed: {listed}")
    if whole.offloads:
        listed = _listed(whole.offloads)
        notes.append(f"only arguments and results are kept in the host's memory, not what is moved there by {listed}")
    return tuple(notes)


def _listed(lines: Sequence[str]) -> str:
    more = len(lines) - _MOST_LISTED
    return "; ".join(lines[:_MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")

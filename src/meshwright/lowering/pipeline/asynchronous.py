"""What a step must be for PipeDream's asynchronous schedule: each stage updates alone, after each microbatch.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019). A microbatch is a batch of
its own: its gradient is that of its own loss, and a step of B microbatches is B updates. Stage i of n (from 0) computes
the gradient with the weights it had n - 1 - i updates ago, since that many microbatches have entered the pipeline
meanwhile. Nothing may wait for another stage between two microbatches, so what needs all stages' gradients is refused:
clipping by the global norm, parameters that several stages share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._jax.jaxpr import is_literal, source_line
from ...errors import PlanError
from .surroundings import Surroundings


def check_asynchronous(around: Surroundings, state_inputs: int, grown: Sequence[int | None]) -> None:
    """Refuse a step whose stages cannot update alone, or whose update is not one of microbatches.

    Args:
      around: what surrounds the core.
      state_inputs: how many leading arguments and results of the step are state.
      grown: for each output of the core the dim that grows with the batch, or None.

    Raises:
      PlanError: naming what would have to wait, or to be computed otherwise.
    """
    for parameter, var in enumerate(around.gradients):
        if around.is_tied(parameter):
            holders = ", ".join(str(stage + 1) for stage in sorted(around.holders[parameter]))
            raise _refusal(
                f"a parameter of shape {var.aval.shape} that stages {holders} share", "each parameter on one stage",
                "what surrounds the loss function", "parameters of their own for both ends, or one_f_one_b",
            )  # fmt: skip
    for number, wanted in enumerate(around.stages):
        for var in wanted.sent:
            line = next((source_line(e) for e in around.equations if var in e.outvars), "")
            raise _refusal(
                f"{_article(var)} of stage {number + 1} that others wait for", "an update of each stage by itself",
                line or "what surrounds the loss function",
                "no clipping by the global norm and no state that depends on the loss, or one_f_one_b",
            )  # fmt: skip
    _check_operands(around, state_inputs)
    large = {var for i, var in around.results.items() if grown[i] is not None}
    for output, atom in enumerate(around.outvars):
        if around.is_report(output):
            continue
        whole = large & around.reads([atom])
        atoms = [atom, *(a for e in around.needed([atom], ()) for a in e.invars)]
        if whole or any(a is total for a in atoms for total in around.totals):
            raise _refusal(
                "an update that reads results of the whole batch", "one that reads those of a microbatch alone",
                "what surrounds the loss function", "a mean over the examples inside the loss function, or one_f_one_b",
            )  # fmt: skip


def _check_operands(around: Surroundings, state_inputs: int) -> None:
    """The weights of the core are arguments of the step, and it reads no other state that changes."""
    state = around.invars[:state_inputs]
    for operand in around.operands:
        if is_literal(operand) or around.reads([operand]).isdisjoint(state):
            continue
        if operand not in state:
            raise _refusal(
                f"{_article(operand)} that the step computes from its state for the loss function",
                "the state itself", "what surrounds the loss function", "computing it inside the loss function",
            )  # fmt: skip
        position = state.index(operand)
        if position not in around.parameter_inputs and around.outvars[position] is not operand:
            raise _refusal(
                f"{_article(operand)} of the state that the loss function reads and the update changes",
                "parameters, and state that stays as it is", "what surrounds the loss function", "one_f_one_b",
            )  # fmt: skip


def _article(var: Any) -> str:
    return f"an array of shape {var.aval.shape}" if var.aval.shape else "a number"


def _refusal(got: str, needed: str, where: str, try_: str) -> PlanError:
    return PlanError(refused="the schedule pipedream", got=got, needed=needed, where=where, try_=try_)

"""What a stage holds on one device, counted from its traced programs before any is compiled.

The search counts bytes by the specs it chooses and guesses what a backward pass keeps; the cut of the traced stage says
it (`stage_program`), loops included, which keep what is not cheap (`loop_residuals`). Temporaries of each program come
from the model of buffer lifetimes (`memory.liveness`). The simulator turns both into a curve (`simulate.memory`).

Cost: tracing each stage, as running it would, and no compiling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..._jax.liveness_adapter import program_of
from ..._jax.passes import size_bytes, trace_local
from ...memory.liveness import PredictedMemory, predict
from .slots import Role, Slot
from .stage_program import Piece, StageProgram
from .update_program import Round, UpdateProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one stage on one device.

    Args:
      parameter_bytes: of its parameters, as the core reads them.
      gradient_bytes: of their gradients.
      state_bytes: of all other state, the optimizer's above all.
      input_bytes: of the batch, all microbatches, and of results beside the loss.
      in_flight_bytes: kept from the forward to the backward pass of a microbatch.
      delayed_bytes: kept from its input gradient to its weight gradient, where the two are apart.
      handed_bytes: of these, what the input gradient makes or is sent.
      workspace_bytes: the most that a program needs beside what it reads and leaves behind.
      update_workspace_bytes: the same for preparing operands and for the update.
      sent_bytes: by reading stage, of what is sent to it, a microbatch.
      received_bytes: by sending stage, of what comes from it, a microbatch.
    """

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    input_bytes: int
    in_flight_bytes: int
    delayed_bytes: int | None
    handed_bytes: int
    workspace_bytes: int
    update_workspace_bytes: int
    sent_bytes: Mapping[int, int]
    received_bytes: Mapping[int, int]

    @property
    def constant_bytes(self) -> int:
        """There throughout."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes + self.input_bytes


class Temporaries(Protocol):
    """What a program takes beside its arguments, predicted or compiled."""

    @property
    def output_bytes(self) -> int:
        """Of its results."""
        ...

    @property
    def alias_bytes(self) -> int:
        """Of results that are written over donated arguments."""
        ...

    @property
    def temp_bytes(self) -> int:
        """Of its temporaries, at the peak."""
        ...


def round_name(number: int) -> str:
    """What a round of the update is called among a stage's programs."""
    return f"update {number + 1}"


def stage_memory(
    stage: StageProgram, update: UpdateProgram, *, splits_backward: bool, platform: str = "cpu",
    compiled: Mapping[str, Temporaries] | None = None,
) -> StageMemory:  # fmt: skip
    """What a stage holds.

    Args:
      stage: of the core.
      update: around it.
      splits_backward: whether its schedule computes weight gradients apart.
      platform: of its devices, as `Device.compiler`.
      compiled: what programs take that have been compiled, by name: `forward`, `backward` (or `backward_input` and
        `backward_weight`), `prepare`, and `round_name` of the update's. The others are predicted.
    """
    given = compiled or {}
    halves = (
        dict(zip(("backward_input", "backward_weight"), stage.backward_halves, strict=True)) if splits_backward else {}
    )
    named = {"forward": stage.forward, **(halves or {"backward": stage.backward})}
    pieces = list(named.values())
    own = {slot: update.direct(slot) for slot in (*stage.parameters, *stage.inputs)}
    held = {slot for slot in own if not update.is_argument(slot)}  # copies in another layout, and microbatches
    arguments = update.kept
    parameters = {Slot(Role.ARGUMENT, i) for s, i in own.items() if s.role is Role.PARAMETER and i is not None}
    batch = {s for s in held if s.role is Role.INPUT}
    delayed, handed = None, 0
    if splits_backward:
        later = (Role.RESIDUAL, Role.RECEIVED, Role.COTANGENT)
        delayed = _total(stage.local_shape(s) for s in pieces[-1].inputs if s.role in later)
        handed = _total(stage.local_shape(s) for s in pieces[1].outputs if s.role is Role.RESIDUAL)
        handed += _total(stage.local_shape(s) for s in pieces[-1].inputs if s.role is Role.COTANGENT)
    count = stage.microbatches
    collected = count * _total(stage.local_shape(slot) for slot in stage.collected)
    return StageMemory(
        parameter_bytes=_total(update.local_shape(s) for s in arguments & parameters)
        + _total(stage.local_shape(s) for s in held - batch),
        gradient_bytes=_total(stage.local_shape(slot) for slot in stage.gradients),
        state_bytes=_total(update.local_shape(s) for s in arguments - parameters),
        input_bytes=_total(stage.local_shape(slot) for slot in (*batch, *stage.sums)) + collected,
        in_flight_bytes=stage.kept_bytes(),
        delayed_bytes=delayed,
        handed_bytes=handed,
        workspace_bytes=max(
            (given.get(name) or _predicted(one, stage.mesh.shape, platform)).temp_bytes for name, one in named.items()
        ),
        update_workspace_bytes=_update_workspace(update, collected, platform, given),
        sent_bytes=_by_stage((target, stage.local_shape(Slot(Role.SENT, value))) for value, target in stage.sent),
        received_bytes=_by_stage((stage.source_of[s.position], stage.local_shape(s)) for s in stage.received),
    )


def passed_on(memory: StageMemory, stage: StageProgram) -> StageMemory:
    """What another stage of the same program holds: `memory` with this stage's neighbours."""
    return replace(
        memory,
        sent_bytes=_by_stage((target, stage.local_shape(Slot(Role.SENT, value))) for value, target in stage.sent),
        received_bytes=_by_stage((stage.source_of[s.position], stage.local_shape(s)) for s in stage.received),
    )


def _predicted(piece: Piece, mesh: Mapping[str, int], platform: str) -> PredictedMemory:
    donated = [slot.role in (Role.SUM, Role.GRADIENT) and slot in piece.outputs for slot in piece.inputs]
    return predict(program_of(piece.program, donated, mesh=mesh, platform=platform))


def _update_workspace(update: UpdateProgram, collected: int, platform: str, compiled: Mapping[str, Temporaries]) -> int:
    """Of preparing operands and of each round, with what earlier rounds have left for later ones."""
    most = left = 0
    if update.prepare is not None:
        most = (compiled.get("prepare") or _round(update, update.prepare, (), platform)).temp_bytes
    for number, program in enumerate(update.rounds):
        found = compiled.get(round_name(number)) or _round(update, program, update.donated(program), platform)
        made = found.output_bytes - found.alias_bytes
        arrived = _total(
            update.local_shape(s) for s in program.inputs
            if s.role in (Role.SYNCHRONISED, Role.BUNDLE) and s.source != update.number
        )  # fmt: skip
        joined = collected if any(s.role is Role.JOINED for s in program.inputs) else 0
        most = max(most, left + arrived + joined + made + found.temp_bytes)
        left += made + arrived
    return most


def _round(update: UpdateProgram, program: Round, donated: Iterable[Slot], platform: str) -> PredictedMemory:
    avals = [update.local_shape(slot) for slot in program.inputs]
    gone = set(donated)
    closed = trace_local(program.run, avals, update.mesh)
    donations = [slot in gone for slot in program.inputs]
    return predict(program_of(closed, donations, mesh=update.mesh.shape, platform=platform))


def _total(shapes: Iterable[Any]) -> int:
    return sum(size_bytes(shape) for shape in shapes)


def _by_stage(shapes: Iterable[tuple[int, Any]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for stage, shape in shapes:
        found[stage] = found.get(stage, 0) + size_bytes(shape)
    return found

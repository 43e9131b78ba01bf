"""One process's walk through a step: its own programs in the order of the schedule, and the moves it takes part in.

Everything is issued without waiting: JAX runs a device's programs in the order they were issued and each as soon as
what it reads exists. An array is let go right after its last use was issued, and its memory is free when that has run.

CPU devices of several processes are an exception. They run programs in no order, on a few threads that a collective
blocks while it waits for another process, so that a program issued early may wait for threads that a later one holds.
There a process issues a program of several devices only when the one before has ended. The order of operations is one
in which even blocking calls cannot wait in a circle (`schedule.order`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .operations import Move, Operation, Run, Update, Work
from .placing import put
from .slots import PASSING, Role, Slot
from .stage_runtime import Compiled, StageRuntime
from .surroundings import Surroundings
from .transport import Transport

Memory = dict[Slot, Any]


class Executor:
    """Runs steps.

    Args:
      stages: on their devices.
      surroundings: of the core.
      order: the operations of a step.
      transport: between stages.
      microbatches: in a step.
    """

    def __init__(
        self,
        stages: Sequence[StageRuntime],
        surroundings: Surroundings,
        order: Sequence[Operation],
        transport: Transport,
        microbatches: int,
    ) -> None:
        self._stages = stages
        self._around = surroundings
        self._transport = transport
        self._count = microbatches
        devices = [device for stage in stages for device in stage.mesh.devices.flat]
        self._one_by_one = devices[0].platform == "cpu" and len({d.process_index for d in devices}) > 1
        self._running: Any = ()
        self._order = [one for one in order if self._takes_part(one)]
        self._programs: list[dict[Work, Compiled]] = [{} for _ in stages]
        for one in self._order:
            if isinstance(one, Run) and one.work not in self._programs[one.stage]:
                self._programs[one.stage][one.work] = getattr(stages[one.stage], one.work.value)
        self._index = [self._indices(stage) if stage.is_mine else [] for stage in stages]
        self._joins = [{slot: stage.join(slot) for slot in stage.stage.collected} for stage in stages]
        self._exchanges = [self._exchanged(number) for number in range(max(len(s.update.rounds) for s in stages))]

    def _takes_part(self, one: Operation) -> bool:
        """Whether this process has a device of an operation's stages."""
        if isinstance(one, Move):
            return self._stages[one.source].is_mine or self._stages[one.target].is_mine
        return self._stages[one.stage].is_mine

    def _indices(self, stage: StageRuntime) -> list[Any]:
        """The number of each microbatch on the stage's devices."""
        sharding = stage.sharding(Slot(Role.INDEX))
        return [put(np.int32(m), sharding) for m in range(self._count)]

    def _exchanged(self, number: int) -> list[tuple[int, int, Slot]]:
        """What stages exchange after a round: source, target and array."""
        found = []
        for target, stage in enumerate(self._stages):
            wanted = {slot for later in stage.update.rounds[number + 1 :] for slot in later.inputs}
            for slot in sorted(wanted):
                made = {Role.BUNDLE: slot.position, Role.SYNCHRONISED: 0}.get(slot.role)
                if made == number and slot.source != target:
                    found.append((slot.source, target, slot))
        return found

    def run(self, memories: list[Memory]) -> None:
        """Run one step.

        Args:
          memories: for each stage its arguments, parameters and inputs; afterwards they hold its outputs.
        """
        passing: list[list[Memory]] = [[{} for _ in range(self._count)] for _ in self._stages]
        for stage, memory in zip(self._stages, memories, strict=True):
            if not stage.is_mine:
                continue
            if stage.prepare is not None:
                self._call(stage, stage.prepare, memory)
            self._call(stage, stage.begin, memory)
        for one in self._order:
            if isinstance(one, Run):
                self._run(one, memories[one.stage], passing[one.stage][one.microbatch])
            elif isinstance(one, Move):
                self._move(one, passing)
            else:
                self._begin_update(one, memories[one.stage], passing[one.stage])
        self._finish_update(memories)

    def _wait_for_last(self) -> None:
        """Wait until the last program of several devices has ended, where that is needed."""
        if self._one_by_one:
            jax.block_until_ready(self._running)
            self._running = ()

    def _issue(self, stage: StageRuntime, program: Compiled, arguments: Iterable[Any]) -> Sequence[Any]:
        if stage.mesh.size == 1:
            return program.run(*arguments)
        self._wait_for_last()
        made = program.run(*arguments)
        self._running = made if self._one_by_one else ()
        return made

    def _transport_to(self, value: Any, target: NamedSharding) -> Any:
        self._wait_for_last()
        moved = self._transport.move(value, target)
        self._running = moved if self._one_by_one else ()
        return moved

    def _call(self, stage: StageRuntime, program: Compiled, memory: Memory) -> None:
        made = self._issue(stage, program, [memory[slot] for slot in program.inputs])
        memory.update(zip(program.outputs, made, strict=True))

    def _run(self, one: Run, memory: Memory, passing: Memory) -> None:
        program = self._programs[one.stage][one.work]
        index = self._index[one.stage][one.microbatch]

        def read(slot: Slot) -> Any:
            if slot.role in PASSING:
                return passing[slot]
            return index if slot.role is Role.INDEX else memory[slot]

        made = self._issue(self._stages[one.stage], program, map(read, program.inputs))
        for slot, array in zip(program.outputs, made, strict=True):
            (passing if slot.role in PASSING else memory)[slot] = array
        for slot in one.last:
            passing.pop(slot, None)

    def _move(self, one: Move, passing: list[list[Memory]]) -> None:
        source, target = passing[one.source][one.microbatch], passing[one.target][one.microbatch]
        value = self._moved(source, one.sent, one.source, one.target, one.received)
        if self._stages[one.target].is_mine:
            target[one.received] = value
        if one.last:
            source.pop(one.sent, None)

    def _moved(self, memory: Memory, sent: Slot, source: int, target: int, received: Slot) -> Any:
        """An array of one stage's memory, on another stage."""
        stage = self._stages[source]
        value = memory[sent] if stage.is_mine else stage.ghost(sent)
        return self._transport_to(value, self._stages[target].sharding(received))

    def _begin_update(self, one: Update, memory: Memory, passing: list[Memory]) -> None:
        """The first round, for which a stage needs no other."""
        stage = self._stages[one.stage]
        for slot, join in self._joins[one.stage].items():
            memory[Slot(Role.JOINED, slot.position)] = join([part.pop(slot) for part in passing])
        self._round(stage, 0, memory)

    def _round(self, stage: StageRuntime, number: int, memory: Memory) -> None:
        # Arrays that no later round reads are let go by the caller, which has no other use for this memory.
        self._call(stage, stage.rounds[number], memory)
        if number == 0:
            for slot in (*stage.stage.gradients, *stage.stage.inputs):
                memory.pop(slot, None)

    def _finish_update(self, memories: list[Memory]) -> None:
        for number, exchanged in enumerate(self._exchanges):
            if number:
                for stage, memory in zip(self._stages, memories, strict=True):
                    if stage.is_mine and number < len(stage.rounds):
                        self._round(stage, number, memory)
            for source, target, slot in exchanged:
                if self._stages[source].is_mine or self._stages[target].is_mine:
                    value = self._moved(memories[source], slot, source, target, slot)
                    if self._stages[target].is_mine:
                        memories[target][slot] = value

    def deliver(self, memories: Sequence[Memory], slot: Slot, source: int) -> None:
        """Give a small result of one stage to all others, so that every process can read it."""
        whole = Slot(Role.DELIVERED, slot.position)
        for target, stage in enumerate(self._stages):
            if target != source and (stage.is_mine or self._stages[source].is_mine):
                there = NamedSharding(stage.mesh, PartitionSpec())
                maker = self._stages[source]
                value = memories[source][slot] if maker.is_mine else maker.ghost(slot)
                memories[target][whole] = self._transport_to(value, there)

"""One process's walk through a step: its own programs in the order of the schedule, and the moves it takes part in.

Everything is issued without waiting: JAX runs a device's programs in the order they were issued and each as soon as
what it reads exists. An array is let go right after its last use was issued, and its memory is free when that has run.

CPU devices of several processes are an exception. They run programs in no order, on a few threads that a collective
blocks while it waits for another process, so that a program issued early may wait for threads that a later one holds.
There a process issues a program of several devices only when the one before has ended. The order of operations is one
in which even blocking calls cannot wait in a circle (`schedule.order`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...lowering.pipeline.slots import PASSING, Role, Slot
from ...lowering.pipeline.surroundings import Surroundings
from ..placing import put
from ..watch import watch
from .operations import Move, Operation, Run, Update, Work
from .stage_runtime import Compiled, StageRuntime
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
        self._asynchronous = any(stage.stage.asynchronous for stage in stages)
        self._began_with: dict[int, Memory] = {}
        self._ghosts: dict[tuple[int, Slot], Any] = {}
        self._running: Any = ()
        self._about: Callable[[], str] = str
        self._order = [one for one in order if self._takes_part(one)]
        self._programs: list[dict[Work, Compiled]] = [{} for _ in stages]
        for one in self._order:
            if isinstance(one, Run) and one.work not in self._programs[one.stage]:
                self._programs[one.stage][one.work] = getattr(stages[one.stage], one.work.value)
        self._joins = [{slot: stage.join(slot) for slot in stage.stage.collected} for stage in stages]
        self._exchanges = [self._exchanged(number) for number in range(max(len(s.update.rounds) for s in stages))]

    def _takes_part(self, one: Operation) -> bool:
        """Whether this process has a device of an operation's stages."""
        if isinstance(one, Move):
            return self._stages[one.source].is_mine or self._stages[one.target].is_mine
        return self._stages[one.stage].is_mine

    @cached_property
    def _index(self) -> list[list[Any]]:
        """The number of each microbatch on the devices of each stage; placed when a step first runs, since programs may
        be compiled for devices that are not here."""
        places = [stage.sharding(Slot(Role.INDEX)) if stage.is_mine else None for stage in self._stages]
        return [[put(np.int32(m), one) for m in range(self._count)] if one else [] for one in places]

    def _exchanged(self, number: int) -> list[tuple[int, int, list[Slot]]]:
        """What stages exchange after a round: source, target and arrays."""
        found: dict[tuple[int, int], list[Slot]] = {}
        for target, stage in enumerate(self._stages):
            wanted = {slot for later in stage.update.rounds[number + 1 :] for slot in later.inputs}
            for slot in sorted(wanted):
                made = {Role.BUNDLE: slot.position, Role.SYNCHRONISED: 0}.get(slot.role)
                if made == number and slot.source != target:
                    found.setdefault((slot.source, target), []).append(slot)
        return [(source, target, slots) for (source, target), slots in found.items()]

    def run(self, memories: list[Memory]) -> None:
        """Run one step.

        Args:
          memories: for each stage its arguments, parameters and inputs; afterwards they hold its outputs.
        """
        passing: list[list[Memory]] = [[{} for _ in range(self._count)] for _ in self._stages]
        for number, (stage, memory) in enumerate(zip(self._stages, memories, strict=True)):
            if not stage.is_mine:
                continue
            if stage.prepare is not None:
                self._call(number, stage.prepare, memory, "the preparation")
            self._call(number, stage.begin, memory, "the beginning")
            if self._asynchronous:
                update = stage.update
                held = [slot for slot in stage.stage.parameters if update.direct(slot) in update.taken_over]
                self._began_with[number] = {slot: memory[slot] for slot in held}
        for one in self._order:
            if isinstance(one, Run):
                self._run(one, memories[one.stage], passing[one.stage][one.microbatch])
                if one.stage in self._began_with:
                    self._let_go(one.stage, memories[one.stage], passing[one.stage])
            elif isinstance(one, Move):
                self._move(one, passing)
            elif one.microbatch is not None:
                self._update_now(one, memories[one.stage], passing[one.stage][one.microbatch])
            else:
                self._begin_update(one, memories[one.stage], passing[one.stage])
        if self._asynchronous:
            self._report(memories, passing)
            self._began_with.clear()
        else:
            self._finish_update(memories)

    def _wait_for_last(self) -> None:
        """Wait until the last program of several devices has ended, where that is needed."""
        if self._one_by_one:
            with watch.over(self._about):
                jax.block_until_ready(self._running)
            self._running = ()

    def _issue(
        self, stage: StageRuntime, program: Compiled, arguments: Iterable[Any], about: Callable[[], str]
    ) -> Sequence[Any]:
        if stage.mesh.size == 1:
            return program.run(*arguments)
        if not self._one_by_one:
            return program.run(*arguments)
        self._wait_for_last()
        with watch.over(about):
            made = program.run(*arguments)
        self._running, self._about = made, about
        return made

    def _transport_to(
        self,
        values: Sequence[Any],
        ends: tuple[int, int],
        shardings: Sequence[NamedSharding],
        slots: Sequence[Slot],
        microbatch: int | None,
    ) -> list[Any]:
        """Arrays of one stage on another; `ends` are the two."""

        def about() -> str:
            source, target = ends
            numbers = ", ".join(str(slot.position) for slot in slots)
            what = f"value{'s' * (len(slots) > 1)} {numbers} ({slots[0].role}){_of_microbatch(microbatch)}"
            return f"the move of {what} from stage {source + 1} to stage {target + 1}, {self._with(*ends)}"

        return self.move(values, shardings, about)

    def move(self, values: Sequence[Any], shardings: Sequence[NamedSharding], about: Callable[[], str]) -> list[Any]:
        """Arrays of one mesh in other layouts on another, outside the order of operations. Every process that has a
        device of either calls it.

        Args:
          values: the arrays.
          shardings: where they are to be.
          about: says what is moved.
        """
        self._wait_for_last()
        moved = self._transport.move(values, shardings, about)
        self._running, self._about = moved if self._one_by_one else (), about
        return moved

    def call(self, program: Callable[..., Any], arguments: Sequence[Any], about: Callable[[], str]) -> Any:
        """The results of a program of one mesh, outside the order of operations. Every process calls it."""
        self._wait_for_last()
        made = program(*arguments)
        self._running, self._about = made if self._one_by_one else (), about
        return made

    def _with(self, *stages: int) -> str:
        """The other processes of some stages."""
        all_of = {d.process_index for number in stages for d in self._stages[number].mesh.devices.flat}
        others = sorted(all_of - {jax.process_index()})
        return f"with process {', '.join(map(str, others))}" if others else "in this process alone"

    def _call(self, number: int, program: Compiled, memory: Memory, what: str) -> None:
        def about() -> str:
            return f"{what} of stage {number + 1}, {self._with(number)}"

        made = self._issue(self._stages[number], program, [memory[slot] for slot in program.inputs], about)
        memory.update(zip(program.outputs, made, strict=True))

    def _run(self, one: Run, memory: Memory, passing: Memory) -> None:
        program = self._programs[one.stage][one.work]
        index = self._index[one.stage][one.microbatch]

        def read(slot: Slot) -> Any:
            if slot.role is Role.INDEX:
                return index
            return passing[slot] if slot in passing else memory[slot]

        def about() -> str:
            return f"the {one.work} of stage {one.stage + 1}{_of_microbatch(one.microbatch)}, {self._with(one.stage)}"

        if self._asynchronous and one.work is Work.FORWARD:
            # The backward pass wants the same weights, whatever updates come between.
            passing.update((slot, memory[slot]) for slot in self._stages[one.stage].stage.parameters)
        made = self._issue(self._stages[one.stage], program, map(read, program.inputs), about)
        for slot, array in zip(program.outputs, made, strict=True):
            (passing if slot.role in PASSING else memory)[slot] = array
        for slot in one.last:
            passing.pop(slot, None)

    def _let_go(self, number: int, memory: Memory, passing: Sequence[Memory]) -> None:
        """Free the weights that the step began with, once no microbatch needs them: the caller still holds them."""
        old = self._began_with[number]
        needed = {id(part[slot]) for part in passing for slot in old if slot in part}
        for slot, array in list(old.items()):
            if array is not memory[slot] and id(array) not in needed:
                if not array.is_deleted():
                    array.delete()
                del old[slot]

    def _move(self, one: Move, passing: list[list[Memory]]) -> None:
        source, target = passing[one.source][one.microbatch], passing[one.target][one.microbatch]
        values = self._moved(source, one.sent, one.source, one.target, one.received, one.microbatch)
        if self._stages[one.target].is_mine:
            target.update(zip(one.received, values, strict=True))
        for slot in one.last:
            source.pop(slot, None)

    def _moved(
        self, memory: Memory, sent: Sequence[Slot], source: int, target: int, received: Sequence[Slot],
        microbatch: int | None = None,
    ) -> list[Any]:  # fmt: skip
        """Arrays of one stage's memory, on another stage."""
        here, there = self._stages[source], self._stages[target]
        values = [memory[slot] if here.is_mine else self._ghost(source, slot) for slot in sent]
        shardings = [there.sharding(slot) for slot in received]
        return self._transport_to(values, (source, target), shardings, sent, microbatch)

    def _ghost(self, source: int, slot: Slot) -> Any:
        """What this process has of an array of a stage that is not its own."""
        if (source, slot) not in self._ghosts:
            self._ghosts[source, slot] = self._stages[source].ghost(slot)
        return self._ghosts[source, slot]

    def _update_now(self, one: Update, memory: Memory, passing: Memory) -> None:
        """The update of one microbatch: the next forward has the new weights."""
        stage = self._stages[one.stage]
        program = stage.rounds[0] if one.in_place else stage.update_beside
        results = {slot: array for slot, array in passing.items() if slot.role is Role.COLLECTED}
        memory.update(results)
        self._call(one.stage, program, memory, f"the update{_of_microbatch(one.microbatch)}")
        for slot in (*results, *stage.stage.gradients):
            memory.pop(slot, None)
        for slot in program.outputs:
            if (argument := Slot(Role.ARGUMENT, slot.position)) in memory and stage.is_state(slot):
                memory[argument] = memory[slot]
        for slot in (*stage.stage.parameters, *stage.stage.inputs):
            if (index := stage.update.direct(slot)) is not None and stage.update.is_argument(slot):
                memory[slot] = memory[Slot(Role.ARGUMENT, index)]

    def _report(self, memories: Sequence[Memory], passing: Sequence[Sequence[Memory]]) -> None:
        """What depends on the results of all microbatches, where each has had its update."""
        for number, (stage, memory) in enumerate(zip(self._stages, memories, strict=True)):
            if stage.is_mine and stage.report is not None:
                self._join(number, memory, passing[number])
                self._call(number, stage.report, memory, "the report")

    def _join(self, number: int, memory: Memory, passing: Sequence[Memory]) -> None:
        for slot, join in self._joins[number].items():
            memory[Slot(Role.JOINED, slot.position)] = join([part.pop(slot) for part in passing])

    def _begin_update(self, one: Update, memory: Memory, passing: list[Memory]) -> None:
        """The first round, for which a stage needs no other."""
        self._join(one.stage, memory, passing)
        self._round(one.stage, 0, memory)

    def _round(self, place: int, number: int, memory: Memory) -> None:
        # Arrays that no later round reads are let go by the caller, which has no other use for this memory.
        stage = self._stages[place]
        self._call(place, stage.rounds[number], memory, "the update")
        if number == 0:
            for slot in (*stage.stage.gradients, *stage.stage.inputs):
                memory.pop(slot, None)

    def _finish_update(self, memories: list[Memory]) -> None:
        for number, exchanged in enumerate(self._exchanges):
            if number:
                for place, (stage, memory) in enumerate(zip(self._stages, memories, strict=True)):
                    if stage.is_mine and number < len(stage.rounds):
                        self._round(place, number, memory)
            for source, target, slots in exchanged:
                if self._stages[source].is_mine or self._stages[target].is_mine:
                    values = self._moved(memories[source], slots, source, target, slots)
                    if self._stages[target].is_mine:
                        memories[target].update(zip(slots, values, strict=True))

    def deliver(
        self, memories: Sequence[Memory], slot: Slot, source: int, to: Collection[int] | None = None
    ) -> None:  # fmt: skip
        """Give a result of one stage to others, whole on each device, so that every process can read it.

        Args:
          memories: of the stages.
          slot: the result.
          source: the stage that has it.
          to: the stages that are given it; None for all, the one that has it included.
        """
        whole, maker = Slot(Role.DELIVERED, slot.position), self._stages[source]
        for target, stage in enumerate(self._stages):
            if (to is not None and target not in to) or not (stage.is_mine or maker.is_mine):
                continue
            there = NamedSharding(stage.mesh, PartitionSpec())
            value = memories[source][slot] if maker.is_mine else maker.ghost(slot)
            if target == source and value.sharding.is_fully_replicated:
                memories[target][whole] = value
            else:
                (memories[target][whole],) = self._transport_to([value], (source, target), [there], [slot], None)


def _of_microbatch(number: int | None) -> str:
    return "" if number is None else f" of microbatch {number + 1}"

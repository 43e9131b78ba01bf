"""Peak memory of a local program before it is compiled: fuse, order, then count the bytes alive at every step.

The compiler's own steps are modelled one by one, with no constant fitted to a program:

* `fusion` decides which values exist.
* Kernels run in the order of the backend they are for (`kernel_order`): on the CPU each as soon as its operands exist,
  elsewhere so that little memory is needed, and on GPUs since Ampere so that collectives run beside compute
  (`latency_hiding`). On GPUs `multi_output` has joined kernels before. Of its three orders for little memory XLA takes
  one for the whole program, by a count of its own, which is modelled for GPUs before Ampere, and before Hopper for
  programs without collectives (`_counted`).
* A donated argument, or a loop's carry, hands its buffer to its output. If some kernel that reads the old value is not
  forced to run before the output is written, the old value is copied first.
* A result takes over the buffer of an operand that dies there, if both are equally large and the kernel reads it at the
  index it writes.
* Buffers of outputs hold other values while they are free: each temporary, largest first, tries them before it takes
  memory of its own.
* A loop keeps its carried and stacked buffers outside and needs its body's temporaries while it runs.

* On TPUs buffers are placed as kernels run, and holes between them count (`heap`). Other backends pack within a few per
  cent of the bytes alive, and what is alive counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright._jax.dataflow import WIDE, WIDEST, Kind, Program
from meshwright.memory.fusion import Fusion, Kernel
from meshwright.memory.heap import Stretch, heap_bytes
from meshwright.memory.kernel_order import (
    breadth_first,
    copied_arguments,
    depth_first,
    greedy,
    heaviest_first,
    may_overwrite,
    readers_first,
    without_dead_code,
    without_equals,
    without_views,
)
from meshwright.memory.latency_hiding import has_collectives, latency_hiding, sends
from meshwright.memory.multi_output import with_several_results
from meshwright.memory.stacks import with_stacks_as_read


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBuffer:
    """A temporary alive at the peak: the operation that made it and its bytes."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedMemory:
    """Predicted bytes on one device; `peak_bytes` = arguments + outputs - aliased + temporaries.

    `largest` are the temporaries alive at the peak, largest first.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    largest: tuple[LiveBuffer, ...]

    @property
    def peak_bytes(self) -> int:
        """Everything the step needs at its worst moment."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def predict(program: Program) -> PredictedMemory:
    """The memory `program` will need once compiled, in bytes on the device that runs it.

    >>> from meshwright._jax.dataflow import Kind, Operation, Program, Value
    >>> array = Value(size_bytes=400, elements=100, rank=1)
    >>> sort = Operation(kind=Kind.OPAQUE, name="sort", reads=(0,), writes=(1,))
    >>> add = Operation(kind=Kind.ELEMENTWISE, name="add", reads=(0, 1), writes=(2,))
    >>> program = Program(values=(array,) * 3, operations=(sort, add), arguments=(0,), outputs=(2,))
    >>> predict(program).temp_bytes
    400
    """
    sizes = [value.size_bytes for value in program.values]
    program = without_dead_code(program)
    read = {value for operation in program.operations for value in operation.reads}.union(program.outputs)
    found = _temporaries(program)
    on_tpu = program.platform.startswith("tpu")
    return PredictedMemory(
        # JAX does not hand over arguments that nothing reads.
        argument_bytes=sum(sizes[v] for v in program.arguments if v in read),
        output_bytes=sum(sizes[v] for v in program.outputs),
        alias_bytes=sum(sizes[program.outputs[output]] for _, output in program.kept),
        temp_bytes=max(found.alive_bytes, heap_bytes(found.stretches)) if on_tpu else found.alive_bytes,
        largest=found.largest,
    )


@dataclass(slots=True, kw_only=True)
class _Buffer:
    """Bytes reserved from the kernel that first writes them to the last that reads them; inclusive positions."""

    name: str
    size_bytes: int
    first: int
    last: int


@dataclass(slots=True, kw_only=True)
class _Slot:
    """An output's buffer and the moments in which it is taken, a bit for each (`_moments`)."""

    size_bytes: int
    taken: int


def _moments(first: int, last: int) -> int:
    """A bit for each moment of a stretch of time; the lowest is of -1, before the program."""
    return ((1 << (last - first + 1)) - 1) << (first + 1)


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels of a program that are to be ordered, the arguments that are copied, and by the position of a loop or
    a branch those of its bodies."""

    program: Program
    kernels: list[Kernel]
    copied: set[int]
    bodies: dict[int, list[_Kernels]]


def _kernels_of(program: Program) -> _Kernels:
    program = without_dead_code(program)
    if program.platform.startswith("tpu"):
        program = with_stacks_as_read(program)
    program, kernels = without_equals(*without_views(program, Fusion(program).run()))
    if program.platform in ("gpu", WIDE, WIDEST):
        kernels = with_several_results(program, kernels)
    if program.platform == "cpu":
        copied = copied_arguments(program, kernels)
    else:
        kernels, copied = readers_first(program, kernels)
    bodies = {k.position: [*map(_kernels_of, k.operation.bodies)] for k in kernels if k.operation.bodies}
    return _Kernels(program, kernels, copied, bodies)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The temporaries of a program in one order.

    Args:
      alive_bytes: at the worst moment.
      largest: those alive then.
      stretches: when each is there, those of loops' bodies while the loop runs.
      moments: of the program, with those of loops' bodies.
    """

    alive_bytes: int
    largest: tuple[LiveBuffer, ...]
    stretches: list[Stretch]
    moments: int


def _temporaries(program: Program) -> _Found:
    """The temporaries in the order that the compiler takes."""
    given = _kernels_of(program)
    if program.platform == WIDEST or (program.platform == WIDE and not sends(program)):
        ordered = (_in_order(given, order) for order in (greedy, heaviest_first, depth_first))
        return min(ordered, key=lambda one: one[0])[1]
    return _in_best_order(given)


def _in_best_order(given: _Kernels) -> _Found:
    program, kernels, copied = given.program, given.kernels, given.copied
    inside = {
        position: max(map(_in_best_order, bodies), key=lambda one: one.alive_bytes)
        for position, bodies in given.bodies.items()
    }
    if program.platform == "cpu":
        return _peak(program, breadth_first(program, kernels, copied), inside)
    if program.platform in ("gpu", WIDE) and has_collectives(kernels):
        return _peak(program, latency_hiding(program, depth_first(program, kernels, copied)), inside)
    orders = (order(program, kernels, copied) for order in (greedy, depth_first, heaviest_first))
    return min((_peak(program, order, inside) for order in orders), key=lambda found: found.alive_bytes)


_Order = Callable[[Program, list[Kernel], set[int]], list[Kernel | int]]


def _in_order(given: _Kernels, order: _Order) -> tuple[int, _Found]:
    """What a program needs whose kernels, those of loops too, are in one of the memory scheduler's orders: by its own
    count, by which XLA chooses one for the whole program, and once buffers are taken over."""
    inner = {
        position: [_in_order(body, order) for body in bodies] for position, bodies in given.bodies.items()
    }  # fmt: skip
    steps = order(given.program, given.kernels, given.copied)
    counted = _counted(given.program, steps, {at: max(one for one, _ in found) for at, found in inner.items()})
    inside = {at: max((f for _, f in bodies), key=lambda one: one.alive_bytes) for at, bodies in inner.items()}
    return counted, _peak(given.program, steps, inside)


def _counted(program: Program, order: list[Kernel | int], inside: Mapping[int, int]) -> int:
    """Bytes at the worst moment as XLA's memory scheduler counts them: nothing is taken over, so that what a kernel
    writes is there beside what it reads, a loop's stacks too (`HeapSimulator::MinimumMemoryForModule`). Arguments, and
    the outputs that lie in their buffers, are the same in all orders, and left out."""
    sizes = [value.size_bytes for value in program.values]
    kept = {program.outputs[output] for _, output in program.kept}
    last = {value: len(order) for value in program.outputs if value not in kept}
    for moment, step in enumerate(order):
        for value in (step,) if isinstance(step, int) else step.uses:
            last[value] = max(moment, last.get(value, moment))
    left = [0] * (len(order) + 2)
    alive = most = 0
    for moment, step in enumerate(order):
        made = (step,) if isinstance(step, int) else step.writes
        size = sum(sizes[value] for value in made)
        for value in made:
            left[min(moment if value in kept else last.get(value, moment), len(order))] += sizes[value]
        within = 0 if isinstance(step, int) else inside.get(step.position, 0)
        most = max(most, alive + max(size, within))
        alive += size - left[moment]
    return most


def _peak(program: Program, order: list[Kernel | int], inside: Mapping[int, _Found]) -> _Found:
    """The temporaries in one order; `inside` are those of kernels' own programs, by their positions."""
    end = len(order)
    last: dict[int, int] = {}
    for moment, step in enumerate(order):
        for value in (step,) if isinstance(step, int) else step.uses:
            last[value] = moment
    buffers, slots = _buffers(program, order, last)
    remaining = _placed(buffers, slots)
    change = [0] * (end + 2)
    for buffer in remaining:
        change[buffer.first] += buffer.size_bytes
        change[buffer.last + 1] -= buffer.size_bytes
    inner = {
        moment: inside[step.position]
        for moment, step in enumerate(order)
        if isinstance(step, Kernel) and step.operation.bodies
    }
    alive, peak, at = 0, 0, 0
    begins, begun = [0] * (end + 2), 0
    for moment in range(end + 1):
        alive += change[moment]
        within = inner[moment].alive_bytes if moment in inner else 0
        if alive + within > peak:
            peak, at = alive + within, moment
        begins[moment], begun = begun, begun + 1 + (inner[moment].moments if moment in inner else 0)
    begins[end + 1] = begun
    named = [LiveBuffer(name=b.name, size_bytes=b.size_bytes) for b in remaining if b.first <= at <= b.last]
    if at in inner:
        named.append(LiveBuffer(name="inside the loop", size_bytes=inner[at].alive_bytes))
    stretches = [Stretch(begins[b.first], begins[b.last + 1] - 1, b.size_bytes) for b in remaining]
    for moment, found in inner.items():
        base = begins[moment] + 1
        stretches += [Stretch(base + one.first, base + one.last, one.size_bytes) for one in found.stretches]
    return _Found(
        alive_bytes=peak, largest=tuple(sorted(named, key=lambda b: -b.size_bytes)), stretches=stretches, moments=begun
    )


def _buffers(program: Program, order: list[Kernel | int], last: dict[int, int]) -> tuple[list[_Buffer], list[_Slot]]:
    """Every temporary buffer with its lifetime, and the outputs' buffers with the times they are taken."""
    sizes = [value.size_bytes for value in program.values]
    outputs = set(program.outputs)
    lasting = outputs.union(program.arguments)
    home: dict[int, _Buffer] = {}  # the temporary a value lives in
    buffers: list[_Buffer] = []
    born: dict[int, int] = {}
    claimed: set[int] = set()  # initial values that a loop already turned into a carry

    def reserve(name: str, value: int, moment: int) -> None:
        buffer = _Buffer(name=name, size_bytes=sizes[value], first=moment, last=max(moment, last.get(value, moment)))
        buffers.append(buffer)
        home[value] = buffer

    for moment, step in enumerate(order):
        if isinstance(step, int):
            reserve("copy", step, moment)
            continue
        taken: set[int] = set()  # operands whose buffers results of this kernel have taken over
        for rank, value in enumerate(step.writes):
            born[value] = moment
            target = _taken_over(program, step, rank, last, moment, lasting)
            if step.operation.kind is Kind.LOOP and target is not None:
                free = target in home and target not in outputs and last[target] == moment and target not in claimed
                claimed.add(target)
                if value in outputs:
                    if free:
                        born[value] = home[target].first
                        buffers.remove(home[target])
                elif free:
                    home[value] = home[target]
                    home[value].last = max(home[value].last, last.get(value, moment))
                else:
                    reserve("copy", value, moment)
                continue
            if value in outputs:
                continue
            if target is not None and target in home and last[target] == moment and target not in taken:
                taken.add(target)
                home[value] = home[target]
                home[value].last = max(home[value].last, last.get(value, moment))
            else:
                reserve(step.operation.name, value, moment)
    return buffers, _slots(program, order, last, born)


def _slots(program: Program, order: list[Kernel | int], last: dict[int, int], born: dict[int, int]) -> list[_Slot]:
    """The outputs' buffers; one taken over from an argument is first taken until the argument is read or copied."""
    copied = {step: moment for moment, step in enumerate(order) if isinstance(step, int)}
    giver = {program.outputs[output]: program.arguments[argument] for argument, output in program.kept}
    slots: list[_Slot] = []
    arguments = set(program.arguments)
    for value in dict.fromkeys(program.outputs):
        if value in arguments:
            continue
        first = born.get(value, 0)
        taken = _moments(first, len(order))
        if value in giver:
            taken |= _moments(-1, copied.get(giver[value], last.get(giver[value], 0)))
        slots.append(_Slot(size_bytes=program.values[value].size_bytes, taken=taken))
    return slots


def _taken_over(
    program: Program, kernel: Kernel, rank: int, last: dict[int, int], moment: int, lasting: set[int]
) -> int | None:
    """The operand whose buffer the kernel's result `rank` takes over, if any; `lasting` are arguments and outputs."""
    result = kernel.writes[rank]
    if kernel.operation.kind is Kind.LOOP:
        return next((kernel.operation.reads[read] for read, write in kernel.operation.kept if write == rank), None)
    if kernel.in_place is not None and kernel.in_place in kernel.uses:
        return kernel.in_place
    dying = (v for v in kernel.uses if last[v] == moment and v not in lasting)
    return next((operand for operand in dying if may_overwrite(program, kernel, operand, result)), None)


def _placed(buffers: list[_Buffer], slots: list[_Slot]) -> list[_Buffer]:
    """The temporaries left after filling the free stretches of output buffers, largest temporary first."""
    slots = sorted(slots, key=lambda slot: slot.size_bytes)
    sizes, taken = [slot.size_bytes for slot in slots], [slot.taken for slot in slots]
    remaining: list[_Buffer] = []
    for buffer in sorted((one for one in buffers if one.size_bytes), key=lambda b: -b.size_bytes):
        wanted = _moments(buffer.first, buffer.last)
        fits = range(bisect_left(sizes, buffer.size_bytes), len(slots))
        place = next((place for place in fits if not taken[place] & wanted), None)
        if place is not None:
            taken[place] |= wanted
        else:
            remaining.append(buffer)
    return remaining

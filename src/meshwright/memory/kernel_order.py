"""The order in which kernels run, and what must be copied because of it.

XLA's GPU and TPU backends try three orders and take the one that needs the least memory (`DefaultMemoryScheduler`): the
greedy one, the depth-first one, and the one that is depth-first into those operands first that take most to make, so
that what is cheap to compute again is not there until it is read; by which count it takes one on GPUs before Ampere,
`liveness` says. Programs of GPUs since Ampere are ordered again after that (`latency_hiding`). XLA's CPU backend runs
kernels breadth-first: each as soon as its operands exist, in the order they became ready (for parallelism, not for
memory; so recomputation and updates run as early as they can). A donated argument that is still to be read by a kernel
not ordered before the output that takes over its buffer is copied when the program starts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

from meshwright._jax.dataflow import Kind, Operation, Program, Use
from meshwright.memory.fusion import Kernel, joined


def without_dead_code(program: Program) -> Program:
    """The same program without operations whose results nobody needs."""
    needed = set(program.outputs)
    alive: list[Operation] = []
    for operation in reversed(program.operations):
        if needed.intersection(operation.writes):
            needed.update(operation.reads)
            alive.append(operation)
    return replace(program, operations=tuple(reversed(alive)))


def without_views(program: Program, kernels: list[Kernel]) -> tuple[Program, list[Kernel]]:
    """Kernels that only rename operands dropped, and everybody reading the operands instead."""
    shown: dict[int, int] = {}
    gates: dict[int, frozenset[int]] = {}  # what must exist before a value that passed a barrier may be read
    real: list[Kernel] = []
    for kernel in kernels:
        if kernel.is_view:
            (operand,) = kernel.uses
            shown[kernel.writes[0]] = shown.get(operand, operand)
            gates[kernel.writes[0]] = gates.get(operand, frozenset())
            continue
        after = frozenset[int]().union(*(gates.get(value, frozenset()) for value in kernel.uses))
        if kernel.operation.kind is Kind.BARRIER:
            reads = [shown.get(value, value) for value in kernel.operation.reads]
            shown.update(zip(kernel.writes, reads, strict=True))
            gates.update(dict.fromkeys(kernel.writes, after.union(reads)))
            continue
        uses: dict[int, Use] = {}
        for value, use in kernel.uses.items():
            value = shown.get(value, value)
            uses[value] = joined(uses.get(value), use)
        reads = tuple(shown.get(value, value) for value in kernel.operation.reads)
        real.append(
            replace(kernel, uses=uses, after=after.difference(uses), operation=replace(kernel.operation, reads=reads))
        )
    return replace(program, outputs=tuple(shown.get(value, value) for value in program.outputs)), real


def without_equals(program: Program, kernels: list[Kernel]) -> tuple[Program, list[Kernel]]:
    """Kernels that compute what an earlier one computes from the same values dropped: recomputation behind a barrier
    that the compiler forgot."""
    if program.alike is None:
        return program, kernels
    alike = program.alike
    known: dict[object, Kernel] = {}
    instead: dict[int, int] = {}
    left: list[Kernel] = []
    for kernel in kernels:
        uses: dict[int, Use] = {}
        for value, use in kernel.uses.items():
            value = instead.get(value, value)
            uses[value] = joined(uses.get(value), use)
        reads = tuple(instead.get(value, value) for value in kernel.operation.reads)
        kernel = replace(kernel, uses=uses, operation=replace(kernel.operation, reads=reads))
        same = (kernel.library, tuple(alike[v] for v in kernel.writes), frozenset(uses))
        if uses and kernel.operation.kind not in (Kind.LOOP, Kind.BRANCH) and same in known:
            instead.update(zip(kernel.writes, known[same].writes, strict=True))
            continue
        known[same] = kernel
        left.append(kernel)
    return replace(program, outputs=tuple(instead.get(value, value) for value in program.outputs)), left


def readers_first(program: Program, kernels: list[Kernel]) -> tuple[list[Kernel], set[int]]:
    """Kernels that write into an argument's buffer ordered after those that read the argument, and the arguments for
    which no such order exists: these are copied when the program starts."""
    producer = {value: kernel for kernel in kernels for value in kernel.writes}
    above = ancestors(kernels)
    readers = _argument_readers(kernels)
    below: dict[int, list[int]] = {}
    for kernel in kernels:
        for value in (*kernel.uses, *kernel.after):
            if value in producer:
                below.setdefault(producer[value].position, []).append(kernel.position)
    gates: dict[int, set[int]] = {}
    copied: set[int] = set()
    for argument, output, writer in _overwritten(program, producer):
        others = [one for one in readers.get(argument, ()) if one is not writer]
        needed = 0
        for reader in others:
            needed |= above[reader.position]
        overwrites = writer in readers.get(argument, ()) and not may_overwrite(program, writer, argument, output)
        if overwrites or needed >> writer.position & 1:
            copied.add(argument)
            continue
        stack = [writer.position]
        while stack:
            position = stack.pop()
            if above[position] | needed != above[position]:
                above[position] |= needed
                stack.extend(below.get(position, ()))
        for reader in others:
            below.setdefault(reader.position, []).append(writer.position)
            gates.setdefault(writer.position, set()).update(reader.writes)
    ordered = [
        replace(one, after=one.after.union(gates[one.position]).difference(one.uses)) if one.position in gates else one
        for one in kernels
    ]
    return ordered, copied


def _overwritten(program: Program, producer: Mapping[int, Kernel]) -> Iterator[tuple[int, int, Kernel]]:
    """Each argument whose buffer an output takes over, the output, and the kernel that writes it."""
    for argument_position, output_position in program.kept:
        output = program.outputs[output_position]
        if output in producer:
            yield program.arguments[argument_position], output, producer[output]


def ancestors(kernels: Sequence[Kernel]) -> dict[int, int]:
    """By position of each kernel a bit for itself and for each kernel that has to run before it."""
    producer = {value: kernel for kernel in kernels for value in kernel.writes}
    above: dict[int, int] = {}
    for kernel in kernels:
        mask = 1 << kernel.position
        for value in (*kernel.uses, *kernel.after):
            if value in producer:
                mask |= above[producer[value].position]
        above[kernel.position] = mask
    return above


def _argument_readers(kernels: list[Kernel]) -> dict[int, list[Kernel]]:
    readers: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        for value in kernel.uses:
            readers.setdefault(value, []).append(kernel)
    return readers


def copied_arguments(program: Program, kernels: list[Kernel]) -> set[int]:
    """Arguments whose buffer an output takes over while a kernel that reads them may still have to run."""
    producer = {value: kernel for kernel in kernels for value in kernel.writes}
    above, readers = ancestors(kernels), _argument_readers(kernels)
    copied: set[int] = set()
    for argument, output, writer in _overwritten(program, producer):
        for reader in readers.get(argument, ()):
            before = above[writer.position] >> reader.position & 1
            if not before or (reader is writer and not may_overwrite(program, writer, argument, output)):
                copied.add(argument)
    return copied


def may_overwrite(program: Program, kernel: Kernel, operand: int, result: int) -> bool:
    """Whether `kernel` can write `result` into the buffer of `operand`: equally large, read where it is written."""
    if kernel.operation.kind is Kind.LOOP:
        return any(
            kernel.operation.reads[read] == operand and kernel.operation.writes[write] == result
            for read, write in kernel.operation.kept
        )
    if program.values[operand].size_bytes != program.values[result].size_bytes:
        return False
    return kernel.in_place == operand or ((kernel.fusible or kernel.product) and kernel.uses.get(operand) is Use.SAME)


def _post_order(
    program: Program, kernels: list[Kernel], effort: Mapping[int, tuple[int, int]] | None = None
) -> list[Kernel]:
    """Kernels as a depth-first walk from the outputs leaves them: the order in which XLA lists a value's users.

    Args:
      program: their program.
      kernels: each after those that it needs.
      effort: by position of a kernel, where the operand that has most of it is to be visited first.
    """
    producer = {value: kernel for kernel in kernels for value in kernel.writes}
    left: list[Kernel] = []
    seen: set[int] = set()

    def makers(values: Iterable[int]) -> list[tuple[Kernel, bool]]:
        found = [(producer[value], False) for value in values if value in producer]
        if effort is not None:
            found.sort(key=lambda one: effort[one[0].position], reverse=True)
        return found[::-1]

    stack = makers(program.outputs)
    while stack:
        kernel, entered = stack.pop()
        if entered:
            left.append(kernel)
        elif kernel.position not in seen:
            seen.add(kernel.position)
            stack.append((kernel, True))
            stack.extend(makers((*kernel.uses, *kernel.after)))
    return left


def _effort(program: Program, kernels: list[Kernel]) -> dict[int, tuple[int, int]]:
    """By position of each kernel what it takes to make its results, as XLA counts it: readers beside the first one, and
    bytes, of it and of all that it needs, once for each way on which it does; at most those of the whole program. What
    takes one of several results of a kernel is an instruction of its own there.

    Args:
      program: theirs.
      kernels: in the order in which XLA counts: what is counted late may count more.
    """
    producer = {value: kernel for kernel in kernels for value in kernel.writes}
    users = Counter(value for kernel in kernels for value in kernel.uses)
    users.update(dict.fromkeys(program.outputs, 1))
    several = [kernel for kernel in kernels if len(kernel.writes) > 1]
    most = len(kernels) + len(program.arguments) + sum(len(kernel.writes) for kernel in several)
    found: dict[int, tuple[int, int]] = {}
    written_bytes = 0
    for kernel in kernels:
        mine = sum(program.values[value].size_bytes for value in kernel.writes)
        written_bytes += mine
        read = [users[value] for value in kernel.writes if users[value]]
        shared = max((read[0] if len(kernel.writes) == 1 and read else len(read)) - 1, 0)
        size = mine
        made = [value for value in kernel.uses if value in producer]
        for value in made:
            maker = producer[value]
            behind, its_size = found[maker.position]
            shared += behind + (users[value] - 1 if len(maker.writes) > 1 else 0)
            size += its_size
        found[kernel.position] = min(shared, most), min(size, written_bytes)
    return found


def _readers(program: Program, kernels: list[Kernel]) -> dict[int, set[int]]:
    """By position of each kernel those that read its results; -1 for whoever reads the program's."""
    producer = {value: kernel.position for kernel in kernels for value in kernel.writes}
    found: dict[int, set[int]] = {kernel.position: set() for kernel in kernels}
    for kernel in kernels:
        for value in kernel.uses:
            if value in producer:
                found[producer[value]].add(kernel.position)
    for value in program.outputs:
        if value in producer:
            found[producer[value]].add(-1)
    return found


def greedy(program: Program, kernels: list[Kernel], copied: set[int]) -> list[Kernel | int]:
    """Copied arguments, then always the kernel that frees most beside what it makes, of those whose operands exist: of
    several the one that most others read, then the one that was ready last. Single numbers come first."""
    producer = {value: kernel for kernel in kernels for value in kernel.writes}
    reading: dict[int, list[Kernel]] = {value: [] for value in producer}
    users: dict[int, set[int]] = {kernel.position: set() for kernel in kernels}
    waiting: dict[int, int] = {}
    for kernel in kernels:
        for value in kernel.uses:
            if value in reading:
                reading[value].append(kernel)
        needed = {producer[value].position for value in (*kernel.uses, *kernel.after) if value in producer}
        waiting[kernel.position] = len(needed)
        for position in needed:
            users[position].add(kernel.position)
    readers = _readers(program, kernels)
    left = {value: len(found) for value, found in reading.items()}
    for value in dict.fromkeys(program.outputs):
        if value in left:
            left[value] += 1
    made = {k.position: sum(program.values[value].size_bytes for value in k.writes) for k in kernels}
    by_position = {kernel.position: kernel for kernel in kernels}
    turn = count()
    ready: list[tuple[bool, int, int, int, int]] = []
    current: dict[int, int] = {}  # the entry of a kernel that counts, by its turn

    def enter(kernel: Kernel) -> None:
        position = kernel.position
        number = all(program.values[value].elements == 1 for value in kernel.writes)
        freed = sum(program.values[value].size_bytes for value in kernel.uses if left.get(value) == 1)
        current[position] = next(turn)
        entry = (not number, made[position] - freed, -len(readers[position]), -current[position], position)
        heappush(ready, entry)

    for kernel in kernels:
        if not waiting[kernel.position]:
            enter(kernel)
    order: list[Kernel | int] = [*sorted(copied)]
    while ready:
        *_, minus_turn, position = heappop(ready)
        if current.get(position) != -minus_turn:
            continue
        del current[position]
        kernel = by_position[position]
        order.append(kernel)
        for value in kernel.uses:
            if value in left:
                left[value] -= 1
                if left[value] == 1:
                    for other in reading[value]:
                        if other.position in current:
                            enter(other)
        for user in sorted(users[position]):
            waiting[user] -= 1
            if not waiting[user]:
                enter(by_position[user])
    return order


def depth_first(program: Program, kernels: list[Kernel], copied: set[int]) -> list[Kernel | int]:
    """Copied arguments, then kernels as a depth-first walk from the outputs leaves them."""
    return [*sorted(copied), *_post_order(program, kernels)]


def heaviest_first(program: Program, kernels: list[Kernel], copied: set[int]) -> list[Kernel | int]:
    """The same, of a kernel's operands first those that take most to make."""
    kernels = _post_order(program, kernels)  # in which XLA counts as well: what it counts last may be the most
    return [*sorted(copied), *_post_order(program, kernels, _effort(program, kernels))]


def breadth_first(program: Program, kernels: list[Kernel], copied: set[int]) -> list[Kernel | int]:
    """Kernels and copied arguments (as their value) in the order XLA's CPU backend runs them."""
    kernels = _post_order(program, kernels)
    by_position = {kernel.position: kernel for kernel in kernels}
    users: dict[int, list[int]] = {}
    waiting: dict[int, int] = {}
    for kernel in kernels:
        waiting[kernel.position] = len(kernel.uses) + len(kernel.after)
        for value in (*kernel.uses, *kernel.after):
            users.setdefault(value, []).append(kernel.position)
    order: list[Kernel | int] = []
    # A copied argument is ready when its copy has run, one round later than an argument read as it is.
    queue: deque[tuple[str, int]] = deque(("argument", value) for value in dict.fromkeys(program.arguments))
    queue.extend(("constant", k.position) for k in kernels if not waiting[k.position])
    while queue:
        what, item = queue.popleft()
        if what == "argument" and item in copied:
            queue.append(("copy", item))
            continue
        if what == "constant":
            queue.append(("kernel", item))
            continue
        if what == "kernel":
            order.append(by_position[item])
            ready = by_position[item].writes
        else:
            ready = (item,)
            if what == "copy":
                order.append(item)
        for value in ready:
            for user in users.get(value, ()):
                waiting[user] -= 1
                if waiting[user] == 0:
                    queue.append(("kernel", user))
    return order

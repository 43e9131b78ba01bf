"""The order that XLA's latency-hiding scheduler gives the kernels of a program for GPUs since Ampere.

XLA splits a collective into a start and a done and schedules a program from its end: of the steps whose readers are all
scheduled it takes one after another, each in front of those before it (`xla/service/latency_hiding_scheduler.cc` and
`xla/service/gpu/model/sol_latency_estimator.cc` of openxla/xla, 2026). One collective is in flight at a time. In this
order of importance it takes

* a done, if no collective is in flight;
* anything that is no start of which the collective would still be running, by the estimate of `_seconds` and
  `_seconds_in_flight`;
* a start that another done waits for; one that waits for no earlier collective and that no done waits for comes last;
* what has the longest chain of collectives before it;
* while a collective is in flight, the kernel that takes most nearly as long as the collective still does;
* what reads a collective's result; what makes most others ready;
* what comes last in the order of the memory scheduler, which has run before: XLA takes the best of three. Here it is
  the depth-first one: with the greedy one rematerialised programs are up to 14 % too low (docs/compilers.md).

So gradients of weights, which only the end of a program needs, are made there, beside each other's sums, and what they
are made of stays until then, rematerialised or not. Recomputation otherwise runs just before what reads it.

Not modelled: what XLA prefers once more than half of the memory is in use. Steps are found in heaps, so that n kernels
with e edges take O((n + e) log n).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import ceil

from meshwright._jax.dataflow import COLLECTIVES, OF_A_HOST, SUMS, Kind, Operation, Program, Spread, Use
from meshwright.memory.fusion import Kernel

# What XLA estimates of an H100, for all GPUs since: what matters is how many kernels run beside a collective.
_BYTES_PER_SECOND = 3.35e12  # of its memory (compilers/gpu_targets.toml)
_FLOPS_PER_SECOND = 989e12  # dense bfloat16, NVIDIA's data sheet
_LAUNCH_SECONDS = 1e-6  # kKernelLaunchOverhead of gpu_performance_model_base.h
# Of collectives, by sol_gpu_cost_model.cc: what a NIC carries, with the overhead of headers; a round trip; the
# preparation of a chunk; and starting one.
_NIC_BYTES_PER_SECOND = 25e9 / 1.025
_ROUND_TRIP_SECONDS, _CHUNK_SECONDS, _CHUNK_BYTES = 31e-6, 6e-6, 4 * 2**20
_COLLECTIVE_SECONDS = 45e-6
# Within a host, of its table of measurements (collective_interpolator_data.h): gathers and scatters of 32 MiB and more.
_HOST_BYTES_PER_SECOND, _HOST_SECONDS = 380e9, 30e-6
# What it takes of a collective whose groups it cannot lay out (`ApproximateLatencyEstimator::kHighLatency`).
_UNKNOWN_SECONDS = 5e-3


# Of a collective whose devices are not known.
_TWO_HOSTS = Spread(16, 1, OF_A_HOST)


def sends(program: Program) -> bool:
    """Whether any operation of a program, or of the programs inside it, is a collective."""
    return any(_is_collective(operation) or any(map(sends, operation.bodies)) for operation in program.operations)


def has_collectives(kernels: Iterable[Kernel]) -> bool:
    """Whether any of a program's own kernels is a collective: XLA leaves the order of other programs as it is."""
    return any(_is_collective(kernel.operation) for kernel in kernels)


def _is_collective(operation: Operation) -> bool:
    return operation.kind is Kind.OPAQUE and operation.name in COLLECTIVES


# Of a step that may be scheduled: whether it reads no collective's result, minus what it makes ready, minus its place.
_Entry = tuple[bool, int, int]


class _Ready:
    """Steps of one depth that may be scheduled, the best of all or of those that take about so long."""

    def __init__(self) -> None:
        self._all: list[_Entry] = []
        self._by_seconds: dict[float, list[_Entry]] = {}
        self._seconds: list[float] = []

    def add(self, entry: _Entry, seconds: float) -> None:
        """Adds an entry; one that a step had before counts no more."""
        heappush(self._all, entry)
        if seconds not in self._by_seconds:
            self._by_seconds[seconds] = []
            insort(self._seconds, seconds)
        heappush(self._by_seconds[seconds], entry)

    def best(self, current: dict[int, _Entry], beside: float | None) -> _Entry | None:
        """The entry to schedule, None if there is none; `beside` are the seconds that are to be filled, if any."""
        if beside is None or not self._seconds:
            return self._top(self._all, current)
        at = bisect_left(self._seconds, beside)
        while at < len(self._seconds) and self._top(self._by_seconds[self._seconds[at]], current) is None:
            del self._by_seconds[self._seconds.pop(at)]
        while at and self._top(self._by_seconds[self._seconds[at - 1]], current) is None:
            at -= 1
            del self._by_seconds[self._seconds.pop(at)]
        nearest = self._seconds[max(at - 1, 0) : at + 1]
        return min(((abs(one - beside), self._by_seconds[one][0]) for one in nearest), default=(0.0, None))[1]

    @staticmethod
    def _top(heap: list[_Entry], current: dict[int, _Entry]) -> _Entry | None:
        while heap and current.get(-heap[0][2]) != heap[0]:
            heappop(heap)
        return heap[0] if heap else None


class _Scheduler:
    """Steps by their place in the memory scheduler's order; a collective is two, of which the second is its done."""

    def __init__(self, program: Program, order: Sequence[Kernel]) -> None:
        self._program = program
        self._steps: list[Kernel] = []
        self._started: dict[int, int] = {}  # the start of each done
        self._done: dict[int, int] = {}  # the done of each start
        producer: dict[int, int] = {}  # the step after which a value can be read
        waiting: dict[int, int] = {}  # by value, the start of a collective of which no done is placed yet
        self._makers: list[list[int]] = []
        for kernel in order:
            values = (*kernel.uses, *kernel.after)
            for value in values:
                if value in waiting:
                    self._place_done(waiting[value], producer, waiting)
            makers = list(dict.fromkeys(producer[value] for value in values if value in producer))
            self._steps.append(kernel)
            self._makers.append(makers)
            made = waiting if _is_collective(kernel.operation) else producer
            made.update(dict.fromkeys(kernel.writes, len(self._steps) - 1))
        for start in dict.fromkeys(waiting.values()):
            self._place_done(start, producer, waiting)
        self._readers: list[list[int]] = [[] for _ in self._steps]
        for step, makers in enumerate(self._makers):
            for maker in makers:
                self._readers[maker].append(step)
        self._cost = [
            _LAUNCH_SECONDS if step in self._started or step in self._done else _seconds(program, kernel)
            for step, kernel in enumerate(self._steps)
        ]
        self._depth = self._depths()
        self._reads_done = [any(maker in self._started for maker in makers) for makers in self._makers]
        self._is_nested = [any(map(sends, kernel.operation.bodies)) for kernel in self._steps]

    def _place_done(self, start: int, producer: dict[int, int], waiting: dict[int, int]) -> None:
        kernel = self._steps[start]
        done = len(self._steps)
        self._steps.append(kernel)
        self._makers.append([start])
        self._started[done], self._done[start] = start, done
        for value in kernel.writes:
            producer[value] = done
            waiting.pop(value, None)

    def _depths(self) -> list[float]:
        """Seconds of the longest chain of collectives that ends before each step, or with it if it is a done."""
        found: list[float] = []
        for step, makers in enumerate(self._makers):
            depth = max((found[maker] for maker in makers), default=0.0)
            if step in self._started:
                depth += _seconds_in_flight(self._program, self._steps[step])
            found.append(depth)
        return found

    def _last_to_first(self) -> Iterator[int]:
        """The steps as they are scheduled, the program's last first."""
        left = [len(readers) for readers in self._readers]
        unlocks = [sum(left[maker] == 1 for maker in makers) for makers in self._makers]
        dones: list[tuple[float, int]] = []
        levels: dict[float, _Ready] = {}
        depths: list[float] = []
        current: dict[int, _Entry] = {}
        now, landing = 0.0, 0.0
        start: int | None = None  # of the collective in flight, once its done is scheduled

        def entry(step: int) -> _Entry:
            return not self._reads_done[step], -unlocks[step], -step

        def add(step: int) -> None:
            if step in self._started:
                heappush(dones, (-self._depth[step], -step))
            elif step not in self._done:
                depth = self._depth[step]
                if depth not in levels:
                    levels[depth] = _Ready()
                    heappush(depths, -depth)
                current[step] = entry(step)
                levels[depth].add(current[step], self._cost[step])

        def best(beside: float | None) -> tuple[float, _Entry] | None:
            """Minus the depth and the entry of the kernel to schedule, if one may be."""
            held: list[int] = []  # loops that use the network themselves, while a collective is in flight
            found = None
            while depths and found is None:
                top = levels[-depths[0]].best(current, beside)
                if top is None:
                    del levels[-heappop(depths)]
                elif start is not None and self._is_nested[-top[2]]:
                    held.append(-top[2])
                    del current[-top[2]]
                else:
                    found = depths[0], top
            for step in held:
                add(step)
            return found

        def choice() -> int:
            if start is None and dones:
                return -heappop(dones)[1]
            beside = landing - now if start is not None and landing > now else None
            found = best(beside)
            if start is not None:
                alone = not dones and (self._depth[start] == 0 or (-self._depth[start], entry(start)) > (found or ()))
                if found is None or (beside is None and not alone):
                    return start
            assert found is not None  # a step is left whose readers are all scheduled
            return -found[1][2]

        for step in range(len(self._steps)):
            if not left[step]:
                add(step)
        for _ in self._steps:
            step = choice()
            current.pop(step, None)
            if step == start:
                now, start = max(now, landing), None
            elif step in self._started:
                start = self._started[step]
                landing = now + _seconds_in_flight(self._program, self._steps[step])
            now += self._cost[step]
            yield step
            for maker in self._makers[step]:
                left[maker] -= 1
                if not left[maker]:
                    add(maker)
                elif left[maker] == 1:
                    for reader in self._readers[maker]:
                        unlocks[reader] += 1
                        if reader in current:
                            add(reader)

    def order(self) -> list[Kernel]:
        """The kernels as they run; the done of a collective is a step that reads its operands and its results."""
        found = (
            self._done_of(self._steps[step]) if step in self._started else self._steps[step]
            for step in self._last_to_first()
        )  # fmt: skip
        return list(found)[::-1]

    @staticmethod
    def _done_of(kernel: Kernel) -> Kernel:
        both = dict.fromkeys((*kernel.uses, *kernel.writes), Use.REPEATED)
        return replace(kernel, uses=both, writes=(), after=frozenset())


def latency_hiding(program: Program, order: Sequence[Kernel | int]) -> list[Kernel | int]:
    """Copied arguments, then kernels as the latency-hiding scheduler orders them.

    A collective stands where it starts, and once more, writing nothing, where it has to be done.

    Args:
      program: theirs.
      order: which decides where nothing else does.
    """
    copies = [step for step in order if isinstance(step, int)]
    kernels = [step for step in order if not isinstance(step, int)]
    return [*copies, *_Scheduler(program, kernels).order()]


def _bytes(program: Program, values: Sequence[int]) -> int:
    return sum(program.values[value].size_bytes for value in values)


def _seconds(program: Program, kernel: Kernel) -> float:
    """What a kernel takes by the speed of light of the chip; of a loop XLA knows nothing."""
    if kernel.operation.bodies:
        return _LAUNCH_SECONDS
    moved = _bytes(program, (*kernel.uses, *kernel.writes)) / _BYTES_PER_SECOND
    return _LAUNCH_SECONDS + max(moved, kernel.operation.flops / _FLOPS_PER_SECOND)


def _seconds_in_flight(program: Program, kernel: Kernel) -> float:
    """What a collective takes by XLA's estimate: within a host as measured; between hosts by the speed of light of a
    ring, of which XLA takes it that groups that share hosts have one GPU on each (as many hosts as devices)."""
    operation = kernel.operation
    rounds = 2 if operation.name in SUMS else 1  # a sum is a reduce-scatter and an all-gather
    size = max(_bytes(program, tuple(kernel.uses)), _bytes(program, kernel.writes))
    devices, groups, on_host = operation.spread or _TWO_HOSTS
    if on_host == devices:
        return _HOST_SECONDS + rounds * size / _HOST_BYTES_PER_SECOND
    if OF_A_HOST % groups:
        return _UNKNOWN_SECONDS
    hosts = ceil(devices / OF_A_HOST) if on_host == OF_A_HOST else devices
    beside = OF_A_HOST // groups
    pieces = hosts * beside - 1
    piece = size / (pieces if operation.name == "all_to_all" else pieces + 1)
    seconds = piece / _NIC_BYTES_PER_SECOND + ceil(piece / _CHUNK_BYTES) * _CHUNK_SECONDS + _ROUND_TRIP_SECONDS
    times = beside * (hosts - 1) if operation.name == "all_to_all" else rounds * pieces / beside
    return _COLLECTIVE_SECONDS + times * seconds + size / _BYTES_PER_SECOND

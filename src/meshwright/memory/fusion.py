"""Which operations of a program become one kernel, so which values exist in memory at all.

Two passes, as XLA makes them. First a kernel library takes reductions together with the simple arithmetic and the
matrix products around them (only chains used nowhere else). Then, from the outputs backwards, every operation swallows
those of its producers that may be computed again at each use: cheap ones with one large operand always, those with
several only if every use can swallow them, expensive ones only if there is a single use that reads each element once.
What nobody swallowed is stored. (XLA's instruction fusion; see "Operator Fusion in XLA", arXiv:2301.13062.)

The first pass is that of CPUs. On accelerators what some reader needs in memory is read by all, reductions are not
computed again, and (as compiled programs show: JAX 0.10.2, libtpu 0.0.42, CUDA 12.9)

* a product of a TPU takes in all arithmetic on its operands, expensive or not, and ends with the arithmetic on its
  result as long as nobody else reads what is between; what matrix products alone read in the end is never stored, but
  sums that convolutions read are;
* a product of a GPU (Triton) takes in what moves, widens or scales an operand; exponentials, divisions and roots are
  cheap there. A softmax of a GPU of which nothing is kept is one kernel, whose operand is stored.

Cost: a few set operations an edge, and one bit set of ancestors per operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from meshwright._jax.dataflow import CHEAP_BEFORE_AMPERE, CHEAP_ON_GPUS, MEGACORE, WIDEST, Kind, Operation, Program, Use

_FUSIBLE = (Kind.VIEW, Kind.ELEMENTWISE, Kind.BROADCAST, Kind.PERMUTE, Kind.REDUCE, Kind.UPDATE)
_LIBRARY_LIMIT = 64  # operations the library takes into one kernel
_DEEPEST = 200  # operations in a row that may become one kernel
_LIBRARY_ELEMENTS = 4096  # below this XLA thinks a call of the library not worth it (IsInstructionPreferredByYnn)


@dataclass(slots=True, kw_only=True, eq=False)
class Kernel:
    """Operations that run as one: `uses` says how each operand is read, `writes` what exists afterwards.

    `after` are values that must exist before it may run although it does not read them.
    """

    operation: Operation
    position: int
    uses: dict[int, Use]
    writes: tuple[int, ...]
    after: frozenset[int] = frozenset()
    library: bool = False
    product: bool = False
    convolution: bool = False
    members: int = 1

    @property
    def fusible(self) -> bool:
        """Whether it may take in producers or be taken in."""
        return self.operation.kind in _FUSIBLE and not self.library and not self.product

    @property
    def multiplies(self) -> bool:
        """Whether it is a matrix product or a convolution, whatever else it does."""
        return self.product or self.operation.kind is Kind.CONTRACT or self.convolution

    @property
    def is_view(self) -> bool:
        """Whether it only gives its operand another name."""
        return self.operation.kind is Kind.VIEW and self.members == 1

    @property
    def in_place(self) -> int | None:
        """The value whose buffer the result must take over, if any."""
        return self.operation.reads[0] if self.operation.kind is Kind.UPDATE else None


def joined(first: Use | None, second: Use) -> Use:
    """Two reads of one operand by one kernel: at different indices they amount to reading it repeatedly."""
    if first is None:
        return second
    return Use.SAME if first is second is Use.SAME else Use.REPEATED


def _through(outer: Use, inner: Use) -> Use:
    return max(outer, inner)


class Fusion:
    """The kernels of one program, in program order."""

    def __init__(self, program: Program) -> None:
        self._values = program.values
        self._on_cpu, self._on_tpu, self._on_gpu = (program.platform.startswith(name) for name in ("cpu", "tpu", "gpu"))
        self._has_megacores = program.platform == MEGACORE
        self._has_triton = program.platform != WIDEST
        self._cheap = CHEAP_ON_GPUS if self._has_triton else CHEAP_BEFORE_AMPERE
        self._kernels: dict[int, Kernel] = {}
        self._producer: dict[int, int] = {}
        self._users: dict[int, dict[int, None]] = {}
        self._outputs = set(program.outputs)
        for position, operation in enumerate(program.operations):
            uses: dict[int, Use] = {}
            for rank, value in enumerate(operation.reads):
                uses[value] = joined(uses.get(value), self._use(operation, rank))
            self._kernels[position] = Kernel(
                operation=operation, position=position, uses=uses, writes=operation.writes,
                convolution=operation.name == "conv",
            )  # fmt: skip
            for value in uses:
                self._users.setdefault(value, {})[position] = None
            for value in operation.writes:
                self._producer[value] = position

    def _use(self, operation: Operation, rank: int) -> Use:
        if operation.kind is Kind.ELEMENTWISE:
            small = self._values[operation.reads[rank]].elements < self._values[operation.writes[0]].elements
            return Use.REPEATED if small else Use.SAME
        if operation.kind in (Kind.VIEW, Kind.PERMUTE, Kind.REDUCE):
            return Use.MOVED
        if operation.kind is Kind.UPDATE:
            return Use.SAME if rank == 0 else Use.MOVED
        if operation.kind is Kind.BROADCAST:
            grows = self._values[operation.writes[0]].elements > self._values[operation.reads[rank]].elements
            return Use.REPEATED if grows else Use.MOVED
        return Use.REPEATED

    def run(self) -> list[Kernel]:
        """Fuses and returns the kernels."""
        if self._on_cpu:
            self._take_into_library()
        elif self._on_tpu:
            self._finish_products()
        blocked = self._not_recomputable()
        for position in sorted(self._kernels, reverse=True):
            kernel = self._kernels.get(position)
            if kernel is not None and self._takes_in(kernel):
                self._swallow(kernel, blocked)
        return [self._kernels[position] for position in sorted(self._kernels)]

    def _takes_in(self, kernel: Kernel) -> bool:
        """Whether the kernel may compute its operands itself."""
        return kernel.fusible or (not self._on_cpu and kernel.multiplies)

    def _finish_products(self) -> None:
        """Products with the arithmetic on their results, as long as nobody else reads what is in between."""
        for position in sorted(self._kernels):
            kernel = self._kernels.get(position)
            if kernel is None or not kernel.multiplies:
                continue
            chain = [kernel]
            while (user := self._only_user(chain[-1])) is not None and self._ends_product(user):
                chain.append(user)
            if len(self._users.get(chain[-1].writes[0], ())) > 1:
                # Each of several users widens a narrow result itself.
                while len(chain) > 1 and self._widens(chain[-1]):
                    chain.pop()
            for user in chain[1:]:
                self._merge(user, kernel, kernel.writes[0])
                user.product, user.convolution = True, kernel.convolution
                kernel = user

    def _widens(self, kernel: Kernel) -> bool:
        (value,) = kernel.writes
        return len(kernel.uses) == 1 and self._values[value].size_bytes > max(
            self._values[operand].size_bytes for operand in kernel.uses
        )

    def _only_user(self, kernel: Kernel) -> Kernel | None:
        (value,) = kernel.writes
        users = self._users.get(value, {})
        return self._kernels[next(iter(users))] if len(users) == 1 and value not in self._outputs else None

    def _ends_product(self, user: Kernel) -> bool:
        if user.product or user.operation.kind not in (Kind.VIEW, Kind.ELEMENTWISE, Kind.PERMUTE, Kind.REDUCE):
            return False
        return user.operation.kind is not Kind.PERMUTE or user.operation.name == "transpose"

    def _take_into_library(self) -> None:
        for position in sorted(self._kernels, reverse=True):
            kernel = self._kernels.get(position)
            if kernel is None or kernel.operation.kind is not Kind.REDUCE or kernel.library or not self._large(kernel):
                continue
            kernel.library = True
            changed = True
            while changed and kernel.members < _LIBRARY_LIMIT:
                changed = self._grow_up(kernel)
                grown = self._grow_down(kernel)
                if grown is not None:
                    kernel, changed = grown, True

    def _large(self, kernel: Kernel) -> bool:
        return any(self._values[value].elements >= _LIBRARY_ELEMENTS for value in (*kernel.writes, *kernel.uses))

    def _joins_library(self, kernel: Kernel) -> bool:
        if kernel.library:
            return False
        return (
            kernel.operation.kind is Kind.BROADCAST
            or kernel.is_view
            or (kernel.operation.library and self._large(kernel))
        )

    def _grow_up(self, kernel: Kernel) -> bool:
        for value in list(kernel.uses):
            producer = self._kernels.get(self._producer.get(value, -1))
            if producer is None or value in self._outputs or len(self._users[value]) != 1:
                continue
            if self._joins_library(producer):
                self._merge(kernel, producer, value)
                return True
        return False

    def _grow_down(self, kernel: Kernel) -> Kernel | None:
        (value,) = kernel.writes
        users = self._users.get(value, {})
        if value in self._outputs or len(users) != 1:
            return None
        user = self._kernels[next(iter(users))]
        if not self._joins_library(user):
            return None
        self._merge(user, kernel, value)
        user.library = True
        return user

    def _merge(self, kernel: Kernel, producer: Kernel, value: int) -> None:
        """Moves `producer`, used only by `kernel`, into it; or copies it there if others use it too."""
        outer = kernel.uses.pop(value)
        del self._users[value][kernel.position]
        for operand, inner in producer.uses.items():
            kernel.uses[operand] = joined(kernel.uses.get(operand), _through(outer, inner))
            self._users[operand][kernel.position] = None
        kernel.members += producer.members
        if not self._users[value] and value not in self._outputs:
            for operand in producer.uses:
                self._users[operand].pop(producer.position, None)
            del self._kernels[producer.position]

    def _may_fuse(self, consumer: Kernel, value: int) -> bool:
        producer = self._kernels.get(self._producer.get(value, -1))
        if producer is None or not producer.fusible or not self._takes_in(consumer) or value == consumer.in_place:
            return False
        if producer.operation.kind is Kind.UPDATE:
            return False
        operation = producer.operation
        if not self._on_cpu and operation.kind is Kind.REDUCE:
            return False
        if self._on_tpu:
            return not (self._has_megacores and consumer.multiplies and self._divides_for_several(producer))
        if not self._on_cpu and consumer.multiplies and not self._is_prologue(producer):
            return False
        if not operation.expensive or (operation.name in self._cheap and not self._on_cpu):
            return True
        single = len(self._users[value]) == 1 and value not in self._outputs
        return single and consumer.uses[value] is not Use.REPEATED

    def _divides_for_several(self, kernel: Kernel) -> bool:
        """Whether a kernel is a division, converted or not, that several read."""
        (value,) = kernel.writes
        operation = kernel.operation
        if len(self._users[value]) < 2:
            return False
        while operation.name == "convert_element_type" and operation.reads:
            source = self._kernels.get(self._producer.get(operation.reads[0], -1))
            if source is None:
                break
            operation = source.operation
        return operation.name == "div"

    def _is_prologue(self, kernel: Kernel) -> bool:
        """Whether a GPU's matrix product can do it while it reads an operand: it moves, converts or scales."""
        operation = kernel.operation
        if operation.kind is Kind.VIEW or operation.name == "transpose":
            return True
        if not self._has_triton:
            return False
        if operation.kind is Kind.BROADCAST:
            return True
        if operation.kind is not Kind.ELEMENTWISE or len(operation.reads) != 1 or operation.expensive:
            return False
        if self._values[operation.reads[0]].size_bytes <= self._values[operation.writes[0]].size_bytes:
            return True
        # A conversion to fewer bits belongs to whatever makes its operand, and is read again for each tile otherwise.
        source = self._kernels.get(self._producer.get(operation.reads[0], -1))
        return source is not None and (source.operation.kind is Kind.UPDATE or len(source.operation.reads) == 1)

    def _not_recomputable(self) -> set[int]:
        """Values with several large sources that some use could not swallow: computing them again reads too much."""
        above: dict[int, int] = {}
        for position, kernel in sorted(self._kernels.items()):
            mask = 1 << position
            for value in kernel.uses:
                mask |= above.get(self._producer.get(value, -1), 0)
            above[position] = mask
        blocked: set[int] = set()
        in_products: set[int] = set()  # kernels that matrix products alone compute, perhaps through others
        inside: dict[int, int] = {}  # on GPUs, the kernels that compute one, a bit for each
        for position in sorted(self._kernels, reverse=True):
            kernel = self._kernels[position]
            users = self._users.get(kernel.writes[0], {}) if kernel.writes else {}
            readers = 0
            if self._on_gpu:
                for user in users:
                    readers |= inside[user]
            if kernel.fusible and self._is_stored(kernel, above, blocked, in_products, readers.bit_count()):
                blocked.update(kernel.writes)
            is_apart = not kernel.fusible or not readers or not blocked.isdisjoint(kernel.writes)
            inside[position] = 1 << position if is_apart else readers
        return blocked

    def _is_stored(
        self, kernel: Kernel, above: dict[int, int], blocked: set[int], in_products: set[int], readers: int
    ) -> bool:
        """Whether the result of a kernel is stored, and not computed again by each kernel that reads it.

        Args:
          kernel: one that may be computed again; of all that read its result this is decided.
          above: what each kernel needs, itself included, as bits.
          blocked: the values that are stored, as far as they are known.
          in_products: kernels that matrix products alone compute; this one is added.
          readers: how many kernels would read the kernel's operands instead of its result, through others too.
        """
        (value,) = kernel.writes
        rank = self._values[value].rank
        large = [v for v in kernel.uses if self._values[v].rank >= rank and not self._is_broadcast(v)]
        read = sum(self._values[v].elements for v in kernel.uses)
        if not self._on_cpu and kernel.uses and not self._is_cheap_everywhere(value):
            return True
        users = [self._kernels[user] for user in self._users.get(value, ())]
        if not self._on_cpu and self._values[value].elements == 1 and len(users) > 1:
            # A number, such as the norm of all gradients, which every update would compute again from all of them.
            return True
        if all(user.position in in_products or (user.multiplies and not user.convolution) for user in users):
            in_products.add(kernel.position)
        if self._on_gpu:
            is_slice = kernel.operation.name.endswith("slice")  # of what it is taken from no more is read
            if not is_slice and self._is_dear_to_read(value, large, readers):
                return True
            if not any(self._is_normalisation(user) for user in users):
                return False  # each reader computes it, across reductions too: that saves traffic
        if len(large) <= 1 or read <= self._values[value].elements:
            return False
        if self._on_tpu and kernel.position in in_products:
            return False
        if self._on_tpu and len(users) > 1 and not all(user.multiplies for user in users):
            return True  # arithmetic of several operands is done again in products alone
        if value in self._outputs:
            return True
        seen: dict[int, bool] = {}
        return not all(
            self._on_all_paths(kernel.position, user.position, above, blocked, seen, _DEEPEST) for user in users
        )

    def _is_dear_to_read(self, value: int, sources: list[int], readers: int) -> bool:
        """Whether several kernels read less if a value is stored than if each reads its sources: dropout's mask of a
        byte is, its random bits are not; of sums of sums (residuals), about every other. XLA's GPU compiler fuses where
        that saves traffic."""
        read, size = (sum(self._values[v].size_bytes for v in some) for some in (sources, [value]))
        return readers > 1 and readers * read > read + (readers + 1) * size

    def _is_normalisation(self, kernel: Kernel) -> bool:
        """Whether a reduction's result is only spread out again: XLA's GPU compiler then makes one Triton kernel of it
        and the arithmetic around it, a softmax, that reads what it normalises. One whose result is kept is none."""
        if kernel.operation.kind is not Kind.REDUCE:
            return False
        user: Kernel | None = kernel
        while user is not None and len(user.writes) == 1:
            user = self._only_user(user)
            if user is None or user.operation.kind not in (Kind.VIEW, Kind.ELEMENTWISE):
                break
        return user is not None and user.operation.kind is Kind.BROADCAST

    def _is_cheap_everywhere(self, value: int) -> bool:
        """Whether every kernel that reads a value may compute it: else it is there, and read."""
        users = self._users.get(value, {})
        return value not in self._outputs and all(self._may_fuse(self._kernels[user], value) for user in users)

    def _is_broadcast(self, value: int) -> bool:
        producer = self._kernels.get(self._producer.get(value, -1))
        return producer is not None and producer.operation.kind is Kind.BROADCAST

    def _on_all_paths(
        self, start: int, position: int, above: dict[int, int], blocked: set[int], seen: dict[int, bool], depth: int
    ) -> bool:
        """Whether everything between kernel `start` and kernel `position` could be one kernel."""
        if start == position:
            return True
        if depth == 0:
            return False
        if position not in seen:
            consumer = self._kernels[position]
            seen[position] = True
            for value in consumer.uses:
                producer = self._producer.get(value, -1)
                if above.get(producer, 0) >> start & 1 and (
                    value in blocked
                    or not self._may_fuse(consumer, value)
                    or not self._on_all_paths(start, producer, above, blocked, seen, depth - 1)
                ):
                    seen[position] = False
                    break
        return seen[position]

    def _swallow(self, kernel: Kernel, blocked: set[int]) -> None:
        """Takes in producers, the latest first: whatever a producer brings along comes before it in the program."""
        waiting = [(-self._producer[value], value) for value in kernel.uses if value in self._producer]
        heapify(waiting)
        seen = {value for _, value in waiting}
        while waiting:
            _, value = heappop(waiting)
            if value in blocked or not self._may_fuse(kernel, value):
                continue
            producer = self._kernels[self._producer[value]]
            fresh = [v for v in producer.uses if v in self._producer and v not in seen]
            seen.update(fresh)
            self._merge(kernel, producer, value)
            for operand in fresh:
                heappush(waiting, (-self._producer[operand], operand))

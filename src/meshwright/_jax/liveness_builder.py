"""Building the memory model's program the way XLA simplifies one: equal computations once, shapes and layouts settled.

Everything here is a rewrite XLA makes before it fuses, on CPUs if nothing else is said, and each changes which buffers
exist:

* equal operations are merged; a reshape of a reshape or a transposition of a transposition is one;
* a matrix product gets two-dimensional operands (plus batch dims), transposed in memory where the kernel needs it;
* a convolution gets channels last;
* the gradient of max pooling carries a position of every element, one array for each dim;
* adding what was scattered onto zeros scatters onto the other term;
* a division by a broadcast value multiplies by the broadcast reciprocal;
* on CPUs bfloat16 and float16 arithmetic is done in float32 and rounded, and the rounding is too dear to do twice; GPUs
  before Hopper do bfloat16 arithmetic in float32, and round only what something else than arithmetic reads; those
  before Ampere multiply in float32 too, what cuBLAS reads as it is stored;
* on TPUs arrays lie in tiles, and on GPUs in layouts that suit the products (`liveness_layouts`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from meshwright._jax.barriers import barriers_hold
from meshwright._jax.dataflow import WIDE, WIDEST, Kind, Operation, Program, Value
from meshwright._jax.jaxpr import is_literal
from meshwright._jax.liveness_layouts import Layouts
from meshwright._jax.tiles import elements_in_tiles

# From JAX 0.11 XLA's CPU backend multiplies most bfloat16 matrices as they are; before, it made float32 copies of all.
_BFLOAT16_PRODUCTS = jax.__version_info__ >= (0, 11)

# What the CPU computes in float32.
NARROW = ("bfloat16", "float16")
# What GPUs before Hopper do.
_AS_FLOAT32 = "bfloat16"


def _is_view(shape: Sequence[int], order: Sequence[int]) -> bool:
    """Whether putting the dims of `shape` into this order leaves every element where it is."""
    moved = [dim for dim in order if shape[dim] != 1]
    return moved == sorted(moved)


def _counted(shape: Sequence[int]) -> tuple[int, ...]:
    """The dims that lie somewhere: those of more than one element."""
    return tuple(size for size in shape if size != 1)


def _places(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Which of the counted dims of a shape these dims are."""
    return [len(_counted(shape[:dim])) for dim in dims if shape[dim] != 1]


class Builder:
    """Collects values and operations of one program.

    Args:
      mesh: the axes of the `shard_map` that the program runs in, which sends it through XLA's partitioned pipeline, in
        order, with their sizes; None for none.
      platform: whose compiler it is for: "cpu", or another, which has none of the CPU's habits.
    """

    def __init__(self, *, mesh: Mapping[str, int] | None, platform: str) -> None:
        self.mesh = mesh
        self.platform = platform
        self.on_tpu, self.on_gpu = platform.startswith("tpu"), platform.startswith("gpu")
        self.barriers_hold = barriers_hold(platform)
        self.values: list[Value] = []
        self.types: list[tuple[tuple[int, ...], Any]] = []
        self.operations: list[Operation] = []
        self._known: dict[Any, tuple[int, ...]] = {}
        self._alike: list[int] = []  # for each value the first one equal to it but for barriers
        self._first: dict[Any, tuple[int, ...]] = {}
        self.source: dict[int, Operation] = {}
        self.unrounded: dict[int, int] = {}  # the float32 value a narrow result was rounded from
        self.zeros: set[int] = set()  # arrays of nothing but zeros
        self.transposed: set[int] = set()  # results of transpositions the program itself asks for
        self.fetched: set[Any] = set()  # variables that come from the host's memory when they are first read
        self.given: set[int] = set()  # arguments of the program, which lie as their maker has laid them
        self._order: dict[int, tuple[int, tuple[int, ...]]] = {}  # what a transposed value is a transposition of
        self._layouts = Layouts(self.values, lambda value: self.array(*self.types[value])) if self.on_gpu else None
        self._anywhere: set[int] = set()  # made of numbers and positions alone, in any layout

    def program(self, arguments: list[int], outputs: list[int], kept: tuple[tuple[int, int], ...]) -> Program:
        """What was built so far, between these arguments and outputs."""
        operations = self._scattered_onto(outputs)
        if self._layouts is not None:
            operations, outputs = self._layouts.settled(operations, outputs)
        return Program(
            values=tuple(self.values),
            operations=tuple(operations),
            arguments=tuple(arguments),
            outputs=tuple(outputs),
            kept=kept,
            alike=None if self.barriers_hold else tuple(self._alike),
            platform=self.platform,
        )

    def _scattered_onto(self, outputs: Sequence[int]) -> list[Operation]:
        """The operations that are needed, with sums of a value and what was scattered onto zeros, for them alone,
        scattered at once."""
        readers = Counter(outputs)
        needed: list[Operation] = []
        for operation in reversed(self.operations):
            if any(readers[value] for value in operation.writes):
                needed.append(operation)
                readers.update(operation.reads)

        def fits(value: int, total: int) -> bool:
            source = self.source.get(value)
            if source is None or source.kind is not Kind.UPDATE or source.name != "scatter-add":
                return False
            return source.reads[0] in self.zeros and readers[value] == 1 and self.types[value] == self.types[total]

        changed: list[Operation] = []
        for operation in reversed(needed):
            if operation.name in ("add", "add_any") and len(operation.reads) == 2:
                term = next((v for v in operation.reads if fits(v, operation.writes[0])), None)
                if term is not None:
                    (other,) = (v for v in operation.reads if v != term)
                    scatter = self.source[term]
                    operation = replace(scatter, reads=(other, *scatter.reads[1:]), writes=operation.writes)
            changed.append(operation)
        return changed

    def value(self, aval: Any) -> int:
        """A new value of this abstract array; tokens and other shapeless things take no bytes."""
        shape = tuple(int(dim) for dim in getattr(aval, "shape", ()))
        dtype = getattr(aval, "dtype", None)
        return self.array(shape, dtype)

    def array(self, shape: tuple[int, ...], dtype: Any) -> int:
        """A new value of this shape and dtype."""
        itemsize = getattr(dtype, "itemsize", 0) or 0
        elements = math.prod(shape)
        stored = elements_in_tiles(shape) if self.on_tpu else elements
        self.values.append(Value(size_bytes=stored * itemsize, elements=elements, rank=sum(dim != 1 for dim in shape)))
        self.types.append((shape, dtype))
        self._alike.append(len(self.values) - 1)
        return len(self.values) - 1

    def read(self, env: dict[Any, int], atom: Any) -> int:
        """The value of a jaxpr variable or literal."""
        if is_literal(atom):
            # A literal is a scalar folded into its kernel; as an output or operand of a loop it needs a value.
            return self.emit(
                Kind.BROADCAST, "constant", (), [atom.aval], key=("literal", str(atom.val), str(atom.aval))
            )[0]
        if atom not in env and atom in self.fetched:
            env[atom] = self.emit(Kind.OPAQUE, "device_put", (), [atom.aval])[0]
        return env[atom]

    def sent(self, value: int) -> int:
        """What is left on the device of a value that has been moved to the host's memory: nothing, once it is there."""
        return self.emit(Kind.OPAQUE, "device_put", [value], [jax.ShapeDtypeStruct((0,), np.float32)])[0]

    def emit(
        self, kind: Kind, name: str, reads: Sequence[int], avals: Sequence[Any], *, key: Any = None, **rest: Any
    ) -> tuple[int, ...]:
        """Adds an operation, or returns the results of an equal one; `key` says what else makes it equal."""
        identity = None if key is None else (kind, name, tuple(reads), key)
        if identity is not None and identity in self._known:
            return self._known[identity]
        writes = tuple(self.value(aval) for aval in avals)
        operation = Operation(kind=kind, name=name, reads=tuple(reads), writes=writes, **rest)
        self.operations.append(operation)
        for value in writes:
            self.source[value] = operation
        self._tie(operation)
        if identity is not None:
            self._known[identity] = writes
            first = self._first.setdefault((kind, name, tuple(self._alike[v] for v in reads), key), writes)
            for value, like in zip(writes, first, strict=True):
                self._alike[value] = self._alike[like]
        return writes

    def _tie(self, operation: Operation) -> None:
        """Arithmetic leaves the dims of an array as they lie, and so do reshapes that add or drop dims of size one."""
        if self._layouts is None:
            return
        if operation.kind is Kind.BROADCAST:
            self._anywhere.update(operation.writes)
        elif operation.kind in (Kind.ELEMENTWISE, Kind.VIEW):
            if self._anywhere.issuperset(operation.reads):
                self._anywhere.update(operation.writes)
                return
            (result,) = operation.writes
            shape = _counted(self.types[result][0])
            for value in operation.reads:
                if value not in self._anywhere and _counted(self.types[value][0]) == shape:
                    self._layouts.tie(result, value, range(len(shape)))

    def barrier(self, reads: Sequence[int]) -> list[int]:
        """The same values, but not equal to them, and not before all of them exist."""
        avals = [jax.ShapeDtypeStruct(*self.types[value]) for value in reads]
        if self.barriers_hold:
            return list(self.emit(Kind.BARRIER, "barrier", reads, avals))
        passed = [self.emit(Kind.VIEW, "barrier", [v], [aval])[0] for v, aval in zip(reads, avals, strict=True)]
        for value, source in zip(passed, reads, strict=True):
            self._alike[value] = self._alike[source]
        return passed

    def spread(self, value: int, shape: tuple[int, ...], dims: Sequence[int] | None = None) -> int:
        """`value` spread over `shape`; its dims go to `dims`, by default to those of the same rank."""
        given = self.types[value][0]
        if math.prod(given) == math.prod(shape):
            return self.reshaped(value, shape)
        dims = range(len(given)) if dims is None else dims
        kept = tuple(int(dim) for dim, size in zip(dims, given, strict=True) if size != 1)
        source = self.reshaped(value, tuple(size for size in given if size != 1))
        spread = jax.ShapeDtypeStruct(shape, self.types[value][1])
        return self.emit(Kind.BROADCAST, "broadcast_in_dim", [source], [spread], key=(shape, kept))[0]

    def reshaped(self, value: int, shape: tuple[int, ...]) -> int:
        """`value` under another shape; a reshape of a reshape is one reshape."""
        while (source := self.source.get(value)) is not None and source.kind is Kind.VIEW and source.name == "reshape":
            value = source.reads[0]  # one of a literal is a constant, and no view
        if self.types[value][0] == shape:
            return value
        named = jax.ShapeDtypeStruct(shape, self.types[value][1])
        return self.emit(Kind.VIEW, "reshape", [value], [named], key=shape)[0]

    def arranged(self, value: int, order: Sequence[int]) -> int:
        """`value` with its dims in this order; a transposition of a transposition is one transposition."""
        shape, dtype = self.types[value]
        target = tuple(shape[dim] for dim in order)
        if _is_view(shape, order):
            return self.reshaped(value, target)
        if value in self._order:
            value, first = self._order[value]
            order = [first[dim] for dim in order]
            if _is_view(self.types[value][0], order):
                return self.reshaped(value, target)
        moved = jax.ShapeDtypeStruct(target, dtype)
        (result,) = self.emit(Kind.PERMUTE, "transpose", [value], [moved], key=tuple(order))
        self._order[result] = (value, tuple(order))
        if self._layouts is not None:
            self._layouts.tie(result, value, _places(shape, order))
        return result

    def arithmetic(
        self, name: str, reads: Sequence[int], avals: Sequence[Any], key: Any, *, expensive: bool, library: bool
    ) -> tuple[int, ...]:
        """An elementwise operation; in 16 bits it is float32 arithmetic and a rounding."""
        (aval,) = avals
        if self.platform in (WIDE, WIDEST) and name != "select_n":
            return self._as_float32(Kind.ELEMENTWISE, name, reads, aval, key, expensive=expensive)
        if self.platform != "cpu" or str(aval.dtype) not in NARROW or name == "select_n":
            return self.emit(Kind.ELEMENTWISE, name, reads, avals, key=key, expensive=expensive, library=library)
        if name == "convert_element_type":
            return self.emit(Kind.ELEMENTWISE, name, reads, avals, key=key, expensive=True, library=library)
        wide = jax.ShapeDtypeStruct(aval.shape, np.float32)
        (result,) = self.emit(Kind.ELEMENTWISE, name, reads, [wide], key=key, expensive=expensive, library=library)
        return (self.rounded(result, aval.dtype),)

    def _as_float32(
        self, kind: Kind, name: str, reads: Sequence[int], aval: Any, key: Any, *, expensive: bool
    ) -> tuple[int, ...]:
        """Arithmetic or a reduction in bfloat16 on a GPU that does it in float32: on what its operands were before they
        were rounded, if they were. So a rounded value is stored only for products, for collectives and for what moves
        it, and the float32 one for arithmetic (XLA's `FloatNormalization` and `SimplifyFPConversions`)."""
        shape, dtype = aval.shape, aval.dtype
        if name != "convert_element_type":
            reads = [self.unrounded.get(value, value) for value in reads]
            wide = jax.ShapeDtypeStruct(shape, np.float32 if str(dtype) == _AS_FLOAT32 else dtype)
            reads = self.emit(kind, name, reads, [wide], key=key, expensive=expensive)
        if self.types[reads[0]][1] == dtype:
            return tuple(reads)
        (made,) = self.emit(Kind.ELEMENTWISE, "convert_element_type", reads, [aval], key=("to", str(dtype)))
        if self.types[reads[0]][1] == np.float32 and str(dtype) == _AS_FLOAT32:
            self.unrounded[made] = reads[0]
        return (made,)

    def reduction(self, name: str, value: int, aval: Any, key: Any) -> tuple[int, ...]:
        """A reduction of one array."""
        if self.platform in (WIDE, WIDEST):
            return self._as_float32(Kind.REDUCE, name, [value], aval, key, expensive=True)
        return self.emit(Kind.REDUCE, name, [value], [aval], key=key, expensive=True)

    def rounded(self, value: int, dtype: Any) -> int:
        """A float32 value in 16 bits; on CPUs dear to compute, so it is stored rather than computed again."""
        narrow = jax.ShapeDtypeStruct(self.types[value][0], dtype)
        if self.platform != "cpu":
            return self._as_float32(Kind.ELEMENTWISE, "convert_element_type", [value], narrow, "", expensive=False)[0]
        (result,) = self.emit(Kind.ELEMENTWISE, "round", [value], [narrow], key="round", expensive=True, library=True)
        self.unrounded[result] = value
        return result

    def widened(self, value: int) -> int:
        """A value of 16 bits as float32."""
        wide = jax.ShapeDtypeStruct(self.types[value][0], np.float32)
        return self.emit(Kind.ELEMENTWISE, "widen", [value], [wide], key="widen", library=True)[0]

    def _before_rounding(self, value: int) -> int:
        """A value of 16 bits as the float32 that it was, or widened to it; any other as it is."""
        if value in self.unrounded or str(self.types[value][1]) != _AS_FLOAT32:
            return self.unrounded.get(value, value)
        return self.widened(value)

    def converted(self, value: int, dtype: Any) -> int | None:
        """`value` in `dtype`, where that needs no operation: it is, or it was before it was rounded."""
        if self.types[value][1] == dtype:
            return value
        return self.unrounded.get(value) if dtype == np.float32 else None

    def divided(self, reads: Sequence[int], avals: Sequence[Any]) -> tuple[int, ...] | None:
        """A division by a broadcast value as XLA does it, by its broadcast reciprocal; None if it is another division.

        XLA's partitioned pipeline leaves the division of a matrix product alone.
        """
        dividend, divisor = self.source.get(reads[0]), self.source.get(reads[1])
        while dividend is not None and dividend.kind is Kind.VIEW:
            dividend = self.source.get(dividend.reads[0])
        if self.mesh is not None and dividend is not None and dividend.kind is Kind.CONTRACT:
            return None
        if divisor is None or divisor.kind is not Kind.BROADCAST or not divisor.reads:
            return None
        small = jax.ShapeDtypeStruct(*self.types[divisor.reads[0]])
        large = jax.ShapeDtypeStruct(*self.types[reads[1]])
        (inverse,) = self.emit(Kind.ELEMENTWISE, "div", divisor.reads, [small], key="inverse", expensive=True)
        (spread,) = self.emit(Kind.BROADCAST, "broadcast_in_dim", [inverse], [large], key=("inverse", reads[1]))
        return self.arithmetic("mul", [reads[0], spread], avals, "inverse", expensive=False, library=True)

    def dot(self, equation: Any, reads: Sequence[int], key: Any) -> tuple[int, ...]:
        """A matrix product: its operands as the kernel wants them, its result in the equation's shape."""
        (contracted, batch) = equation.params["dimension_numbers"]
        if len(reads) < 2:
            return self.emit(Kind.CONTRACT, "dot_general", reads, [equation.outvars[0].aval], key=key)
        sides: list[int] = []
        folded = False
        library = True  # the kernel library wants the left operand's contracted dim last
        result: list[int] = [self.types[reads[0]][0][dim] for dim in batch[0]]
        ends = [len(result)]  # where the dims of the result from the batch, and from each operand, end
        for side, (value, inner, outer) in enumerate(zip(reads, contracted, batch, strict=True)):
            shape = self.types[value][0]
            free = [dim for dim in range(len(shape)) if dim not in inner and dim not in outer]
            wanted = [*outer, *inner, *free] if side else [*outer, *free, *inner]
            swapped = [*outer, *free, *inner] if side else [*outer, *inner, *free]
            matrix = sum(shape[dim] != 1 for dim in inner) <= 1 and sum(shape[dim] != 1 for dim in free) <= 1
            # XLA's kernels read a matrix either way round; groups of dims must lie in the order the kernel wants.
            order = swapped if matrix and _is_view(shape, swapped) and not _is_view(shape, wanted) else wanted
            if self.platform == WIDEST:  # cuBLAS reads both ways round, so that several products read one array
                order = max(wanted, swapped, key=lambda one: one[-1:])
            library = library and (side == 1 or order is wanted)
            # XLA folds a transposition the program asks for into the product, which then is none for the library.
            folded = folded or (value in self.transposed and _is_view(shape, wanted))
            arranged = self.arranged(value, order)
            groups = {dim: math.prod(shape[d] for d in part) for part in (inner, free) for dim in part[:1]}
            flat = tuple(groups.get(d, shape[d]) for d in order if d in outer or d in groups)
            sides.append(self.reshaped(arranged, flat))
            if self._layouts is not None:
                self._layouts.reads(sides[-1], value, [_places(shape, dims) for dims in (inner, free)])
            result.append(math.prod(shape[dim] for dim in free))
            ends.append(ends[-1] + len(free))
        aval = equation.outvars[0].aval
        dtype = aval.dtype
        widens = self.platform == "cpu" and (folded or not library or not _BFLOAT16_PRODUCTS)
        if str(dtype) in NARROW and widens:
            sides, dtype = [self.widened(value) for value in sides], np.dtype(np.float32)
        if self.platform == WIDEST and str(dtype) == _AS_FLOAT32:
            dtype = np.dtype(np.float32)
        if self.platform == WIDEST:
            sides = [self._before_rounding(value) for value in sides]
        flat_aval = jax.ShapeDtypeStruct(tuple(result), dtype)
        flops = 2.0 * math.prod(result) * math.prod(self.types[reads[0]][0][dim] for dim in contracted[0])
        (product,) = self.emit(Kind.CONTRACT, "dot_general", sides, [flat_aval], key=key, library=library, flops=flops)
        if dtype != aval.dtype:
            product = self.rounded(product, aval.dtype)
        product = self.reshaped(product, tuple(aval.shape))
        if self._layouts is not None:
            groups_of_result = [_places(aval.shape, range(*part)) for part in itertools.pairwise(ends)]
            self._layouts.writes(product, groups_of_result)
        return (product,)

    def convolution(self, equation: Any, reads: Sequence[int], key: Any) -> tuple[int, ...]:
        """A convolution with channels last, and its result back in the equation's order."""
        numbers = equation.params["dimension_numbers"]
        (lhs, rhs, out) = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
        image = self.arranged(reads[0], (lhs[0], *lhs[2:], lhs[1]))
        kernel = self.arranged(reads[1], (*rhs[2:], rhs[1], rhs[0]))
        aval = equation.outvars[0].aval
        order = (out[0], *out[2:], out[1])
        canonical = jax.ShapeDtypeStruct(tuple(aval.shape[dim] for dim in order), aval.dtype)
        flops = 2.0 * math.prod(aval.shape) * math.prod(equation.invars[1].aval.shape[dim] for dim in rhs[1:])
        (result,) = self.emit(Kind.OPAQUE, "conv", [image, kernel], [canonical], key=key, flops=flops)
        return (self.arranged(result, tuple(int(dim) for dim in np.argsort(order))),)

    def pooling_gradient(self, equation: Any, reads: Sequence[int], key: Any) -> tuple[int, ...]:
        """The gradient of max pooling: where each window's maximum lies is found among arrays of positions, one for
        each dim and as large as the padded operand, and the cotangents are scattered to it."""
        cotangent, operand = reads
        shape = self.types[operand][0]
        padding = equation.params["padding"]
        padded = tuple(size + low + high for size, (low, high) in zip(shape, padding, strict=True))
        aval = equation.outvars[0].aval
        whole = jax.ShapeDtypeStruct(padded, aval.dtype)
        if padded != shape:
            (operand,) = self.emit(Kind.PERMUTE, "pad", [operand], [whole], key=padded)
        position = jax.ShapeDtypeStruct(padded, np.int32)
        positions = [
            self.emit(Kind.BROADCAST, "iota", (), [position], key=("position", dim))[0] for dim in range(len(shape))
        ]
        windows = self.types[cotangent][0]
        found = jax.ShapeDtypeStruct(windows, np.int32)
        largest = jax.ShapeDtypeStruct(windows, aval.dtype)
        _, *chosen = self.emit(
            Kind.OPAQUE, "reduce_window", [operand, *positions], [largest, *[found] * len(shape)], key=key
        )
        table = jax.ShapeDtypeStruct((math.prod(windows), len(shape)), np.int32)
        (indices,) = self.emit(Kind.PERMUTE, "concatenate", chosen, [table], key="positions")
        (zeros,) = self.emit(Kind.BROADCAST, "zeros", (), [whole], key=("zeros", padded))
        (result,) = self.emit(Kind.UPDATE, "scatter", [zeros, indices, cotangent], [whole], key=key)
        if padded != shape:
            (result,) = self.emit(Kind.PERMUTE, "slice", [result], [aval], key=padded)
        return (result,)

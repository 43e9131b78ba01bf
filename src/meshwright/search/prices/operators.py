"""Seconds of conversions and operators on one logical mesh, forward and backward."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ..._jax.tiles import elements_in_tiles
from ...cluster import Device, LogicalMesh
from ...cost.collective import collective_seconds
from ...cost.efficiency import SLICED_BACKWARD, profile_of
from ...cost.kernels import Kernel, kernel_seconds
from ...program.graph import Graph, Operator, Value, once_for_each
from ...program.halo import halo_bytes
from ...program.origins import operator_origins
from ...program.parameter_values import values_of_parameters
from ...program.residuals import is_stored
from ...sharding import Algorithm, Spec
from .choices import Choices
from .conversions import conversion_prices
from .exposure import ALL, Exposure, exposure_of
from .kernels import (
    KernelsOf,
    OperatorKernels,
    chain_flops,
    is_constant,
    is_plain,
    moves_nothing,
    parts_of,
    plain_kernel,
)
from .of_choices import OperatorPrices, ParameterPrices
from .product_orders import sliced_operands
from .ring import Ring, exposed_seconds, ring_of
from .spec_row import SpecRow


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerCollective:
    """Collectives inside an operator.

    Args:
      kind: as in `cost.collective`.
      size_bytes: of the buffer on one device.
      axes: of the mesh that they span.
      backward: how many the derivative makes.
      forward: how many a run of the operator makes.
    """

    kind: str
    size_bytes: float
    axes: tuple[str, ...]
    backward: int
    forward: int = 1


@lru_cache(maxsize=512)
def prices_of(mesh: LogicalMesh, device: Device) -> Prices:
    """The `Prices` of a mesh and a device, shared by all problems in a process."""
    return Prices(mesh, device)


# What tells operators apart, numbered: programs have thousands of operators of a few hundred kinds, and a number is
# looked up at once.
_NUMBERS: dict[Hashable, int] = {}


@once_for_each
def signatures(graph: Graph) -> tuple[int, ...]:
    """A number for each operator, equal for operators whose choices and seconds are equal on any mesh and device."""
    values, of_parameters = graph.values, values_of_parameters(graph)

    def described(indices: tuple[int | None, ...]) -> tuple[Any, ...]:
        return tuple(
            None if v is None else (values[v].shape, values[v].dtype, values[v].differentiated) for v in indices
        )

    found = (
        (
            operator.name, operator.rule, described(operator.operands), described(operator.results), operator.flops,
            operator.multiplied, operator.backward_flops, operator.combine, operator.differentiated,
            all(v in of_parameters for v in operator.results if v is not None),
            tuple(v in of_parameters for v in operator.operands), is_stored(graph, operator),
            is_stored(graph, operator, joined=True), is_constant(graph, operator), sliced_operands(graph, operator),
        )
        for operator in graph.operators
    )  # fmt: skip
    return tuple(_NUMBERS.setdefault(one, len(_NUMBERS)) for one in found)


@once_for_each
def signatures_with_origins(graph: Graph) -> tuple[int, ...]:
    """The same numbers, which also tell operators apart whose dims have other origins."""
    return tuple(
        _NUMBERS.setdefault((number, origins), len(_NUMBERS))
        for number, origins in zip(signatures(graph), operator_origins(graph), strict=True)
    )


class Prices:
    """The cost model of one submesh, made of one kind of device, seen as one logical mesh."""

    def __init__(self, mesh: LogicalMesh, device: Device) -> None:
        self.mesh = mesh
        self.device = device
        self.profile = profile_of(device)
        self.sizes = {axis.name: axis.size for axis in mesh.axes}
        self._axes = {axis.name: axis for axis in mesh.axes}
        self._collectives: dict[tuple[str, tuple[str, ...], float], float] = {}
        bandwidth = device.transpose_bandwidth_bytes_per_second
        self._strided_seconds_per_byte = 1 / bandwidth if bandwidth else 0.0
        self._tables: dict[tuple[object, ...], np.ndarray] = {}
        self._shards: dict[SpecRow, np.ndarray] = {}
        self._held: dict[tuple[tuple[int, ...], float, SpecRow], np.ndarray] = {}
        self._in_tiles = device.compiler.startswith("tpu")
        self._shared: dict[tuple[SpecRow, tuple[SpecRow, ...]], SpecRow] = {}
        self._kernels: dict[Kernel, float] = {}
        # What problems on this mesh have found out of operators (by roles, None for none) and parameters, by what tells
        # them apart.
        self.operators: dict[Hashable, dict[int, OperatorPrices]] = {}
        self.parameters: dict[object, ParameterPrices] = {}
        self._conversions = conversion_prices(mesh, self._strided_seconds_per_byte)

    def collective(self, kind: str, size_bytes: float, axes: Sequence[str], *, strided: bool = False) -> float:
        """Seconds of one collective over axes of the mesh on a buffer of `size_bytes` (see `cost.collective`, and for
        `strided` `sharding.conversion.Step`)."""
        key = (kind, tuple(axes), size_bytes)
        if key not in self._collectives:
            self._collectives[key] = collective_seconds(kind, size_bytes, [self._axes[a] for a in axes])
        return self._collectives[key] + strided * size_bytes * self._strided_seconds_per_byte

    def conversion_table(
        self, sources: SpecRow, targets: SpecRow, value_bytes: float, *, forward_runs: int, differentiated: bool,
        times: float = 1, backward: bool = True, exposure: Exposure = ALL,
    ) -> np.ndarray:  # fmt: skip
        """Seconds from each source spec to each target spec; infinite where no conversion exists.

        Args:
          sources: specs.
          targets: the same.
          value_bytes: of the whole value.
          forward_runs: how often the forward collectives run for one backward (2 where they are rematerialised).
          differentiated: whether the value has a cotangent; if not, backward collectives do not run.
          times: how often all that is done.
          backward: whether backward collectives run at all.
          exposure: of the value's collectives.

        Returns:
          Shape (sources, targets). The array lives as long as these prices and is not to be changed: its identity tells
          it from others.
        """
        # Rows are hashed by their identity, which is quicker: there is one of each, for good.
        key = (id(sources), id(targets), value_bytes, forward_runs, differentiated, times, backward, exposure)
        if key not in self._tables:
            self._tables[key] = self._conversions.table(
                sources, targets, value_bytes, differentiated=differentiated, forward_runs=forward_runs,
                backward=backward and differentiated, times=times, exposure=exposure,
            )  # fmt: skip
        return self._tables[key]

    def exposure(self, graph: Graph, value: int) -> Exposure:
        """How the collectives of a value are exposed."""
        return exposure_of(graph, value, prod(self.sizes.values()), self.device, self.profile)

    def of_operator(
        self, graph: Graph, operator: Operator, choices: Choices, of_parameters: Container[int | None]
    ) -> OperatorPrices:
        """The prices of an operator with these choices."""
        if is_plain(operator):
            # What a device writes and computes says it all, and that is one of a few sizes.
            written = np.zeros(len(choices))
            whole, stored = chain_flops(operator), self._is_stored(graph, operator)
            for value, row in zip(operator.results, choices.results, strict=True):
                if value is not None and (stored or not is_constant(graph, operator)):
                    written = written + graph.values[value].bytes / self.shards(row)
            work = [0.0] * len(choices)
            if self.device.vector_flops:
                work = [whole / parts_of(choice.algorithm, self.sizes) for choice in choices]
            sizes = list(zip(written.tolist(), work, strict=True))
            kernels = {size: plain_kernel(operator, self.device, *size, stored=stored) for size in set(sizes)}
            seconds = {size: self.kernel(kernel) for size, kernel in kernels.items()}
            forward = np.array([seconds[size] for size in sizes])
            backward = forward * operator.differentiated
            moving = [v for v in operator.operands if v is not None and graph.values[v].differentiated]
            weight = backward * (sum(v in of_parameters for v in moving) / max(len(moving), 1))
        else:
            parts = self.operator_parts(graph, operator, [choice.algorithm for choice in choices], of_parameters)
            forward, backward, inside, mirrored, weight = np.array(parts, dtype=float).reshape(-1, 5).T
            forward, backward = forward + inside, backward + mirrored
        return OperatorPrices(
            choices=choices, operands=choices.operands, results=choices.results, forward_seconds=forward,
            backward_seconds=backward, weight_seconds=weight,
        )  # fmt: skip

    def shared(self, made: SpecRow, read: tuple[SpecRow, ...]) -> SpecRow:
        """The specs to which a value with several readers may be resharded once: those that it is made or read in,
        since any other spec would be converted from and to one of these."""
        if (made, read) not in self._shared:
            wanted = [*(Spec(spec.dims) for spec in made), *(spec for row in read for spec in row)]
            self._shared[made, read] = SpecRow(dict.fromkeys(wanted))
        return self._shared[made, read]

    def shards(self, specs: SpecRow) -> np.ndarray:
        """Into how many blocks each of these cuts a value."""
        if specs not in self._shards:
            self._shards[specs] = np.array([spec.shards(self.sizes) for spec in specs], dtype=float)
        return self._shards[specs]

    def held_bytes(self, value: Value, specs: SpecRow) -> np.ndarray:
        """Bytes that a value takes on a device if it is split in each of these ways: on TPUs those of whole tiles."""
        if not self._in_tiles:
            return value.bytes / self.shards(specs)
        key = value.shape, value.itemsize, specs
        if key not in self._held:
            self._held[key] = np.array([self._bytes_in_tiles(value, spec) for spec in specs])
        return self._held[key]

    def _bytes_in_tiles(self, value: Value, spec: Spec) -> float:
        blocks = (prod(self.sizes[axis] for axis in axes) for axes in spec.dims)
        local = [size // count for size, count in zip(value.shape, blocks, strict=True)]
        return float(elements_in_tiles(local) * value.itemsize)

    def operator(
        self, graph: Graph, operator: Operator, algorithm: Algorithm, *, forward_runs: int
    ) -> tuple[float, float]:
        """Seconds of compute and of collectives inside one run of an operator, backward included; forward twice if it
        is rematerialised."""
        ((forward, backward, inside, mirrored, _),) = self.operator_parts(graph, operator, [algorithm])
        return forward_runs * forward + backward, forward_runs * inside + mirrored

    def operator_parts(
        self, graph: Graph, operator: Operator, algorithms: Sequence[Algorithm],
        of_parameters: Container[int | None] = (),
    ) -> list[tuple[float, float, float, float, float]]:  # fmt: skip
        """The same for many algorithms, each forward and backward apart: seconds of compute, and of collectives inside;
        and of compute backward what is for gradients of parameters, where these values depend on parameters alone."""
        if operator.is_link:
            # Backward it is taken again, which others wait for, and its gradient added to that of the stack.
            adding = (SLICED_BACKWARD - 1) / SLICED_BACKWARD * (operator.operands[0] in of_parameters)
            sliced = (self._sliced(graph, operator, algorithm) for algorithm in algorithms)
            return [(forward, backward, 0.0, 0.0, adding * backward) for forward, backward in sliced]
        kernels_of, still, parts = self._kernels_of(graph, operator), moves_nothing(operator), []
        for algorithm in algorithms:
            found = kernels_of(algorithm)
            backward = weight = inside = mirrored = 0.0
            for gradient in found.gradients:
                seconds = gradient.runs * self.kernel(gradient.kernel)
                backward += seconds
                weight += (operator.operands[gradient.operand] in of_parameters) * seconds
            forward = sum(map(self.kernel, (found.forward, *found.copies)))
            ring = ring_of(graph, operator, algorithm, self.sizes)
            if ring is not None:
                forward, backward, inside, mirrored = self._of_ring(ring, forward, backward)
                still = True
            for one in () if still else self.inner_collectives(graph, operator, algorithm):
                seconds = self.collective(one.kind, one.size_bytes, one.axes)
                inside += one.forward * seconds
                mirrored += one.backward * seconds
            parts.append((forward, backward, inside, mirrored, weight))
        return parts

    def _of_ring(self, ring: Ring, forward: float, backward: float) -> tuple[float, float, float, float]:
        """Seconds of attention over split positions, from those of its kernels in one piece: of compute forward and
        backward, and of collectives that it does not hide."""
        merging = self.kernel(Kernel("stored", 0.0, ring.merged_bytes)) if ring.merged_bytes else 0.0
        again = (ring.steps - 1) * self.device.kernel_launch_seconds
        seconds = forward + again + (ring.steps - 1) * merging, backward and backward + again
        inside, mirrored = exposed_seconds(ring, seconds, lambda size: self.collective("permute", size, ring.axes))
        return *seconds, inside, mirrored

    def _sliced(self, graph: Graph, operator: Operator, algorithm: Algorithm) -> tuple[float, float]:
        """Seconds of one run of a scan's link forward and backward: what it takes out of a stack may be copied."""
        (value, *_), (spec, *_) = operator.results, algorithm.results
        if not self.profile.sliced or operator.name != "scan_slice" or value is None:
            return 0.0, 0.0
        size = graph.values[value].bytes / spec.shards(self.sizes)
        once = self.profile.sliced * size / (self.profile.memory * self.device.memory_bandwidth_bytes_per_second)
        return once, SLICED_BACKWARD * once * operator.differentiated

    def kernels(self, graph: Graph, operator: Operator, algorithm: Algorithm) -> OperatorKernels:
        """What a device runs for an operator that is no link."""
        return self._kernels_of(graph, operator)(algorithm)

    def _kernels_of(self, graph: Graph, operator: Operator) -> KernelsOf:
        return KernelsOf(graph, operator, self.sizes, self.device, stored=self._is_stored(graph, operator))

    def _is_stored(self, graph: Graph, operator: Operator) -> bool:
        return is_stored(graph, operator, joined=self.profile.joined)

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of one run of a kernel."""
        if kernel not in self._kernels:
            self._kernels[kernel] = kernel_seconds(kernel, self.device, self.profile)
        return self._kernels[kernel]

    def inner_collectives(self, graph: Graph, operator: Operator, algorithm: Algorithm) -> tuple[InnerCollective, ...]:
        """The collectives inside one forward run of an operator: partial maxima combined, reductions inside calls
        completed, borders exchanged with neighbours, keys and values on a ring."""
        if moves_nothing(operator):
            return ()
        ring = ring_of(graph, operator, algorithm, self.sizes)
        if ring is not None:
            return tuple(
                InnerCollective(
                    kind="permute", size_bytes=size, axes=ring.axes, forward=forward, backward=backward
                )
                for size, forward, backward in (*ring.turns, *ring.blocks)
            )  # fmt: skip
        found = []
        split = [(f.kind, axes) for f, axes in zip(operator.rule.factors, algorithm.axes, strict=True) if axes]
        reduced = tuple(axis for kind, axes in split if kind == "reduction" for axis in axes)
        if reduced and operator.combine in ("max", "min"):
            for position, index in enumerate(operator.results):
                if index is not None:
                    size = graph.values[index].bytes / algorithm.results[position].shards(self.sizes)
                    found.append(InnerCollective(kind="all_reduce", size_bytes=size, axes=reduced, backward=0))
        for one in operator.rule.inside:
            over = tuple(axis for factor in one.over for axis in algorithm.axes[factor])
            if over:
                cut = {axis for dim in one.dims for factor in dim for axis in algorithm.axes[factor]}
                size = one.size_bytes / prod(self.sizes[axis] for axis in cut)
                found.append(
                    InnerCollective(
                        kind="all_reduce", size_bytes=size, axes=over, forward=int(not one.backward),
                        backward=int(one.backward),
                    )
                )  # fmt: skip
        if any(kind == "spatial" for kind, _ in split):
            value = graph.values[operator.operands[0] or 0]
            for move in halo_bytes(operator.rule, algorithm.axes, value.shape, value.itemsize, self.sizes):
                again = int(operator.differentiated and value.differentiated)
                found.append(
                    InnerCollective(kind="permute", size_bytes=move.size_bytes, axes=move.axes, backward=again)
                )
        return tuple(found)

"""What is measured: one kernel or collective at one size, as numbers that the cost model can price.

A case is priced by the functions that price plans (`cost.compute`, `cost.collective`), so that a constant fitted to
cases means the same in a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cluster import Axis, Device
from ..cost.collective import collective_seconds
from ..cost.compute import elementwise_seconds, matmul_seconds

# Results of chains are read again by what follows; what stays inside is arithmetic (`search.prices`).
CHAINS = ("add", "gelu", "softmax", "normalise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product [m, k] x [k, n] and its return [m, n] x [n, k] on every device at once.

    >>> Product(dtype="float32", m=2, k=3, n=4).flops
    48.0
    """

    dtype: str
    m: int
    k: int
    n: int

    @property
    def flops(self) -> float:
        """Of one of the two products."""
        return 2.0 * self.m * self.k * self.n

    @property
    def moved_bytes(self) -> float:
        """By one of the two products, read and written."""
        return item_bytes(self.dtype) * (self.m * self.k + self.k * self.n + self.m * self.n)

    def seconds(self, device: Device) -> float:
        """Predicted."""
        once = matmul_seconds(self.flops, self.moved_bytes, self.dtype, device)
        return 2 * (once + device.kernel_launch_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """Kernels that do next to nothing, on every device at once: what starting one costs.

    Args:
      kernels: how many, none waiting for another.
    """

    kernels: int

    def seconds(self, device: Device) -> float:
        """Predicted."""
        return self.kernels * device.kernel_launch_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Operations on float32 elements one after the other, on every device at once, as plans have them.

    Args:
      name: one of `CHAINS`.
      size_bytes: of its operand on one device.
      written_bytes: that the cost model counts for it: results that are stored, and a part of those that are not.
      kernels: how many results are stored, each by a kernel of its own.
    """

    name: str
    size_bytes: int
    written_bytes: float
    kernels: int

    def seconds(self, device: Device) -> float:
        """Predicted."""
        return elementwise_seconds(self.written_bytes, device) + self.kernels * device.kernel_launch_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective in all groups along one axis of a logical mesh at once.

    Args:
      kind: as of `cost.collective`, `size_bytes` too.
      size_bytes: see there.
      shape: of the logical mesh.
      axis: position of the axis in it.
    """

    kind: str
    size_bytes: int
    shape: tuple[int, ...]
    axis: int

    def seconds(self, axis: Axis) -> float:
        """Predicted, over `axis`, which describes the case's own."""
        return collective_seconds(self.kind, float(self.size_bytes), [axis])


Case = Product | Starts | Chain | Collective


def item_bytes(dtype: str) -> int:
    """Bytes of one element.

    >>> item_bytes("bfloat16")
    2
    """
    import jax.numpy as jnp

    return jnp.dtype(dtype).itemsize


def case_document(case: Case) -> dict[str, Any]:
    """The case as plain data."""
    if isinstance(case, Product):
        return {"kind": "product", "dtype": case.dtype, "shape": [case.m, case.k, case.n]}
    if isinstance(case, Starts):
        return {"kind": "kernel starts", "kernels": case.kernels}
    if isinstance(case, Chain):
        return {"kind": case.name, "dtype": "float32", "size_bytes": case.size_bytes}
    return {
        "kind": case.kind, "size_bytes": case.size_bytes, "group": case.shape[case.axis], "mesh": list(case.shape)
    }  # fmt: skip

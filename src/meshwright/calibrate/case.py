"""What is measured: one kernel or collective at one size, as numbers that the cost model can price.

A case is priced by the functions that price plans (`cost.kernels`, `cost.collective`), so that a constant fitted to
cases means the same in a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cluster import Axis, Device
from ..cost.collective import collective_seconds
from ..cost.efficiency import profile_of
from ..cost.kernels import Kernel, kernel_seconds

CHAINS = ("add", "gelu", "softmax", "normalise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product [m, k] x [k, n] and its return [m, n] x [n, k] on every device at once; of `together` pairs of
    operands, none waiting for another.

    >>> Product(dtype="float32", m=2, k=3, n=4).flops
    48.0
    """

    dtype: str
    m: int
    k: int
    n: int
    together: int = 1

    @property
    def flops(self) -> float:
        """Of one of the two products."""
        return 2.0 * self.m * self.k * self.n

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """There and back, of one pair."""
        m, k, n = float(self.m), float(self.k), float(self.n)
        moved = item_bytes(self.dtype) * (m * k + k * n + m * n)
        shapes = (1.0, m, n, k), (1.0, m, k, n)
        return tuple(Kernel("product", self.flops, moved, self.dtype, shape) for shape in shapes)

    def seconds(self, device: Device) -> float:
        """Predicted."""
        return self.together * _sum_seconds(self.kernels, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution 3 x 3 of float32 images, its derivatives, and the update of both operands by these, on every device
    at once.

    Args:
      batch: images.
      edge: of an image, in pixels.
      channels: of an image.
      features: that are made of it.
      kernels: that the cost model sees in it.
    """

    batch: int
    edge: int
    channels: int
    features: int
    kernels: tuple[Kernel, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of image and kernel."""
        image = (self.batch, self.edge, self.edge, self.channels)
        return image, (3, 3, self.channels, self.features)

    def seconds(self, device: Device) -> float:
        """Predicted."""
        return _sum_seconds(self.kernels, device)


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
      name: one of `CHAINS`, or "transpose", which some devices do at a rate of its own.
      size_bytes: of its operand on one device.
      kernels: that the cost model sees in it.
      together: on how many operands, none waiting for another.
    """

    name: str
    size_bytes: int
    kernels: tuple[Kernel, ...]
    together: int = 1

    def seconds(self, device: Device) -> float:
        """Predicted."""
        return self.together * _sum_seconds(self.kernels, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives in all groups along one axis of a logical mesh at once.

    Args:
      kind: as of `cost.collective`, `size_bytes` too.
      size_bytes: see there.
      shape: of the logical mesh.
      axis: position of the axis in it.
      together: how many, none waiting for another.
    """

    kind: str
    size_bytes: int
    shape: tuple[int, ...]
    axis: int
    together: int = 1

    def seconds(self, axis: Axis) -> float:
        """Predicted, over `axis`, which describes the case's own."""
        return self.together * collective_seconds(self.kind, float(self.size_bytes), [axis])


Case = Product | Convolution | Starts | Chain | Collective


def _sum_seconds(kernels: tuple[Kernel, ...], device: Device) -> float:
    profile = profile_of(device)
    return sum(kernel_seconds(kernel, device, profile) for kernel in kernels)


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
        shape = [case.m, case.k, case.n]
        return {"kind": "product", "dtype": case.dtype, "shape": shape, "together": case.together}
    if isinstance(case, Convolution):
        image, kernel = map(list, case.shapes)
        return {"kind": "convolution", "dtype": "float32", "image": image, "kernel": kernel}
    if isinstance(case, Starts):
        return {"kind": "kernel starts", "kernels": case.kernels}
    if isinstance(case, Chain):
        return {
            "kind": case.name, "dtype": "float32", "size_bytes": case.size_bytes, "together": case.together,
        }  # fmt: skip
    return {
        "kind": case.kind, "size_bytes": case.size_bytes, "group": case.shape[case.axis], "mesh": list(case.shape),
        "together": case.together,
    }  # fmt: skip

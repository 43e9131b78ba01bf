"""Where the blocks of a tensor lie: a mesh of devices, and a sharding spec over it.

A dim split by axes of total size k is cut into blocks of ceil(n / k) indices, the last ones shorter or empty (GSPMD's
rule, Xu et al. 2021); where k divides n this is the even split of JAX. Axes that split no dim are replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .errors import ReshardError

Spec = tuple[tuple[str, ...], ...]
"""For each dim the axes that split it, major first: `meshwright.sharding.Spec.dims`. Missing dims are not split."""

Box = tuple[tuple[int, int], ...]
"""For each dim the half-open range of indices."""


@dataclass(frozen=True, kw_only=True)
class DeviceMesh:
    """Devices on a grid with named axes.

    >>> DeviceMesh(devices=(0, 1, 2, 3, 4, 5), shape=(2, 3), axes=("x", "y")).sizes
    {'x': 2, 'y': 3}

    Args:
      devices: ids, in row-major order of the grid.
      shape: extents of the grid.
      axes: a name for each.

    Raises:
      ReshardError: the numbers do not fit together, or a device or an axis appears twice.
    """

    devices: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes) or len(set(self.axes)) != len(self.axes) or min(self.shape, default=1) < 1:
            raise ReshardError(
                refused="a mesh", got=f"shape {self.shape} with axes {self.axes}",
                needed="as many names as extents, all different, all extents >= 1", where="DeviceMesh",
                try_="naming each extent once",
            )  # fmt: skip
        if len(self.devices) != math.prod(self.shape) or len(set(self.devices)) != len(self.devices):
            raise ReshardError(
                refused="a mesh", got=f"{len(self.devices)} devices, {len(set(self.devices))} of them different",
                needed=f"{math.prod(self.shape)} different devices for shape {self.shape}", where="DeviceMesh",
                try_="one id for each place of the grid",
            )  # fmt: skip

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The extent of each axis."""
        return dict(zip(self.axes, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh and how a tensor is split over it.

    >>> mesh = DeviceMesh(devices=(0, 1, 2, 3), shape=(2, 2), axes=("x", "y"))
    >>> layout = Layout(mesh=mesh, spec=(("y",), ()))
    >>> layout.block_devices(2)
    ((0, 2), (1, 3))
    >>> layout.boxes((5, 3))
    {0: ((0, 3), (0, 3)), 2: ((0, 3), (0, 3)), 1: ((3, 5), (0, 3)), 3: ((3, 5), (0, 3))}

    Args:
      mesh: the devices.
      spec: for each dim the axes that split it, major first; dims beyond its end are not split.

    Raises:
      ReshardError: the spec names an axis that the mesh lacks, or names one twice.
    """

    mesh: DeviceMesh
    spec: Spec

    def __post_init__(self) -> None:
        used = [axis for dim in self.spec for axis in dim]
        for axis in used:
            if axis not in self.mesh.sizes:
                raise ReshardError(
                    refused="a sharding spec", got=f"{self.spec} with the unknown axis {axis!r}",
                    needed=f"axes of the mesh: {', '.join(self.mesh.axes) or 'it has none'}", where="Layout.spec",
                    try_="an axis of the mesh, or () for a dim that is not split",
                )  # fmt: skip
            if used.count(axis) > 1:
                raise ReshardError(
                    refused="a sharding spec", got=f"{self.spec} with axis {axis!r} twice", needed="each axis once",
                    where="Layout.spec", try_="removing the axis from all dims but one",
                )  # fmt: skip

    def splits(self, rank: int) -> tuple[int, ...]:
        """Into how many blocks each of `rank` dims is cut.

        Raises:
          ReshardError: the spec is longer than `rank`.
        """
        if len(self.spec) > rank:
            raise ReshardError(
                refused="a sharding spec", got=f"{self.spec} of {len(self.spec)} dims", needed=f"at most {rank} dims",
                where=f"a tensor of rank {rank}", try_="leaving out the dims that the tensor does not have",
            )  # fmt: skip
        dims = [*self.spec, *[()] * (rank - len(self.spec))]
        return tuple(math.prod(self.mesh.sizes[a] for a in axes) for axes in dims)

    def block_devices(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The replicas of each block, blocks in row-major order over the dims, replicas in mesh order."""
        blocks = math.prod(self.splits(rank))
        used = [self.mesh.axes.index(a) for axes in self.spec for a in axes]
        rest = [i for i in range(len(self.mesh.axes)) if i not in used]
        grid = np.array(self.mesh.devices, dtype=np.int64).reshape(self.mesh.shape)
        return tuple(map(tuple, grid.transpose(*used, *rest).reshape(blocks, -1).tolist()))

    def boxes(self, shape: Sequence[int]) -> dict[int, Box]:
        """The box of a tensor of global `shape` that each device holds."""
        splits = self.splits(len(shape))
        found = {}
        for block, devices in enumerate(self.block_devices(len(shape))):
            coordinates = np.unravel_index(block, splits) if splits else ()
            box = tuple(block_range(n, k, int(j)) for n, k, j in zip(shape, splits, coordinates, strict=True))
            found.update(dict.fromkeys(devices, box))
        return found


def block_range(extent: int, blocks: int, index: int) -> tuple[int, int]:
    """The range of block `index` when `extent` indices are cut into `blocks`.

    >>> [block_range(10, 4, j) for j in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    size = -(-extent // blocks)
    return min(index * size, extent), min((index + 1) * size, extent)


def grid_layout(
    devices: Sequence[int], shape: Sequence[int], axes: Sequence[str], spec: Sequence[Sequence[str]]
) -> Layout:
    """A layout from its four parts, as `Layout` and `DeviceMesh`.

    >>> grid_layout(range(4), (2, 2), ("x", "y"), [("x",)]).splits(2)
    (2, 1)
    """
    mesh = DeviceMesh(devices=tuple(devices), shape=tuple(shape), axes=tuple(axes))
    return Layout(mesh=mesh, spec=tuple(tuple(dim) for dim in spec))

"""The logical meshes that stages may have on their devices: which axes a submesh is seen to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ...cluster import Cluster, Device, LogicalMesh
from .submeshes import Submesh, Submeshes

# A logical mesh that is asked for: names and sizes of its axes.
WantedMesh = tuple[tuple[str, ...], tuple[int, ...]]

# The inner axis of a logical mesh spans two hosts at most, or so many devices.
_NEAR = 8

# Three-axis meshes are tried for programs of up to this many operators; a larger program's user names the ones to try.
_THREE_AXES_OPERATORS = 150


class Kinds:
    """Classes of submeshes on which a stage costs the same and has the same logical meshes, numbered on first use.

    Args:
      submeshes: of the cluster.
      meshes: logical meshes to consider, as (names, sizes), on submeshes that have so many devices; none for all.
      own_meshes: the same for submeshes that have their own.

    Attributes:
      meshes: of each kind its logical meshes.
      devices: of each kind what it is made of; of several kinds of device one that has the least of each.
    """

    def __init__(
        self,
        submeshes: Submeshes,
        meshes: Sequence[WantedMesh] = (),
        own_meshes: Mapping[Submesh, Sequence[WantedMesh]] | None = None,
    ) -> None:
        self.meshes: list[tuple[LogicalMesh, ...]] = []
        self.devices: list[Device] = []
        self._submeshes, self._wanted, self._own = submeshes, meshes, own_meshes or {}
        self._numbers: dict[Any, int] = {}
        self._of: dict[Submesh, int] = {}

    def __getitem__(self, submesh: Submesh) -> int:
        if submesh not in self._of:
            wanted = self._own.get(submesh, self._wanted)
            kind = self._submeshes.kind(submesh), tuple(wanted)
            if kind not in self._numbers:
                self._numbers[kind] = len(self._numbers)
                part = self._submeshes.part(submesh)
                self.meshes.append(meshes_of(part, wanted))
                self.devices.append(part.device)
            self._of[submesh] = self._numbers[kind]
        return self._of[submesh]


def meshes_alone(cluster: Cluster, wanted: Sequence[WantedMesh], operators: int) -> Sequence[WantedMesh]:
    """The logical meshes that the only stage of a plan may have.

    Args:
      cluster: all of it.
      wanted: names and sizes of axes; none for all.
      operators: of the program.
    """
    if wanted:
        return wanted
    found = meshes_of(cluster, (), max_axes=3 if operators <= _THREE_AXES_OPERATORS else 2)
    return [(one.axis_names, one.shape) for one in found]


def meshes_of(part: Cluster, wanted: Sequence[WantedMesh], *, max_axes: int = 2) -> tuple[LogicalMesh, ...]:
    """The logical meshes of a cluster, one for each set of axes: other orders of the same axes give the same plans. The
    innermost axis spans two hosts at most, since collectives of every layer do not pay over more; and two axes can do
    what one of as many devices can.

    Args:
      part: the cluster, or a submesh of it.
      wanted: names and sizes of axes; none for all.
      max_axes: at most so many axes where none are wanted.
    """
    if wanted:
        return tuple(part.logical_mesh(sizes, names) for names, sizes in wanted if prod(sizes) == part.num_devices)
    found: dict[Any, LogicalMesh] = {}
    near = max(2 * max(host.devices for host in part.hosts), _NEAR)
    shapes = tuple(part.logical_shapes(max_axes=max_axes))
    for shape in [shape for shape in shapes if shape[-1] <= near] or shapes:
        mesh = part.logical_mesh(shape)
        key = tuple(sorted((a.size, a.latency_seconds, a.bandwidth_bytes_per_second) for a in mesh.axes))
        found.setdefault(key, mesh)
    return tuple(found.values())

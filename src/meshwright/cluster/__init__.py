"""Clusters: devices, hosts, links, and the logical meshes over them with what a collective costs along each axis.

Read `hardware` (what a host is made of), `cluster`, `logical_mesh` (the prices), then `load` (presets, TOML, 'local').
Imports no JAX; only `load_cluster("local")` asks JAX which devices there are.
"""

from .axis import Axis as Axis, Level as Level
from .cluster import Cluster as Cluster
from .errors import ClusterError as ClusterError
from .hardware import Device as Device, Host as Host, Link as Link
from .host_order import (
    HostOrder as HostOrder,
    devices_by_kind as devices_by_kind,
    host_orders as host_orders,
    one_kind_alone as one_kind_alone,
)
from .load import cluster_of as cluster_of, load_cluster as load_cluster, preset_names as preset_names
from .logical_mesh import LogicalMesh as LogicalMesh
from .measured_on import MeasuredOn as MeasuredOn

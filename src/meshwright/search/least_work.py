"""What no plan of a program can take less than, whatever its layouts: all arithmetic, shared evenly by all devices."""

from __future__ import annotations

from ..cluster import Cluster
from ..cost.efficiency import profile_of
from ..cost.kernels import arithmetic_seconds
from ..program.graph import Graph
from .choices import operator_choices
from .operator_kernels import KernelsOf


def least_work_seconds(graph: Graph, microbatches: int, cluster: Cluster) -> float:
    """Seconds of a step in which every product, convolution and attention of both passes runs once, in full tiles, on
    all devices at once; of several kinds of device each kernel at the rate of the best for it.

    Args:
      graph: the program at the size of one microbatch.
      microbatches: in a step.
      cluster: where it runs.
    """
    devices = list(dict.fromkeys(host.device for host in cluster.hosts))
    total = 0.0
    for operator in graph.operators:
        if operator.is_link or not operator.matmul:
            continue
        (whole,) = operator_choices(graph, operator, {}, of_parameters=False)
        seconds = []
        for device in devices:
            profile = profile_of(device)
            found = KernelsOf(graph, operator, {}, device, stored=False)(whole.algorithm)
            backward = sum(one.runs * arithmetic_seconds(one.kernel, device, profile) for one in found.gradients)
            seconds.append(arithmetic_seconds(found.forward, device, profile) + backward)
        total += operator.repeats * min(seconds)
    return microbatches * total / cluster.num_devices

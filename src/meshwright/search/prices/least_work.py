"""A lower bound on the step of every plan of a program: all arithmetic, shared evenly by all devices."""

from __future__ import annotations

from ...cluster import Cluster
from ...cost.efficiency import profile_of
from ...cost.kernels import arithmetic_seconds
from ...program.graph import Graph
from .choices import operator_choices
from .kernels import KernelsOf


def least_work_seconds(graph: Graph, microbatches: int, cluster: Cluster) -> float:
    """Seconds of a step in which every product, convolution and attention of both passes of a program, at the size of
    one microbatch, runs once, in full tiles, on all devices at once; of several kinds of device each kernel at the rate
    of the best for it."""
    return microbatches * sum(least_work_by_equation(graph, cluster).values()) / cluster.num_devices


def least_work_by_equation(graph: Graph, cluster: Cluster) -> dict[int, float]:
    """Of each top-level equation of a program, at the size of one microbatch, that has any such work, its seconds in
    one microbatch on one device."""
    devices = list(dict.fromkeys(host.device for host in cluster.hosts))
    found: dict[int, float] = {}
    for operator in graph.operators:
        if operator.is_link or not operator.matmul:
            continue
        (whole,) = operator_choices(graph, operator, {}, of_parameters=False)
        seconds = []
        for device in devices:
            profile = profile_of(device)
            kernels = KernelsOf(graph, operator, {}, device, stored=False)(whole.algorithm)
            backward = sum(one.runs * arithmetic_seconds(one.kernel, device, profile) for one in kernels.gradients)
            seconds.append(arithmetic_seconds(kernels.forward, device, profile) + backward)
        equation = operator.path[0]
        found[equation] = found.get(equation, 0.0) + operator.repeats * min(seconds)
    return found

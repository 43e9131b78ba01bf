"""What the search needs to know of a program's parameters beside their shapes."""

from __future__ import annotations

from typing import Any

from ..._jax.jaxpr import open_jaxpr
from ...program.trace import Program
from .problem import ParameterInfo


def parameter_infos(program: Program) -> list[ParameterInfo]:
    """Each parameter with the bytes of the optimizer state that is laid out like it and in the devices' memory."""
    graph = program.graph
    extra = [0.0] * len(graph.parameters)
    invars: list[Any] = list(open_jaxpr(program.outer).invars)
    for index, leaf in enumerate(program.state):
        if leaf is not None and index not in program.parameter_inputs and index not in program.host_inputs:
            aval = invars[index].aval
            extra[leaf.parameter] += float(aval.size) * aval.dtype.itemsize
    return [
        ParameterInfo(name=graph.values[graph.inputs[p]].name, optimizer_bytes=size)
        for p, size in zip(graph.parameters, extra, strict=True)
    ]

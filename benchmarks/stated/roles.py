"""What the axes of a stated plan are for: roles of presets, replicas that store nothing, and context.

Context devices split the sequence of whatever has one and is no weight; attention then gathers keys and values, as its
rule says that every query reads them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.program.graph import Graph, Operator
from meshwright.program.origins import Origin, dim_origins
from meshwright.search.restrictions.roles import Roles
from meshwright.sharding import Spec

# The role of each axis of a stated plan; context is none that presets have.
ROLE_OF: Mapping[str, Any] = {
    "replica": "batch", "data": "batch", "expert": "expert", "context": "context", "model": "tensor",
}  # fmt: skip


class StatedRoles(Roles):
    """Roles with axes of replicas, which store nothing, and of context, which split the sequence."""

    @property
    def storing(self) -> frozenset[str]:
        """The axes that may split optimizer state further than parameters."""
        return frozenset(axis for axis, role in self.axes.items() if role != "tensor" and axis != "replica")

    @property
    def summing(self) -> frozenset[str]:
        """The axes over which every gradient is summed."""
        return frozenset(axis for axis, role in self.axes.items() if role != "tensor")

    def _sequence(self, origins: Mapping[int, Origin | None]) -> set[int]:
        return {f for f, o in origins.items() if o is not None and o.kind == "data" and not self.is_batch(o)}

    def _factors(
        self, operator: Operator, told: Sequence[Origin], role: Any, *, of_parameters: bool
    ) -> tuple[set[int], bool]:
        if role != "context":
            return Roles._factors(self, operator, told, role, of_parameters=of_parameters)
        origins = dict(enumerate(told))
        return (set(origins), False) if of_parameters and self.gathered else (self._sequence(origins), True)

    def _may_split(self, origins: Sequence[Origin | None], use: Spec, axis: str) -> bool:
        if use.dim_of(axis) is not None and self.axes.get(axis) in ("batch", "context"):
            return self.gathered and axis != "replica"
        return Roles._may_split(self, origins, use, axis)

    def input(self, graph: Graph, value: int, specs: Sequence[Spec]) -> tuple[Spec, ...]:
        """The specs of an input, or of a value received from another stage, that the roles allow."""
        plain = replace(self, axes={a: r for a, r in self.axes.items() if r != "context"})
        specs = Roles.input(plain, graph, value, specs)
        wanted = self._sequence(dict(enumerate(dim_origins(graph, value))))
        for axis, role in self.axes.items():
            if role == "context":
                split = [spec for spec in specs if spec.dim_of(axis) in wanted]
                specs = tuple(split or [spec for spec in specs if spec.dim_of(axis) is None])
        return tuple(specs)

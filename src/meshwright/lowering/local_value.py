"""A value on one device: its shard, the spec it is in, and the shards it has been converted to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from jax.ad_checkpoint import checkpoint_name

from .._jax.jaxpr import is_traced
from ..errors import PlanError
from ..sharding import Conversion, Spec, convert
from .collectives import run_conversion

# Blocks of constants, by their value and spec, that have been made for the reader at hand; None outside of any.
_FOR_READER = ContextVar[dict[tuple[int, Spec], Any] | None]("for_reader", default=None)


def planned_conversion(source: Spec, target: Spec) -> Conversion:
    """How a value gets from one spec of a plan to another.

    Raises:
      PlanError: if that cannot be: no search makes such a plan.
    """
    conversion = convert(source, target)
    if conversion is None:
        raise PlanError(
            refused="the plan", got=f"a value in {source!r} that is needed in {target!r}",
            needed="a layout that it can be moved to", where="plan=",
            try_="planning again, or the file as plan.save wrote it",
        )  # fmt: skip
    return conversion


class LocalValue:
    """One device's part of a program value.

    Conversions are remembered, so that several readers of one spec share one collective, and its backward one.

    Args:
      shard: this device's block, or None for a constant that is made where it is read.
      spec: the spec of `shard`.
      sizes: mesh axis sizes.
      differentiated: whether a cotangent flows back through it.
      make: for a constant, makes its block in a given spec.
      of_traced: for a constant, whether it is made of arrays of the trace at hand (the last count of a loop), so that
        it cannot be made outside of it.
      moved: its shards in specs that it has been converted to.
      of_parameters: whether it is made of parameters alone.
      name: of what it is converted to, for policies of `jax.checkpoint`; none if empty.
    """

    __slots__ = ("_made", "_make", "_of_traced", "differentiated", "name", "of_parameters", "shard", "sizes", "spec")

    def __init__(
        self,
        shard: Any,
        spec: Spec,
        sizes: Mapping[str, int],
        *,
        differentiated: bool = False,
        make: Callable[[Spec], Any] | None = None,
        of_traced: bool = False,
        moved: Mapping[Spec, Any] | None = None,
        of_parameters: bool = False,
        name: str = "",
    ) -> None:
        self.shard = shard
        self.spec = spec
        self.sizes = sizes
        self.differentiated = differentiated
        self.of_parameters = of_parameters
        self.name = name
        self._make = make
        self._of_traced = of_traced
        self._made: dict[Spec, Any] = dict(moved or {})

    @property
    def is_lazy(self) -> bool:
        """Whether it is a constant, computed in whatever spec it is read."""
        return self._make is not None

    @property
    def is_traced(self) -> bool:
        """Whether it is an array of a trace, or made of one."""
        return self._of_traced if self.is_lazy else is_traced(self.shard)

    @property
    def moved(self) -> Mapping[Spec, Any]:
        """Its shards in the specs that it has been converted to."""
        return self._made

    def leave(self) -> LocalValue:
        """The same value for readers outside of a checkpoint that it was made in."""
        if not (self.is_lazy and self._of_traced):
            return self
        whole = Spec.replicated(len(self.spec.dims))
        return LocalValue(self.read(whole), whole, self.sizes, differentiated=self.differentiated)

    def read(self, spec: Spec) -> Any:
        """The shard in `spec`."""
        if self._make is not None:
            return self._made_for_reader(self._make, spec)
        if spec == self.spec:
            return self.shard
        if spec not in self._made:
            self._made[spec] = self._convert(spec)
        return self._made[spec]

    def _made_for_reader(self, make: Callable[[Spec], Any], spec: Spec) -> Any:
        """A constant's block. It is remembered while one reader's are made, and no longer: the reader may be inside a
        loop or a checkpoint, whose arrays must not leave it. (A constant made of constants is often reached in many
        ways: of a parallel prefix sum, in as many as it has terms.)"""
        found = _FOR_READER.get()
        if found is None:
            token = _FOR_READER.set({})
            try:
                return self._made_for_reader(make, spec)
            finally:
                _FOR_READER.reset(token)
        if (id(self), spec) not in found:
            found[id(self), spec] = make(spec)
        return found[id(self), spec]

    def _convert(self, spec: Spec) -> Any:
        source = self.spec
        if not self.differentiated:
            source, spec = source.without_broadcast(), spec.without_broadcast()
        conversion = planned_conversion(source, spec)
        moved = run_conversion(
            self.shard, conversion, self.sizes, differentiated=self.differentiated, of_parameters=self.of_parameters
        )
        return checkpoint_name(moved, self.name) if self.name else moved

    def like(self, shard: Any, spec: Spec) -> LocalValue:
        """Another shard of the same kind of value."""
        return LocalValue(shard, spec, self.sizes, differentiated=self.differentiated, of_parameters=self.of_parameters)

    def named(self, name: str, *, as_read: bool) -> LocalValue:
        """The same value under a name that a policy can ask for; `as_read`: and what it is converted to, which is what
        the backward pass reads then, and all that is kept."""
        if self.is_lazy:
            return self
        found = self.like(checkpoint_name(self.shard, name), self.spec)
        found.name = name if as_read else ""
        return found

    def enter(self) -> LocalValue:
        """The same value for readers inside a loop body, whose conversions stay there."""
        if self.is_lazy:
            return self
        return self.like(self.shard, self.spec)

    def settle(self, spec: Spec) -> LocalValue:
        """The same value, moved to `spec` once for all its readers."""
        return self.like(self.read(spec), spec)

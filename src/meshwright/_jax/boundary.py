"""`layer_boundary`: a mark in a model's forward function that ends a layer.

A primitive without operands, results or effects. Tracing keeps it where it was called (only the traces that hold
tangents forget equations nobody reads); batching and differentiation hand it on untouched, since it has no operand that
they could act on; it lowers to nothing. Outside Meshwright it therefore costs nothing, not even a slower dispatch, as
an effect would. `jaxpr.inline` takes the marks out of a program and says where they were; one that is left, inside a
custom derivative, does nothing when it is evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jax.extend import core as jex_core
from jax.interpreters import mlir

layer_boundary_p = jex_core.Primitive("meshwright_layer_boundary")
layer_boundary_p.multiple_results = True
layer_boundary_p.def_abstract_eval(list)
layer_boundary_p.def_impl(list)
mlir.register_lowering(layer_boundary_p, lambda ctx: [])


def layer_boundary() -> None:
    """End a layer here: pipeline stages are then made of the layers between boundaries, and begin nowhere else.

    To be called in the loss function that `meshwright.value_and_grad` differentiates, between the blocks of a model.
    Everything computed before the call belongs to earlier layers. In the body of a `jax.lax.scan`, wherever it stands
    there, it makes each trip a layer. A `jax.checkpoint` region, a `cond`, a `while` or a function with a derivative of
    its own is never cut: a boundary that comes first inside one stands before it, any other after it.

    Without stages, under `jax.jit`, `jax.grad` and `jax.vmap`, and outside JAX, it does nothing.

    >>> import jax
    >>> def model(x):
    ...     x = jax.numpy.sin(x)
    ...     layer_boundary()
    ...     return jax.numpy.cos(x)
    >>> float(jax.grad(model)(0.0))
    -0.0
    """
    layer_boundary_p.bind()


@dataclass(slots=True, kw_only=True)
class Boundaries:
    """Where the boundaries of a program were, as positions of its top-level equations.

    Args:
      before: equations that begin a layer; as many as there are equations after the last.
      scans: scans of which each trip is a layer.
    """

    before: list[int] = field(default_factory=list)
    scans: list[int] = field(default_factory=list)

    def add_body(self, inside: Boundaries, position: int, *, is_scan: bool) -> None:
        """Count the boundaries found inside the equation at `position`."""
        if is_scan and (inside.before or inside.scans):
            self.scans.append(position)
            return
        if 0 in inside.before:
            self.before.append(position)
        if inside.scans or any(inside.before):
            self.before.append(position + 1)

"""A step without gradients as a program with a core: all of it, and nothing differentiated.

A training step's core is its loss function, marked by `meshwright.value_and_grad`. Here the whole step is marked, with
no parameter to differentiate by and a loss of zero, so that everything made for cores serves it: microbatches, layers,
stages, the forward half of the runtime. Its weights are inputs like any other: they have no gradients and no optimizer
state, and each stage keeps those it reads.

Known limit: of stacked weights (a loop over layers) that stages share, each stage keeps the whole stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._jax.grad import value_and_grad_p
from .._jax.jaxpr import hoist_consts
from .trace import Program, trace_program


def trace_inference(
    step: Callable[..., Any], args: Sequence[Any], *, microbatches: int = 1, batch_axis: int = 0
) -> Program:
    """Trace a step that is to run forwards only.

    >>> shapes = jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")
    >>> program = trace_inference(lambda w, x: x @ w, shapes, microbatches=2)
    >>> program.split_dims, program.parameter_inputs
    ((None, 0), ())

    Args:
      step: a function of arrays, `(weights, batch, ...) -> results`.
      args: its arguments; only shapes and dtypes are looked at. Every array after the first argument that has a batch
        axis is cut into microbatches.
      microbatches: into how many parts to cut the batch. Results that do not grow with it combine as results beside a
        loss do.
      batch_axis: which axis is the batch.

    Raises:
      PlanError: for arguments that are not arrays, or a batch that does not divide.
    """
    return trace_program(_marked(step), args, microbatches=microbatches, batch_axis=batch_axis, reduction="mean")


def _marked(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step as one marked call."""

    def marked(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        trees: dict[str, Any] = {}

        def core(*inner: Any) -> tuple[Any, ...]:
            results, trees["out"] = jax.tree.flatten(step(*jax.tree.unflatten(tree, inner)))
            return (np.float32(0.0), *results)

        closed = jax.make_jaxpr(core)(*leaves)
        inputs = [*closed.consts, *leaves]
        made = value_and_grad_p.bind(*inputs, jaxpr=hoist_consts(closed), num_consts=len(inputs), reduction=None)
        return jax.tree.unflatten(trees["out"], made[1:])

    marked.__name__ = getattr(step, "__name__", "the step")
    return marked

"""cuDNN's attention, `jax.nn.dot_product_attention(implementation="cudnn")`, for machines that are not here.

While it is traced JAX asks which cuDNN is installed and which GPU is there. A step that is planned for named GPUs is
traced with the answers of those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from jax._src.cudnn import fused_attention_stablehlo as attention  # asks for devices while tracing; 0.10 to 0.12

from .jaxpr import Equation

# The primitives, forward and backward.
FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"

# What is assumed to be installed on a machine that is not here: 9.13, of 2025.
_VERSION = 91300


def is_cudnn_attention(equation: Equation) -> bool:
    """Whether an equation is cuDNN's attention or its derivative."""
    return equation.primitive.name in (FORWARD, BACKWARD)


def attention_flops(equation: Equation) -> float:
    """FLOPs of cuDNN's attention: two products forward, five backward."""
    turned = equation.params["layout"] == 1
    query, key = (atom.aval.shape for atom in equation.invars[:2])
    products = 5 if equation.primitive.name == BACKWARD else 2
    return 2.0 * products * prod(query) * key[2 if turned else 1]


@contextmanager
def as_on(capability: str | None) -> Iterator[None]:
    """Trace as on a GPU of a compute capability such as "9.0"; None for whatever is here.

    Known limit: JAX remembers what it has traced. The same call of the same shapes is not asked about again for another
    GPU in one process, so that what that one cannot do is said by its compiler.
    """
    if capability is None:
        yield
        return
    target = _numbers(capability)
    answers = {
        "check_cudnn_version": lambda: _VERSION,
        "check_compute_capability": lambda least: target >= _numbers(least),
        "is_cuda_compute_capability_equal": lambda other: target == _numbers(other),
    }
    before = {name: getattr(attention, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(attention, name, answer)
        yield
    finally:
        for name, function in before.items():
            setattr(attention, name, function)


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.rstrip("abcdefghijklmnopqrstuvwxyz").split("."))

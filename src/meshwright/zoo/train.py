"""From a model to a training step: the state, the optimizer, and the `Target` that the rest of Meshwright works on.

The state is a plain dict, so a plan can name its parts: `params` (float32 master copies), `opt` (the optax state),
`step` (int32 scalar) and, only for models that keep running averages, `statistics`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from meshwright._jax.grad import value_and_grad

from . import parameters

State = dict[str, Any]
Batch = dict[str, jax.Array]
Optimizer = Literal["adam", "adamw", "sgd"]

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    # A larger epsilon than the default keeps gradients that are zero but for rounding (a key bias) from becoming noise.
    "adam": lambda: optax.adam(1e-3, eps=1e-5),
    "adamw": lambda: optax.adamw(1e-3, eps=1e-5, weight_decay=0.01),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model before it has an optimizer.

    Attributes:
        name: name in the registry, or a description for a model built directly.
        family: of models like it, as `meshwright models` groups them ("gpt", "llama", "moe", ...).
        params: pytree of `parameters.Parameter`.
        statistics: pytree of `parameters.Parameter` that the model updates without gradients, or None.
        loss: `loss(params, batch) -> scalar` without statistics,
            `loss(params, batch, statistics) -> (scalar, statistics)` with them.
        make_batch: `make_batch(key) -> batch`, random inputs of the full global batch.
        model_flops_per_sample: forward and backward FLOPs of one sample (one sequence, one image), rematerialisation
            not counted.
        reduction: of `value_and_grad`, where the loss of a microbatch is one by itself: examples are normalised
            together, or dealt to experts.
    """

    name: str
    family: str
    params: Any
    statistics: Any = None
    loss: Callable[..., Any]
    make_batch: Callable[[jax.Array], Batch]
    model_flops_per_sample: float
    reduction: Literal["mean"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A training step and all that is needed to plan, start and feed it.

    Attributes:
        name: name in the registry, or a description for a model built directly.
        family: of models like it, as `meshwright models` groups them ("gpt", "llama", "moe", ...).
        step: `step(state, batch) -> (state, {"loss": loss})`; not jitted.
        init: `init(key) -> state` with real arrays; may be jitted.
        make_batch: `make_batch(key) -> batch` with real arrays of the example shapes; may be jitted.
        example_state: the state as a pytree of `jax.ShapeDtypeStruct`; takes no memory.
        example_batch: the batch likewise; dim 0 of every leaf is the global batch.
        model_flops_per_sample: forward and backward FLOPs of one sample (one sequence, one image); twice the
            multiply-adds of the matrix products and convolutions, backward counted as twice forward,
            rematerialisation not counted. Each family's module gives its formula.
        parameters: number of trained scalars.

    >>> from meshwright import zoo
    >>> target = zoo.build("mlp-tiny")
    >>> target.example_batch["x"].shape
    (32, 64)
    """

    name: str
    family: str
    step: Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]
    init: Callable[[jax.Array], State]
    make_batch: Callable[[jax.Array], Batch]
    example_state: State
    example_batch: dict[str, jax.ShapeDtypeStruct]
    model_flops_per_sample: float
    parameters: int


@jax.tree_util.register_static
class _Parameters:
    """Stands for the parameters in a state: a pytree without leaves, so that no leaf is traced."""


def _with_parameters(state: Any, params: Any) -> Any:
    """A state with parameters in place of all that stands for them. The optimizers here keep scalars, and arrays like
    the parameters."""

    def is_parameters(node: Any) -> bool:
        return isinstance(node, _Parameters)

    def like(node: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf, params) if is_parameters(node) else node  # containers of its own

    return jax.tree.map(like, state, is_leaf=is_parameters)


def make_target(model: Model, *, optimizer: Optimizer = "adam") -> Target:
    """Joins a model and an optimizer into a `Target`.

    Args:
        model: what is trained.
        optimizer: "adam" or "adamw" (learning rate 1e-3), or "sgd" (1e-2, momentum 0.9).

    Returns:
        The target; nothing is computed and no array is made.

    Raises:
        ValueError: the optimizer has another name.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"refused to build {model.name!r}: got optimizer={optimizer!r}, needed one of {sorted(OPTIMIZERS)}; "
            "try optimizer='adam', or write the step with your own optax transformation"
        )
    transformation = OPTIMIZERS[optimizer]()

    def init(key: jax.Array) -> State:
        key = parameters.generator(key)
        state = start(parameters.initialise(model.params, key))
        if model.statistics is not None:
            state["statistics"] = parameters.initialise(model.statistics, key)
        return state

    def start(params: Any) -> State:
        return {"params": params, "opt": transformation.init(params), "step": jnp.zeros((), jnp.int32)}

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        params = state["params"]
        if model.statistics is None:
            loss, gradients = value_and_grad(model.loss, reduction=model.reduction)(params, batch)
            kept = {}
        else:
            differentiate = value_and_grad(model.loss, has_aux=True, reduction=model.reduction)
            (loss, statistics), gradients = differentiate(params, batch, state["statistics"])
            kept = {"statistics": statistics}
        updates, opt = transformation.update(gradients, state["opt"], params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1, **kept}, {"loss": loss}

    def make_batch(key: jax.Array) -> Batch:
        return model.make_batch(parameters.generator(key))

    # Tracing the optimizer of thousands of arrays one by one would take most of the time to build a large model.
    example_state = _with_parameters(jax.eval_shape(start, _Parameters()), parameters.abstract(model.params))
    if model.statistics is not None:
        example_state["statistics"] = parameters.abstract(model.statistics)
    return Target(
        name=model.name,
        family=model.family,
        step=step,
        init=init,
        make_batch=make_batch,
        example_state=example_state,
        example_batch=jax.eval_shape(lambda: make_batch(jax.random.key(0))),
        model_flops_per_sample=float(model.model_flops_per_sample),
        parameters=parameters.count(model.params),
    )

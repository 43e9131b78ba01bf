"""Layouts that an expert would write by hand in plain JAX for one mesh axis: data parallel, FSDP, tensor parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from meshwright import zoo

AXIS = "x"

_ATTENTION = {
    "*attention/qkv": (None, None, AXIS, None),
    "*attention/qkv_bias": (None, AXIS, None),
    "*attention/out": (AXIS, None, None),
}
_TRANSFORMER = _ATTENTION | {
    "*feed_forward/in": (None, AXIS),
    "*feed_forward/in_bias": (AXIS,),
    "*feed_forward/out": (AXIS, None),
    "*embedding/tokens": (AXIS, None),
}
# By family: the leaves of the state (parameters, and the optimizer's leaves of the same names) that are split. First
# columns (heads, channels), then rows, so that a pair of products needs one sum.
TENSOR_PARALLEL: dict[str, dict[str, tuple[str | None, ...]]] = {
    "gpt": _TRANSFORMER,
    "bert": _TRANSFORMER,
    "llama": {
        "*attention/query": (None, None, AXIS, None, None),
        "*attention/key_value": (None, None, None, AXIS, None),
        "*attention/out": (None, AXIS, None, None, None),
        "*feed_forward/gate_in": (None, None, None, AXIS),
        "*feed_forward/out": (None, AXIS, None),
        "*embedding": (AXIS, None),
        "*head": (None, AXIS),
    },
    # Expert parallelism divides the batch as well: see `plans`.
    "moe": {"*experts/in": (AXIS, None, None), "*experts/out": (AXIS, None, None)},
    "wresnet": {
        "*spatial/w": (None, None, None, AXIS),
        "*spatial/norm/*": (AXIS,),
        "*spatial/mean": (AXIS,),
        "*spatial/variance": (AXIS,),
        "*expand/w": (None, None, AXIS, None),
    },
    "unet": _ATTENTION
    | {
        "*blocks/*/in/w": (None, None, None, AXIS),
        "*blocks/*/in/b": (AXIS,),
        "*blocks/*/out_norm/*": (AXIS,),
        "*blocks/*/time/w": (None, AXIS),
        "*blocks/*/time/b": (AXIS,),
        "*blocks/*/out/w": (None, None, AXIS, None),
    },
    "mlp": {
        **{f"*layers/{i}/w": (None, AXIS) for i in range(0, 64, 2)},
        **{f"*layers/{i}/b": (AXIS,) for i in range(0, 64, 2)},
        **{f"*layers/{i}/w": (AXIS, None) for i in range(1, 64, 2)},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """A step with the layouts of its arguments.

    Args:
      step: `(state, batch) -> (state, metrics)`.
      state: a sharding for each leaf of the state.
      batch: for each leaf of the batch.
    """

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch: Any

    def jitted(self) -> Any:
        """The step under `jax.jit`, the state donated and returned as it came."""
        return jax.jit(
            self.step, in_shardings=(self.state, self.batch), out_shardings=(self.state, None), donate_argnums=0
        )


def plans(target: zoo.Target, devices: Sequence[jax.Device]) -> dict[str, ExpertPlan]:
    """The three plans of one model on all `devices`, by name."""
    mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    patterns = TENSOR_PARALLEL[target.family]

    def everywhere(tree: Any, sharding: NamedSharding) -> Any:
        return jax.tree.map(lambda _: sharding, tree)

    def gathered(state: Any, batch: Any) -> tuple[Any, Any]:
        params = jax.lax.with_sharding_constraint(state["params"], everywhere(state["params"], whole))
        return target.step({**state, "params": params}, batch)

    def tensor(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        dims = next((d for pattern, d in patterns.items() if fnmatchcase(name, pattern)), ())
        if len(dims) != leaf.ndim:
            return whole
        fits = all(dim is None or extent % mesh.size == 0 for dim, extent in zip(dims, leaf.shape, strict=True))
        return NamedSharding(mesh, P(*dims)) if fits else whole

    state, batch = target.example_state, target.example_batch
    split = jax.tree.map(lambda leaf: _largest(mesh, leaf), state)
    batch_split = target.family == "moe"
    return {
        "data parallel": ExpertPlan(step=target.step, state=everywhere(state, whole), batch=everywhere(batch, rows)),
        "fsdp": ExpertPlan(step=gathered, state=split, batch=everywhere(batch, rows)),
        "tensor parallel": ExpertPlan(
            step=target.step,
            state=jax.tree_util.tree_map_with_path(tensor, state),
            batch=everywhere(batch, rows if batch_split else whole),
        ),
    }


def _largest(mesh: Mesh, leaf: Any) -> NamedSharding:
    """Split on the largest dim that divides, whole where none does."""
    dims = [d for d in range(leaf.ndim) if leaf.shape[d] % mesh.size == 0]
    best = max(dims, key=lambda d: leaf.shape[d], default=None)
    return NamedSharding(mesh, P(*(AXIS if d == best else None for d in range(leaf.ndim))))

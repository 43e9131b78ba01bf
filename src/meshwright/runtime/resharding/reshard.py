"""Any tree of arrays onto other meshes and layouts, in one process or across many.

Stock `jax.device_put` refuses a move between processes unless both sides look alike, and inside one process may pull
the whole array through the host. Here all arrays of a tree are planned together by `meshwright.resharding`, near the
physical limit, and no device ever holds more of an array than its block, nor any host.

Plans and compiled programs are kept and used again for the next tree of the same shapes, dtypes and shardings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from ..._jax.jaxpr import is_traced
from ..._jax.random import is_key
from ...resharding import Move, Network, ReshardError, ReshardPlan, plan_reshard
from ..agree import exchange_texts
from ..pipeline.placing import check_not_donated, put
from ..pipeline.staged_array import StagedArray
from .layouts import layout_of, network_of
from .mover import Mover, most_bytes
from .words import item_bytes

# The most that one device sends another in one go, which is also what a buffer holds.
CHUNK_BYTES = 32 * 2**20

# How long a process waits for the others to say what they plan.
_AGREE_SECONDS = 300.0


def reshard(
    tree: Any,
    shardings: Any,
    *,
    donate: bool = False,
    dtype: Any = None,
    network: Network | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    tell: Callable[[int, int], None] | None = None,
) -> Any:
    """Move a tree of arrays to other shardings, on any meshes.

    In a run of many processes each process that has a device of any of the arrays, before or after, calls it, with the
    same tree (others may); that they agree is checked before a byte moves.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import SingleDeviceSharding
    >>> moved = reshard({"w": jnp.arange(4.0)}, SingleDeviceSharding(jax.devices()[0]), dtype=jnp.bfloat16)
    >>> moved["w"].dtype
    dtype(bfloat16)

    Args:
      tree: arrays of JAX or NumPy (these the same in every process), typed keys included.
      shardings: a sharding for each leaf, or for all leaves under a node of the tree.
      donate: whether the tree's buffers may be taken over; do not use it afterwards.
      dtype: that floating-point arrays are converted to when they have arrived; None to leave them.
      network: the machines, by device id; None for each process as one machine, all alike.
      chunk_bytes: the most that one device sends another in one go: bounds the buffers.
      tell: called after each round with how many are done, and how many there are.

    Returns:
      the tree, every leaf with its sharding.

    Raises:
      ReshardError: shardings that do not fit the tree or divide its arrays, deleted arrays, or processes that do not
        agree; nothing has moved then.
    """
    dtype = _checked(dtype, chunk_bytes)
    leaves, treedef = jax.tree.flatten(tree)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    targets = _targets(tree, shardings, names)
    found: list[Any] = [None] * len(leaves)
    moving = []
    for i, (leaf, target, name) in enumerate(zip(leaves, targets, names, strict=True)):
        check_not_donated(leaf, name)
        if isinstance(leaf, StagedArray):
            leaf = leaves[i] = _one_part(leaf)
        if not isinstance(leaf, jax.Array):
            found[i] = put(np.asarray(leaf), target)
        elif leaf.sharding.is_equivalent_to(target, leaf.ndim):
            found[i] = leaf if donate else _copied(leaf)
        else:
            moving.append(i)
    if moving:
        values = [_plain(leaves[i]) for i in moving]
        wanted = [_plain_sharding(leaves[i], targets[i]) for i in moving]
        parts = tuple(
            (names[i], v.shape, v.dtype, v.sharding, t) for i, v, t in zip(moving, values, wanted, strict=True)
        )
        mover = _mover(parts, network, chunk_bytes)
        _agree(mover.plan, parts)
        for i, value in zip(moving, mover(values, donate=donate, tell=tell), strict=True):
            found[i] = _like(leaves[i], value)
    if dtype is not None:
        found = [_cast(x, dtype) for x in found]
    return jax.tree.unflatten(treedef, found)


def reshard_plan(
    tree: Any, shardings: Any, *, network: Network | None = None, chunk_bytes: int = CHUNK_BYTES
) -> ReshardPlan:
    """The plan that `reshard` would follow, to be looked at: its seconds, lower bound, rounds and bytes.

    Args: as of `reshard`; of the tree's arrays only shapes, dtypes and shardings are looked at, so `ShapeDtypeStruct`s
      with a sharding do as well.

    Raises:
      ReshardError: shardings that do not fit the tree or divide its arrays.
    """
    leaves = jax.tree.leaves(tree)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    targets = _targets(tree, shardings, names)
    _checked(None, chunk_bytes)
    parts = []
    for name, leaf, target in zip(names, leaves, targets, strict=True):
        x = _one_part(leaf) if isinstance(leaf, StagedArray) else leaf
        if getattr(x, "sharding", None) is None:
            continue  # an array of the host, which every process has: nothing is sent
        shape, dtype = x.shape, x.dtype
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
            shape, dtype = words.shape, words.dtype
        parts.append((name, shape, dtype, x.sharding, target))
    return _planned(tuple(parts), network, chunk_bytes)


_Part = tuple[str, tuple[int, ...], Any, Sharding, Sharding]
"""Name, shape and dtype of an array, where it is, and where it is wanted."""


@lru_cache(maxsize=256)
def _planned(parts: tuple[_Part, ...], network: Network | None, chunk_bytes: int) -> ReshardPlan:
    moves = [
        Move(
            name=name, shape=tuple(shape), item_bytes=item_bytes(dtype), source=layout_of(source, tuple(shape)),
            destination=layout_of(target, tuple(shape)),
        )
        for name, shape, dtype, source, target in parts
    ]  # fmt: skip
    devices = {d for part in parts for sharding in part[3:] for d in sharding.device_set}
    return plan_reshard(network or network_of(devices), moves, most_transfer_bytes=most_bytes(devices, chunk_bytes))


@lru_cache(maxsize=256)
def _mover(parts: tuple[_Part, ...], network: Network | None, chunk_bytes: int) -> Mover:
    plan = _planned(parts, network, chunk_bytes)
    arrays = [jax.ShapeDtypeStruct(part[1], part[2]) for part in parts]
    return Mover(plan, arrays, [part[3] for part in parts], [part[4] for part in parts])


def _checked(dtype: Any, chunk_bytes: int) -> Any:
    """The dtype as NumPy's, before anything has moved."""
    if not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise ReshardError(
            refused="chunk_bytes", got=repr(chunk_bytes), needed="a whole number of bytes >= 1", where="chunk_bytes=",
            try_=f"chunk_bytes={CHUNK_BYTES}",
        )  # fmt: skip
    try:
        return None if dtype is None else np.dtype(dtype)
    except TypeError as error:
        raise ReshardError(
            refused="the dtype", got=repr(dtype), needed="one that NumPy or JAX knows", where="dtype=",
            try_="dtype=jax.numpy.bfloat16",
        ) from error  # fmt: skip


def _copied(x: jax.Array) -> jax.Array:
    """The same array in buffers of its own, block by block."""
    blocks = [jax.numpy.copy(shard.data) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks, dtype=x.dtype)


def _agree(plan: ReshardPlan, parts: Sequence[_Part]) -> None:
    """Refuse, before a byte moves, a plan that is not that of all processes that take part in it."""
    taking_part = sorted({d.process_index for part in parts for sharding in part[3:] for d in sharding.device_set})
    if len(taking_part) == 1 or jax.process_index() not in taking_part:
        return
    text = f"{plan.fingerprint} of {[(name, shape, str(dtype)) for name, shape, dtype, _, _ in parts]}"
    said = exchange_texts(text, among=taking_part, about="a reshard", timeout_seconds=_AGREE_SECONDS)
    for process, other in said.items():
        if other != text:
            raise ReshardError(
                refused="to reshard", got=f"the plan {other:.300} in process {process}",
                needed=f"one plan in all processes; here it is {text:.300}", where=f"process {jax.process_index()}",
                try_="the same tree, shardings, network and chunk_bytes in every process",
            )  # fmt: skip


def _targets(tree: Any, shardings: Any, names: Sequence[str]) -> list[Sharding]:
    """The sharding of every leaf."""
    try:
        spread = jax.tree.broadcast(shardings, tree, is_leaf=lambda x: isinstance(x, Sharding) or x is None)
    except (ValueError, TypeError) as error:
        raise _refusal(
            "the shardings",
            f"a tree that does not fit: {error}",
            "one for each leaf, or for a node above it",
            "shardings",
        ) from error
    leaves, found = jax.tree.leaves(tree), jax.tree.leaves(spread)
    if len(found) != len(leaves):
        raise _refusal("the shardings", "None for a leaf", "a jax.sharding.Sharding for each", "shardings")
    for leaf, sharding, name in zip(leaves, found, names, strict=True):
        if is_traced(leaf):
            raise _refusal("to reshard", "an array that jax.jit is tracing", "arrays: call it outside jax.jit", name)
        if not isinstance(sharding, Sharding):
            raise _refusal("a sharding", f"{type(sharding).__name__} {sharding!r:.60}", "a jax.sharding.Sharding", name)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise _refusal("a leaf", f"{type(leaf).__name__} {leaf!r:.60}", "an array", name)
        try:
            sharding.shard_shape(tuple(leaf.shape))
        except (ValueError, IndexError) as error:
            raise _refusal(
                "a sharding",
                f"{sharding} for shape {tuple(leaf.shape)}: {error}",
                "axes that divide the dims they split, at most one entry for each dim",
                name,
            ) from error
    return found


def _refusal(refused: str, got: str, needed: str, where: str) -> ReshardError:
    return ReshardError(
        refused=refused, got=got, needed=needed, where=where, try_="jax.sharding.NamedSharding(mesh, PartitionSpec())"
    )


def _one_part(leaf: StagedArray) -> Any:
    """An array that several stages hold, as one of them has it."""
    if leaf.rows is None:
        return next(iter(leaf.parts.values()))
    return np.asarray(leaf)


def _plain(x: Any) -> Any:
    """Typed keys as their words."""
    return jax.random.key_data(x) if is_key(jax.typeof(x)) else x


def _plain_sharding(x: Any, target: Sharding) -> Sharding:
    if not is_key(jax.typeof(x)) or not isinstance(target, NamedSharding):
        return target
    return NamedSharding(target.mesh, target.spec)


def _like(x: Any, moved: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(x)) if is_key(jax.typeof(x)) else moved


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Floating-point arrays in another dtype, block by block."""
    if not jax.dtypes.issubdtype(x.dtype, np.floating) or x.dtype == dtype:
        return x
    blocks = [shard.data.astype(dtype) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks, dtype=dtype)

"""Any tree of arrays onto other meshes and layouts, in one process or across many.

Stock `jax.device_put` refuses a move between processes unless both sides look alike, and inside one process may pull
the whole array through the host. Here all arrays of a tree are planned together by `meshwright.resharding`, near the
physical limit, and no device ever holds more of an array than its block, nor any host.

Plans and compiled programs are kept and used again for the next tree of the same shapes, dtypes and shardings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from ..._jax.buffers import located
from ..._jax.context import is_tracing, own_context
from ..._jax.jaxpr import is_traced
from ..._jax.random import is_key
from ...memory.transfers import CHUNK_BYTES
from ...resharding import Move, Network, ReshardError, ReshardPlan, plan_reshard
from ..agree import exchange_texts
from ..aliases import copied
from ..placing import put
from .layouts import layout_of, network_of
from .mover import Mover, most_bytes
from .words import item_bytes

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
      donate: whether the tree's buffers may be taken over; do not use it afterwards. An array that is at several places
        of the tree is copied.
      dtype: that floating-point arrays are converted to when they have arrived; None to leave them.
      network: the machines, by device id; None for each process as one machine, all alike.
      chunk_bytes: the most that one device sends another in one go: bounds the buffers.
      tell: called after each round with how many are done, and how many there are.

    Returns:
      the tree, every leaf with its sharding.

    Raises:
      ReshardError: shardings that do not fit the tree or divide its arrays, deleted arrays, or processes that do not
        agree; nothing has moved then, and nothing was taken over.
    """
    dtype = _checked(dtype, chunk_bytes, network)
    if tell is not None and not callable(tell):
        raise _refusal("tell", f"{tell!r:.60}", "a function of two numbers, or None", "tell=", "tell=print")
    if is_tracing():
        raise _refusal("to reshard", "a call while jax.jit is tracing", "arrays: call it outside jax.jit", "mw.reshard")
    leaves, treedef = jax.tree.flatten(tree)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    targets = _targets(tree, shardings, names)
    for leaf, name in zip(leaves, names, strict=True):
        _check_there(leaf, name)
    with own_context():
        found = _moved(leaves, targets, names, network, chunk_bytes, donate=donate, dtype=dtype, tell=tell)
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
    _checked(None, chunk_bytes, network)
    parts = []
    for name, x, target in zip(names, leaves, targets, strict=True):
        if getattr(x, "sharding", None) is None:
            if isinstance(x, jax.ShapeDtypeStruct):
                raise _refusal(
                    "a leaf", f"{x} without a sharding", "to know where it is", name,
                    "jax.ShapeDtypeStruct(shape, dtype, sharding=...)",
                )  # fmt: skip
            continue  # an array of the host, which every process has: nothing is sent
        shape, dtype = x.shape, x.dtype
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
            shape, dtype = words.shape, words.dtype
        parts.append((name, shape, dtype, x.sharding, target))
    return _planned(tuple(parts), network, chunk_bytes)


def _moved(
    leaves: Sequence[Any], targets: Sequence[Sharding], names: Sequence[str], network: Network | None,
    chunk_bytes: int, *, donate: bool, dtype: Any, tell: Callable[[int, int], None] | None,
) -> list[Any]:  # fmt: skip
    """The leaves in their places, once all processes have agreed."""
    ours = [isinstance(leaf, jax.Array) for leaf in leaves]
    in_place = [
        mine and x.sharding.is_equivalent_to(t, x.ndim) for mine, x, t in zip(ours, leaves, targets, strict=True)
    ]
    moving = [i for i, mine in enumerate(ours) if mine and not in_place[i]]
    values = [_plain(leaves[i]) for i in moving]
    wanted = [_plain_sharding(leaves[i], targets[i]) for i in moving]
    parts = tuple((names[i], v.shape, v.dtype, v.sharding, t) for i, v, t in zip(moving, values, wanted, strict=True))
    mover = _mover(parts, network, chunk_bytes) if moving else None
    plan = "nothing to move" if mover is None else mover.plan.fingerprint
    _agree(f"{plan}, chunk_bytes={chunk_bytes}, donate={bool(donate)}, dtype={dtype}", names, leaves, targets)
    free = _unshared(leaves) if donate else frozenset()
    found: list[Any] = [None] * len(leaves)
    for i, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        if in_place[i]:
            found[i] = leaf if i in free else copied(leaf)
        elif not ours[i]:
            found[i] = put(np.asarray(leaf), target)
    if mover is not None:
        donated = [at for at, i in enumerate(moving) if i in free]
        moved = mover(values, donated=donated, tell=tell)
        for i in reversed(moving):
            found[i] = _like(leaves[i], moved.pop())
    if dtype is not None:
        for i in range(len(found)):  # one by one: what was converted is let go before the next is
            found[i] = jax.block_until_ready(_cast(found[i], dtype))
    return found


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
    return Mover(plan, arrays, [part[3] for part in parts], [part[4] for part in parts], chunk_bytes=chunk_bytes)


def _checked(dtype: Any, chunk_bytes: int, network: Network | None) -> Any:
    """The dtype as NumPy's, before anything has moved."""
    if network is not None and not isinstance(network, Network):
        raise _refusal(
            "the network", f"{network!r:.60}", "a meshwright.resharding.Network, or None", "network=",
            "meshwright.resharding.uniform_network([(0, 1), (2, 3)], nic_rate=12.5e9)",
        )  # fmt: skip
    if not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise ReshardError(
            refused="chunk_bytes", got=repr(chunk_bytes), needed="a whole number of bytes >= 1", where="chunk_bytes=",
            try_=f"chunk_bytes={CHUNK_BYTES}",
        )  # fmt: skip
    if dtype is None:
        return None
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise _no_dtype(dtype) from error
    number = jax.dtypes.issubdtype(found, np.number) or found == np.bool_
    if not number or jax.dtypes.canonicalize_dtype(found) != found:
        raise _no_dtype(dtype)
    return found


def _no_dtype(dtype: Any) -> ReshardError:
    needed = "one that JAX has; of 64 bits only with jax_enable_x64"
    return _refusal("the dtype", repr(dtype), needed, "dtype=", "dtype=jax.numpy.bfloat16")


def _check_there(leaf: Any, name: str) -> None:
    """Refuse what is no array any more, or not yet.

    Raises:
      ReshardError: saying which leaf it is.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise _refusal("a leaf", f"{leaf}", "an array; a shape can be planned for", name, "meshwright.reshard_plan")
    if isinstance(leaf, jax.Array):
        _check_devices(leaf.sharding, name)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise _refusal(
            "a leaf", "an array that was donated", "one whose buffers are there", name,
            "what the step, or the reshard, that took it over returned",
        )  # fmt: skip


def _unshared(leaves: Sequence[Any]) -> frozenset[int]:
    """The leaves none of whose buffers are those of another leaf: they may be taken over."""
    owners: dict[Any, set[int]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            for owned in (id(leaf), *located(leaf)):
                owners.setdefault(owned, set()).add(i)
    return frozenset(range(len(leaves))).difference(*(those for those in owners.values() if len(those) > 1))


def _agree(plan: str, names: Sequence[str], leaves: Sequence[Any], targets: Sequence[Sharding]) -> None:
    """Refuse, before a byte moves, what is not the same in all processes that take part in it.

    Args:
      plan: of what moves, and what else has to be the same.
      names: of all leaves, what stays and arrays of the host among them.
      leaves: the arrays.
      targets: their shardings.
    """
    known = [x.sharding for x in leaves if isinstance(x, jax.Array)]
    taking_part = sorted({d.process_index for sharding in (*known, *targets) for d in sharding.device_set})
    if len(taking_part) < 2 or jax.process_index() not in taking_part:
        return
    whole = hashlib.blake2b(digest_size=16)
    for name, x, target in zip(names, leaves, targets, strict=True):
        whole.update(repr((name, tuple(x.shape), str(x.dtype), _described(target))).encode())
        # Of an array of the host all bytes, without a copy of them.
        content = _described(x.sharding).encode() if isinstance(x, jax.Array) else None
        whole.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data if content is None else content)
    each = [(name, tuple(x.shape), str(x.dtype)) for name, x in zip(names, leaves, strict=True)]
    text = f"{plan}, {whole.hexdigest()} of {each}"
    said = exchange_texts(text, among=taking_part, about="a reshard", timeout_seconds=_AGREE_SECONDS)
    for process, other in said.items():
        if other != text:
            raise ReshardError(
                refused="to reshard", got=f"the plan {other:.300} in process {process}",
                needed=f"one plan in all processes; here it is {text:.300}", where=f"process {jax.process_index()}",
                try_="the same tree, shardings, dtype, donate, network and chunk_bytes in every process",
            )  # fmt: skip


def _described(sharding: Sharding) -> str:
    """The same text in every process for the same sharding of the same devices."""
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        # A spec may be written in several ways: what a process computed itself comes out without its last Nones.
        dims = [axes if isinstance(axes, tuple) else () if axes is None else (axes,) for axes in sharding.spec]
        while dims and dims[-1] == ():
            dims.pop()
        return repr((mesh.axis_names, mesh.devices.shape, [d.id for d in mesh.devices.flat], dims))
    return repr((type(sharding).__name__, sorted(d.id for d in sharding.device_set)))


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
        _check_devices(sharding, name)
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


def _check_devices(sharding: Sharding, name: str) -> None:
    """Refuse shardings of no devices, and of memory that is not the devices' own.

    Raises:
      ReshardError: saying whose it is.
    """
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        raise _refusal("a sharding", f"{sharding}", "one of a mesh of devices", name)
    own = next(iter(sharding.device_set)).default_memory().kind
    if sharding.memory_kind not in (None, own):
        raise _refusal(
            "a sharding", f"memory of the kind {sharding.memory_kind}", f"{own}, the devices' own", name,
            f"sharding.with_memory_kind({own!r}), and jax.device_put from there",
        )  # fmt: skip


def _refusal(
    refused: str, got: str, needed: str, where: str, try_: str = "jax.sharding.NamedSharding(mesh, PartitionSpec())"
) -> ReshardError:
    return ReshardError(refused=refused, got=got, needed=needed, where=where or "the array", try_=try_)


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

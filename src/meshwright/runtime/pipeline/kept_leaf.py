"""A leaf of the step's arguments as one `jax.Array`, and as the array that each stage keeps of it.

A state goes from step to step as a tree of plain arrays, one a leaf, whatever the stages keep: a parameter of one
stage, a step count that all stages read, a tied embedding, a stacked parameter of which each stage has some rows. How
the one array lies on the devices depends on how the stages keep theirs:

* *joint* where the stages' blocks are together the blocks of a `NamedSharding` over the devices of all of them. The
  leaf and the stages' arrays are the same buffers, nothing is copied. So is what one stage keeps alone, what is
  replicated everywhere (counts, keys, learning rates), what equal meshes split alike, and equal numbers of rows on
  equal meshes.
* *owned* where several stages keep the same numbers in unlike layouts. The leaf is the first stage's array; the copies
  of the others are the step's own. They are used when the leaf that comes in is the array that went out, and made again
  when it is another.
* *relaid* where rows lie in unlike parts. JAX has no arrays of unequal blocks: rows move to the stages and back in
  every step, as few as the layouts allow.

Whether a leaf is the one that went out is a question of the identity of the array object. The script answers it, in the
same way in all processes that run it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ...lowering.pipeline.rows import Rows
from ..placing import ghost
from ..spread import spread_sharding
from .executor import Executor


class KeptLeaf(Protocol):
    """How a leaf that stages keep is one array.

    Attributes:
      sharding: of the array.
      shardings: for each stage that keeps it, of the stage's array.
    """

    sharding: NamedSharding
    shardings: dict[int, NamedSharding]

    def parts(self, leaf: jax.Array, *, donated: bool) -> dict[int, jax.Array]:
        """For each stage its array, of a leaf that lies as `sharding` says.

        Args:
          leaf: the array.
          donated: whether the step takes over the buffers.
        """
        ...

    def whole(self, parts: Mapping[int, jax.Array]) -> jax.Array:
        """The leaf.

        Args:
          parts: for each stage its array; without shards for a stage of other processes.
        """
        ...


def kept_leaf(
    shape: Sequence[int], dtype: Any, shardings: Mapping[int, NamedSharding], rows: Rows | None, executor: Executor,
    devices: Sequence[jax.Device], name: str,
) -> KeptLeaf:  # fmt: skip
    """How a leaf is one array.

    Args:
      shape: of the leaf.
      dtype: of the leaf.
      shardings: for each stage that keeps it, how its array lies on its mesh.
      rows: which rows each stage has; None if all keep the whole leaf.
      executor: of the step, which moves arrays between meshes.
      devices: of the plan, in its order.
      name: path of the leaf.
    """
    joint = joint_sharding(shape, shardings, rows)
    if joint is not None:
        return Joint(shape, dtype, shardings, rows, joint)
    if rows is None:
        return Owned(shardings, executor, name)
    return Relaid(shape, dtype, shardings, rows, executor, devices, name)


def joint_sharding(
    shape: Sequence[int], shardings: Mapping[int, NamedSharding], rows: Rows | None = None
) -> NamedSharding | None:
    """The sharding over the devices of all stages whose blocks are those that the stages have; None if there is none.

    Args:
      shape: of the whole array.
      shardings: of each stage's array.
      rows: which rows each stage has; None if all have the whole array.
    """
    stages = sorted(shardings, key=lambda n: (rows.part(n) if rows else (), n))
    first = shardings[stages[0]]
    meshes = [shardings[n].mesh for n in stages]
    together = _unique(device for mesh in meshes for device in mesh.devices.flat)
    if rows is None and len(stages) == 1:
        return first
    if rows is None and all(shardings[n].is_fully_replicated for n in stages):
        mesh = _mesh(np.array(together, dtype=object), ("device",))
        return NamedSharding(mesh, PartitionSpec(), memory_kind=first.memory_kind)
    apart = len(together) == sum(mesh.size for mesh in meshes)
    if not apart or not all(_alike(shardings[n], first, shape) for n in stages):
        return None
    axis = next(name for name in ("stage", "stages", "stage_") if name not in first.mesh.axis_names)
    mesh = _mesh(np.stack([mesh.devices for mesh in meshes]), (axis, *first.mesh.axis_names))
    dims = _dims(first, shape)
    if rows is not None:
        bounds = [rows.part(n) for n in stages]
        share = bounds[0][1] - bounds[0][0]
        if bounds != [(i * share, (i + 1) * share) for i in range(len(stages))] or share * len(stages) != rows.total:
            return None
        dims[rows.dim] = (axis, *dims[rows.dim])
    return NamedSharding(mesh, PartitionSpec(*dims), memory_kind=first.memory_kind)


class Joint:
    """A leaf whose buffers are those of the stages' arrays.

    Args:
      shape: of the leaf.
      dtype: of the leaf.
      shardings: of the stages' arrays.
      rows: which rows each stage has, or None.
      sharding: of the leaf.
    """

    def __init__(
        self, shape: Sequence[int], dtype: Any, shardings: Mapping[int, NamedSharding], rows: Rows | None,
        sharding: NamedSharding,
    ) -> None:  # fmt: skip
        self.sharding = sharding
        self._shape, self._dtype, self.shardings = tuple(shape), dtype, dict(sorted(shardings.items()))
        self._shapes = {n: self._shape if rows is None else rows.shape(shape, n) for n in shardings}
        # Stages on the same devices take over a buffer each: the first has that of the leaf.
        self._copies = {
            n for n in shardings for m in shardings if m < n and shardings[n].device_set & shardings[m].device_set
        }

    def parts(self, leaf: jax.Array, *, donated: bool) -> dict[int, jax.Array]:
        """See `KeptLeaf`."""
        if len(self.shardings) == 1:
            return dict.fromkeys(self.shardings, leaf)
        blocks = {shard.device: shard.data for shard in leaf.addressable_shards}
        found = {}
        for number, sharding in self.shardings.items():
            mine = [blocks[device] for device in sharding.mesh.devices.flat if device in blocks]
            part = jax.make_array_from_single_device_arrays(self._shapes[number], sharding, mine, dtype=self._dtype)
            found[number] = jnp.copy(part) if mine and donated and number in self._copies else part
        return found

    def whole(self, parts: Mapping[int, jax.Array]) -> jax.Array:
        """See `KeptLeaf`."""
        if len(self.shardings) == 1:
            return next(iter(parts.values()))
        blocks: dict[Any, jax.Array] = {}
        for number in sorted(parts):
            for shard in parts[number].addressable_shards:
                blocks.setdefault(shard.device, shard.data)
        mine = [blocks[device] for device in self.sharding.mesh.devices.flat if device in blocks]
        return jax.make_array_from_single_device_arrays(self._shape, self.sharding, mine, dtype=self._dtype)


class Owned:
    """A leaf that is the first stage's array; the copies of other stages are the step's own.

    Args:
      shardings: of the stages' arrays.
      executor: of the step, which moves arrays between meshes.
      name: path of the leaf.

    Attributes:
      copies: by the identity of the leaf that went out, the copies of the stages that do not own it.
    """

    def __init__(self, shardings: Mapping[int, NamedSharding], executor: Executor, name: str) -> None:
        self._owner = min(shardings)
        self.sharding = shardings[self._owner]
        self.shardings = dict(sorted(shardings.items()))
        self._others = [n for n in self.shardings if n != self._owner]
        self._executor, self._name = executor, name
        # The leaf is not kept alive: its copies go when it goes.
        self.copies: dict[int, tuple[weakref.ref[Any], dict[int, jax.Array]]] = {}

    def parts(self, leaf: jax.Array, *, donated: bool) -> dict[int, jax.Array]:
        """See `KeptLeaf`."""
        went_out, copies = self.copies.get(id(leaf), (None, {}))
        if went_out is None or went_out() is not leaf:
            copies = {n: self._copy(leaf, n) for n in self._others}
            if not donated:
                self._remember(leaf, copies)
        elif donated:
            del self.copies[id(leaf)]
        return {self._owner: leaf, **copies}

    def whole(self, parts: Mapping[int, jax.Array]) -> jax.Array:
        """See `KeptLeaf`."""
        leaf = parts[self._owner]
        self._remember(leaf, {n: parts[n] for n in self._others})
        return leaf

    def _remember(self, leaf: jax.Array, copies: dict[int, jax.Array]) -> None:
        place, all_copies = id(leaf), self.copies

        def forget(gone: weakref.ref[Any]) -> None:
            if place in all_copies and all_copies[place][0] is gone:
                del all_copies[place]

        all_copies[place] = (weakref.ref(leaf, forget), copies)

    def _copy(self, leaf: jax.Array, number: int) -> jax.Array:
        target = self.shardings[number]
        if not (target.addressable_devices or self.sharding.addressable_devices):
            return ghost(leaf.shape, leaf.dtype, target)
        (copy,) = self._executor.move([leaf], [target], lambda: f"the copy of {self._name} for stage {number + 1}")
        shared = target.device_set & self.sharding.device_set
        return jnp.copy(copy) if shared and target.addressable_devices else copy  # a buffer of its own


class Relaid:
    """A leaf of rows in unlike parts, moved to the stages and back in every step.

    Between steps the rows lie in equal parts where the stages lay theirs out alike, so that only rows in excess move;
    else each is split evenly over the plan's devices.

    Args:
      shape: of the leaf.
      dtype: of the leaf.
      shardings: of the stages' rows.
      rows: which each has.
      executor: of the step, which moves arrays between meshes.
      devices: of the plan.
      name: path of the leaf.
    """

    def __init__(
        self, shape: Sequence[int], dtype: Any, shardings: Mapping[int, NamedSharding], rows: Rows, executor: Executor,
        devices: Sequence[jax.Device], name: str,
    ) -> None:  # fmt: skip
        self.shardings = dict(sorted(shardings.items()))
        self._rows, self._executor, self._name = rows, executor, name
        ranks = list({s.mesh: s for s in (shardings[n] for n in sorted(shardings, key=rows.part))}.values())
        share = rows.total // len(ranks)
        even = Rows(rows.dim, rows.total, tuple((r, r * share, (r + 1) * share) for r in range(len(ranks))))
        at_home = dict(enumerate(ranks))
        alike = all(_alike(s, ranks[0], shape) for s in shardings.values())
        sharding = joint_sharding(shape, at_home, even) if alike and share * len(ranks) == rows.total else None
        if sharding is None:
            even = Rows(rows.dim, rows.total, ((0, 0, rows.total),))
            sharding = spread_sharding(shape, devices, whole=(rows.dim,))
            at_home = {0: sharding}
        self._home = Joint(shape, dtype, at_home, even, sharding)
        self._even, self.sharding = even, sharding

    def parts(self, leaf: jax.Array, *, donated: bool) -> dict[int, jax.Array]:
        """See `KeptLeaf`."""
        at_home = self._home.parts(leaf, donated=donated)
        found = self._moved(at_home, self._even, self._rows, self.shardings)
        for part in at_home.values() if donated else ():
            if all(part is not other for other in found.values()):
                part.delete()
        return found

    def whole(self, parts: Mapping[int, jax.Array]) -> jax.Array:
        """See `KeptLeaf`."""
        return self._home.whole(self._moved(parts, self._rows, self._even, self._home.shardings))

    def _moved(
        self, parts: Mapping[int, jax.Array], have: Rows, want: Rows, shardings: Mapping[int, NamedSharding]
    ) -> dict[int, jax.Array]:
        """Rows in other parts, each where a sharding says."""
        found: dict[int, jax.Array] = {}
        for target, first, last in want.parts:
            pieces = []
            for source, start, stop in sorted(have.parts, key=lambda part: part[1]):
                low, high = max(first, start), min(last, stop)
                if low < high:
                    piece = self._cut(parts[source], low - start, high - start, stop - start)
                    pieces.append(self._piece(piece, shardings[target], low, high))
            found[target] = pieces[0] if len(pieces) == 1 else self._joined(pieces, shardings[target])
        return found

    def _cut(self, x: jax.Array, first: int, last: int, count: int) -> jax.Array:
        """Some of the rows of an array that has `count`."""
        if last - first == count:
            return x
        program = _cut_program(x.sharding, self._rows.dim, count, first, last)
        return self._executor.call(program, [x], lambda: f"rows {first} to {last - 1} of {self._name}")

    def _piece(self, piece: jax.Array, target: NamedSharding, first: int, last: int) -> jax.Array:
        source = piece.sharding
        if source.is_equivalent_to(target, piece.ndim):
            return piece
        if not (source.addressable_devices or target.addressable_devices):
            return ghost(piece.shape, piece.dtype, target)
        (moved,) = self._executor.move([piece], [target], lambda: f"rows {first} to {last - 1} of {self._name}")
        return moved

    def _joined(self, pieces: list[jax.Array], sharding: NamedSharding) -> jax.Array:
        program = _join_program(sharding, self._rows.dim)
        return self._executor.call(program, pieces, lambda: f"all rows of {self._name}")


@lru_cache(maxsize=1024)
def _cut_program(sharding: Any, dim: int, count: int, first: int, last: int) -> Any:
    some = Rows(dim, count, ((0, first, last),))
    return jax.jit(lambda x: some.take(x, 0), out_shardings=sharding)


@lru_cache(maxsize=1024)
def _join_program(sharding: NamedSharding, dim: int) -> Any:
    return jax.jit(lambda *pieces: jnp.concatenate(pieces, axis=dim), out_shardings=sharding)


def _alike(one: NamedSharding, other: NamedSharding, shape: Sequence[int]) -> bool:
    """Whether two meshes of one shape split an array alike."""
    a, b = one.mesh, other.mesh
    same = a.axis_names == b.axis_names and a.devices.shape == b.devices.shape
    return same and _dims(one, shape) == _dims(other, shape) and one.memory_kind == other.memory_kind


def _dims(sharding: NamedSharding, shape: Sequence[int]) -> list[tuple[str, ...]]:
    """For each dim the axes that split it."""
    dims = [axes if isinstance(axes, tuple) else () if axes is None else (axes,) for axes in sharding.spec]
    return [*dims, *[()] * (len(shape) - len(dims))]


def _unique(devices: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(devices))


def _mesh(devices: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))

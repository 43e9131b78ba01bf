"""What the command line calls a TARGET: a reference model by name, or a function in a file, as a step and arguments.

A file's function returns `(step, example_args)`. Arguments that it gives as `ShapeDtypeStruct`s are planned as they
are, and filled with numbers that keep a step finite when it has to run: whole numbers in {0, 1}, other numbers not
negative (an optimizer's second moment has to be), those of the first argument (the state) small enough that products
of weights neither grow nor vanish.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from . import zoo
from ._jax.attention_kernels import has_kernel
from ._jax.jitted import bound_to_static
from .cluster.errors import near_names
from .cluster.load import load_cluster
from .errors import PlanError


class TargetError(PlanError):
    """A TARGET that is not found, or that is not a step with example arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A step with arguments to plan by and to run on.

    Args:
      name: as the user wrote it.
      step: the step.
      example_args: its arguments, arrays or `ShapeDtypeStruct`s.
      make_args: its arguments as arrays, the same on every call, free to be donated.
    """

    name: str
    step: Callable[..., Any]
    example_args: tuple[Any, ...]
    make_args: Callable[[], tuple[Any, ...]]


def load_target(
    text: str, *, global_batch: int | None = None, sequence: int | None = None, attention: str | None = "plain",
    cluster: str | None = None,
) -> LoadedTarget:  # fmt: skip
    """The target that `text` names.

    Args:
      text: a name of `zoo.names()`, or `file.py:function`. The function is called without arguments, or with
        `global_batch=` if that is given, and returns `(step, example_args)`.
      global_batch: samples a step; None for the target's own.
      sequence: of a reference model, the positions of a sample; None for its own.
      attention: of a reference model: "plain", its scores in memory, or "fused", by `meshwright.attention`. None for
        the second where the model can have it and all devices of `cluster` have a kernel for it.
      cluster: that the target is for, as `load_cluster` takes it; None for the local devices.

    Raises:
      TargetError: if there is no such model, file or function, or the function returns something else.
    """
    file, colon, function = text.rpartition(":")
    if colon and file.endswith(".py"):
        return _from_file(Path(file), function, text, global_batch)
    if text.endswith(".py"):
        raise TargetError(
            refused=f"the target {text!r}", got="a file without a function", needed="file.py:function", where="TARGET",
            try_=f"{text}:make, where make() returns (step, example_args)",
        )  # fmt: skip
    if text not in zoo.names():
        raise TargetError(
            refused=f"the target {text!r}", got="a name that no reference model has",
            needed="the name of a reference model, or file.py:function", where="TARGET",
            try_=near_names(text, zoo.names()),
        )  # fmt: skip
    try:
        kind = _fused_if_possible(text, cluster) if attention is None else _attention(attention)
        return zoo_target(zoo.build(text, global_batch=global_batch, sequence=sequence, attention=kind))
    except ValueError as error:
        raise TargetError(
            refused=f"the target {text!r}", got=str(error), needed="sizes and attention that this model has",
            where="--global-batch, --sequence, --attention", try_="leaving them out",
        ) from error  # fmt: skip


def _attention(attention: str) -> Any:
    """The attention of a reference model; None for its own."""
    if attention not in ("plain", "fused"):
        raise TargetError(
            refused="the attention", got=repr(attention), needed="plain or fused", where="--attention",
            try_="--attention fused",
        )  # fmt: skip
    return None if attention == "plain" else attention


def _fused_if_possible(name: str, cluster: str | None) -> Any:
    """The attention of a reference model for a cluster, by default."""
    settings = zoo.settings(name)
    if "attention" not in settings:
        return None
    devices = {host.device for host in load_cluster(cluster or "local").hosts}
    return "fused" if all(has_kernel(one.platform, one.kind, settings["dtype"]) for one in devices) else None


def zoo_target(target: zoo.Target) -> LoadedTarget:
    """A reference model, run on its own initial state and a random batch."""
    init, make_batch = jax.jit(target.init), jax.jit(target.make_batch)

    def make_args() -> tuple[Any, ...]:
        return init(jax.random.key(0)), make_batch(jax.random.key(1))

    example = (target.example_state, target.example_batch)
    return LoadedTarget(name=target.name, step=target.step, example_args=example, make_args=make_args)


def step_target(step: Callable[..., Any], example_args: Sequence[Any], *, name: str) -> LoadedTarget:
    """Any step; arguments that are arrays already are run on copies of them, abstract ones on made-up numbers.

    Args:
      step: a function of arrays.
      example_args: its arguments, pytrees of arrays or `ShapeDtypeStruct`s; static ones as they are.
      name: what to call it.
    """
    bound = bound_to_static(step, example_args)
    step, args = bound.step, bound.args

    def make_args() -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(args)
        num_state = len(jax.tree.leaves(args[0])) if args else 0
        keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
        made = [_filled(leaf, keys[position], position < num_state) for position, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, made)

    return LoadedTarget(name=name, step=step, example_args=args, make_args=make_args)


def _filled(leaf: Any, key: jax.Array, state: bool) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        # A copy: a state is donated to the step, and the user's own array must outlive it.
        return jnp.array(leaf, copy=True)
    shape, dtype = leaf.shape, leaf.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(key, shape) if shape else key
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jax.random.randint(key, shape, 0, 2).astype(dtype)
    fan_in = prod(shape[:-1]) if state and len(shape) > 1 else 1
    return (jax.random.uniform(key, shape) * 2.0 / max(fan_in, 1)).astype(dtype)


def _from_file(path: Path, function: str, text: str, global_batch: int | None) -> LoadedTarget:
    module = _module(path, text)
    make = getattr(module, function, None)
    if not callable(make):
        defined = sorted(
            name for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        )  # fmt: skip
        raise TargetError(
            refused=f"the target {text!r}", got=f"no function {function!r} in {path}",
            needed="a function that returns (step, example_args)", where="TARGET",
            try_=" or ".join(f"{path}:{name}" for name in defined) or "defining one",
        )  # fmt: skip
    if global_batch is not None and "global_batch" not in inspect.signature(make).parameters:
        raise TargetError(
            refused=f"global batch {global_batch}", got=f"{function}{inspect.signature(make)}",
            needed=f"{function}(global_batch=...)", where=str(path), try_="leaving --global-batch out",
        )  # fmt: skip
    try:
        made = make() if global_batch is None else make(global_batch=global_batch)
    except Exception as error:
        raise TargetError(
            refused=f"the target {text!r}", got=f"{type(error).__name__}: {error}",
            needed="a function that runs without arguments (but for global_batch=)", where=str(path),
            try_=f"calling {function}() by itself; MESHWRIGHT_DEBUG=1 shows the traceback",
        ) from error  # fmt: skip
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], (tuple, list))):
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise TargetError(
            refused=f"the target {text!r}", got=f"{got} from {function}()",
            needed="(step, example_args), a function and a tuple of its arguments", where=str(path),
            try_="return train_step, (state, batch)",
        )  # fmt: skip
    return step_target(made[0], made[1], name=text)


def _module(path: Path, text: str) -> ModuleType:
    if not path.is_file():
        raise TargetError(
            refused=f"the target {text!r}", got=f"no file {path}", needed="a Python file", where="TARGET",
            try_="a path from here, or the name of a reference model (`meshwright models`)",
        )  # fmt: skip
    name = f"meshwright_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    # It is a file that ends in .py, so there is a loader for it.
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As when a script runs: it may import its neighbours, and its dataclasses look their own module up by name.
    sys.modules[name] = module
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise TargetError(
            refused=f"the target {text!r}", got=f"{type(error).__name__}: {error}",
            needed="a file that can be imported", where=str(path),
            try_=f"running it by itself: python {path}; MESHWRIGHT_DEBUG=1 shows the traceback",
        ) from error  # fmt: skip
    finally:
        if folder in sys.path:  # wherever it is by now: the file may have put others before it, which stay
            sys.path.remove(folder)
    return module

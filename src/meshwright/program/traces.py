"""A step with a memory of its traces, for whoever plans it in several ways."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from .inference import trace_inference
from .layers import DEFAULT_LAYERS
from .padded_dims import PaddedDim
from .reduction import ReductionWarning
from .staged import StagedProgram, staged_program
from .trace import Program, abstract, trace_program
from .traced_step import TracedStep, trace_step


class Traces:
    """A step, traced at most once for each way to cut its batch; called, it is the step.

    >>> import jax.numpy as jnp
    >>> traces = Traces(lambda x: 2 * x)
    >>> args = (jnp.ones(4),)
    >>> traces.program(args) is traces.program(args)
    True

    Args:
      step: of the user.
      donate: the arguments whose buffers it may take over, as of jax.jit's `donate_argnums`; None for those that the
        step says itself (`donation`).

    Attributes:
      seconds: that tracing and cutting into layers have taken.
      longest_seconds: of one trace.
    """

    def __init__(self, step: Callable[..., Any], donate: Any = None) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step = step
        self._donate = donate
        self.seconds = self.longest_seconds = 0.0
        self._whole: dict[Any, TracedStep] = {}
        self._programs: dict[Any, Program] = {}
        self._reductions: dict[Any, list[warnings.WarningMessage]] = {}
        self._staged: dict[tuple[int, tuple[int, ...], int], StagedProgram] = {}

    @property
    def name(self) -> str:
        """What messages call the step."""
        return getattr(self, "__name__", "the step")

    def __call__(self, *args: Any) -> Any:
        """The step itself."""
        return self._step(*args)

    def program(
        self, args: Sequence[Any], *, microbatches: int = 1, batch_axis: int = 0, reduction: str | None = None,
        padded: Sequence[PaddedDim] = (), warn: bool = True,
    ) -> Program:  # fmt: skip
        """As `trace_program`.

        Args:
          args: as there, like what follows.
          microbatches: as there.
          batch_axis: as there.
          reduction: as there.
          padded: as there.
          warn: whether to warn of results that microbatches add up otherwise than the whole batch would; not if a plan
            in so many is only looked for.
        """
        key = (*self._key(args), microbatches, batch_axis, reduction, tuple(padded))
        if key not in self._programs:
            with self._timed(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._programs[key] = trace_program(
                    self._step, args, microbatches=microbatches, batch_axis=batch_axis, reduction=reduction,
                    donate=self._donate, padded=padded, trace=self._traced,
                )  # fmt: skip
            self._reductions[key] = [one for one in caught if one.category is ReductionWarning]
            _give(one for one in caught if one.category is not ReductionWarning)
        if warn:
            _give(self._reductions[key])
        return self._programs[key]

    def traced(
        self, args: Sequence[Any], *, batch_axis: int, reduction: str | None, padded: Sequence[PaddedDim] = ()
    ) -> frozenset[int]:
        """The numbers of microbatches in which `program` has been asked for."""
        about = self._key(args)
        rest = (batch_axis, reduction, tuple(padded))
        return frozenset(key[-4] for key in self._programs if key[:-4] == about and key[-3:] == rest)

    def inference(self, args: Sequence[Any], *, microbatches: int = 1, batch_axis: int = 0) -> Program:
        """As `trace_inference`."""
        key = ("inference", *self._key(args), microbatches, batch_axis)
        if key not in self._programs:
            with self._timed():
                self._programs[key] = trace_inference(
                    self._step, args, microbatches=microbatches, batch_axis=batch_axis
                )
        return self._programs[key]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - begun
            self.seconds, self.longest_seconds = self.seconds + taken, max(self.longest_seconds, taken)

    def _traced(self, step: Callable[..., Any], shapes: tuple[Any, ...]) -> TracedStep:
        """As `trace_step`."""
        key = self._key(shapes)
        if key not in self._whole:
            self._whole[key] = trace_step(step, shapes)
        return self._whole[key]

    def _key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(abstract(tuple(args)))
        return tree, tuple((leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding) for leaf in leaves)

    def staged(
        self, program: Program, like: Sequence[StagedProgram] = (), layers: int = DEFAULT_LAYERS
    ) -> StagedProgram:
        """As `staged_program`, of programs that `program` and `staged` gave."""
        key = id(program), tuple(map(id, like)), layers
        if key not in self._staged:
            with self._timed():
                self._staged[key] = staged_program(program, like=like, layers=layers)
        return self._staged[key]


def _give(caught: Iterable[warnings.WarningMessage]) -> None:
    for one in caught:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def traces_of(step: Callable[..., Any], donate: Any = None) -> Traces:
    """The step with a memory, the one that it has already or a new one; `donate` as of `Traces`."""
    return step if isinstance(step, Traces) else Traces(step, donate)

"""What a verification found: predictions beside compiled programs, and results beside those of one device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .._jax.hlo_schedule import Kernels
from ..compilers.facts import NO_TRAFFIC, Sent, StageFacts
from ..plan import Plan
from .numbers import LeafError

# Arrays are counted, and by what the program asks for (`_jax.hlo_roles`): what is left are scalars, and what a compiler
# finds to be the same value twice.
BYTES_TOLERANCE = 0.01
FLOPS_TOLERANCE = 0.02
MEMORY_TOLERANCE = 0.15
# Predicted compute is 0.79 to 1.21 times a TPU compiler's cycles (docs/compilers.md, twelve programs); an efficiency
# that is a quarter off changes which plan is the fastest.
COMPUTE_TOLERANCE = 0.25

# So many wrong results are told one by one.
_MOST_WRONG = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the comparison.

    Args:
      name: what is compared.
      unit: "bytes", "flops", "seconds" or "" (a plain number).
      predicted: by the plan, or the most that is allowed.
      compiled: what the compiled program does, or its run did.
      tolerance: allowed relative deviation; None where `predicted` is an upper limit.
      passed: the verdict.
    """

    name: str
    unit: str
    predicted: float
    compiled: float
    tolerance: float | None
    passed: bool

    @property
    def ratio(self) -> float:
        """Predicted over compiled; 1 where both are 0, NaN where only the compiled is, and for an upper limit."""
        if self.tolerance is None or (self.predicted and not self.compiled):
            return math.nan
        return self.predicted / self.compiled if self.compiled else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Seconds of the search; all 0 for a plan that was given.

    Args:
      seconds: in all.
      trace_seconds: for tracing the step.
      solve_seconds: for the rest.
    """

    seconds: float = 0.0
    trace_seconds: float = 0.0
    solve_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a plan predicted and what became of it; all sizes per device and step.

    Args:
      target: name of the step.
      plan: that was run.
      planning: what finding it took.
      stages: each as predicted and as compiled.
      sent: between stages.
      steps: after how many steps results were compared.
      reference: what they were compared with.
      starts: from every start tried, the errors of all leaves of the results; none where nothing was run.
      step_seconds: median of the timed steps; NaN where nothing was run.
      compile_seconds: compiling and reading all programs.
    """

    target: str
    plan: Plan
    planning: Planned
    stages: tuple[StageFacts, ...]
    sent: tuple[Sent, ...]
    steps: int
    reference: str
    starts: tuple[tuple[LeafError, ...], ...]
    step_seconds: float
    compile_seconds: float

    @property
    def errors(self) -> tuple[LeafError, ...]:
        """For each leaf its error from one start: the median one, by what it has over what is allowed."""
        return tuple(
            sorted(tried, key=lambda error: error.excess)[len(tried) // 2] for tried in zip(*self.starts, strict=True)
        )

    @property
    def judged(self) -> tuple[LeafError, ...]:
        """The leaves that can be judged, the worst first."""
        return tuple(sorted((one for one in self.errors if one.is_judged), key=lambda one: -one.excess))

    @property
    def not_judged(self) -> tuple[LeafError, ...]:
        """The leaves that rounding alone changes as much as an error would, or that hold no number."""
        return tuple(one for one in self.errors if not one.is_judged)

    @property
    def wrong(self) -> tuple[LeafError, ...]:
        """The leaves that are further off than is allowed, the worst first."""
        return tuple(sorted((one for one in self.errors if not one.agrees), key=lambda one: -one.excess))

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every comparison with its verdict."""
        return (*self._of_stages(), *self._of_transfers(), *self._of_results())

    @property
    def passed(self) -> bool:
        """Whether every check is."""
        return all(check.passed for check in self.checks)

    def _of_stages(self) -> Iterator[Check]:
        for number, one in enumerate(self.stages):
            stage = f"stage {number + 1}: " if len(self.stages) > 1 else ""
            for kind in sorted({*one.predicted, *one.compiled}):
                predicted, compiled = one.predicted.get(kind, NO_TRAFFIC), one.compiled.get(kind, NO_TRAFFIC)
                yield _near(f"{stage}{kind} bytes", "bytes", predicted.bytes, compiled.bytes, BYTES_TOLERANCE)
            if one.refusals:
                yield _below(f"{stage}programs that the compiler refuses", "", 0.0, float(len(one.refusals)))
                continue
            # The compiler cannot look into kernels that are not its own, and counts nothing for them.
            kernels = one.schedule.kernels.get("opaque", Kernels()).count if one.schedule is not None else 0
            without = f", {kernels} kernel{'s' * (kernels > 1)} not counted" if kernels else ""
            predicted, compiled = one.flops
            if predicted is not None and kernels:
                yield _below(f"{stage}FLOPs{without}", "flops", predicted * (1 + FLOPS_TOLERANCE), compiled)
            elif predicted is not None:
                yield _near(f"{stage}FLOPs", "flops", predicted, compiled, FLOPS_TOLERANCE)
            predicted, compiled = one.peak_bytes
            yield _near(f"{stage}peak memory", "bytes", predicted, compiled, MEMORY_TOLERANCE)
            yield _below(f"{stage}peak memory within the limit", "bytes", one.limit_bytes, compiled)
            predicted, compiled = one.compute_seconds
            if not math.isnan(compiled) and kernels:
                yield _below(f"{stage}compute{without}", "seconds", predicted * (1 + COMPUTE_TOLERANCE), compiled)
            elif not math.isnan(compiled):
                yield _near(f"{stage}compute", "seconds", predicted, compiled, COMPUTE_TOLERANCE)

    def _of_transfers(self) -> Iterator[Check]:
        for one in self.sent:
            name = f"sent from stage {one.source + 1} to stage {one.target + 1}"
            yield _near(name, "bytes", one.predicted, one.moved, BYTES_TOLERANCE)

    def _of_results(self) -> Iterator[Check]:
        after = f"after {self.steps} step{'s' * (self.steps > 1)}"
        if self.errors and not self.judged:
            # What nothing can contradict is no agreement.
            yield Check(
                name=f"results {after} that can be judged", unit="", predicted=float(len(self.errors)), compiled=0.0,
                tolerance=None, passed=False,
            )  # fmt: skip
        for one in self.wrong[:_MOST_WRONG] or self.judged[:1]:
            scale = one.scale or 1.0
            yield _below(f"error {after}: {one.name}", "", one.allowed / scale, one.deviation / scale)


def _near(name: str, unit: str, predicted: float, compiled: float, tolerance: float) -> Check:
    passed = abs(predicted - compiled) <= tolerance * compiled
    return Check(name=name, unit=unit, predicted=predicted, compiled=compiled, tolerance=tolerance, passed=passed)


def _below(name: str, unit: str, limit: float, compiled: float) -> Check:
    return Check(name=name, unit=unit, predicted=limit, compiled=compiled, tolerance=None, passed=compiled <= limit)

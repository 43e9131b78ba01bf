"""Every scheme on one step and one cluster: its formulas evaluated, and beside them what the planner counts.

A scheme takes as many devices for its own axis as suit the program: tensor parallelism within a host, as many as divide
heads and widths; pipelines up to four ranks, such that one array crosses each boundary, as between layers. The others
share the batch. Where no size suits, the largest is taken that the preset allows; where it allows none, its refusal is
the reason why the scheme does not apply. Memory is no limit here: what does not fit is shown with what it would need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from .._jax.context import no_mesh
from ..cluster import Cluster, load_cluster
from ..errors import PlanError
from ..plan import Memory
from ..planning.checks import as_traced_for, request_of
from ..planning.microbatch_counts import microbatch_counts
from ..planning.programs import StepPrograms
from ..planning.request import PlanOptions
from ..planning.stages import stage_request
from ..presets import Preset
from ..program.batch import batch_extents
from ..program.trace import Program
from ..program.traces import Traces, traces_of
from ..search.pipelines.driver import StageSearch
from ..search.result import SearchResult
from ..simulate import simulate_plan
from .counted import Key, counted_ranks
from .formulas import KINDS, SCHEMES, Scheme, evaluate, sent
from .quantities import quantities, splits_evenly

# Pipelines have at most so many ranks unless the user says how many: as many as small models have layers for.
_RANKS = 4

# Microbatches for each rank of a pipeline, where the batch allows: with four of them GPipe's bubble is below a fifth
# (Huang et al. 2019, section 2).
_MICROBATCHES = 4

# Bytes of a device on which nothing is too large.
_ALL_BYTES = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A collective of a scheme, by its formula and counted.

    Args:
      key: which.
      formula: of the bytes that a device sends; "" for one that the scheme's formulas leave out.
      sent_bytes: by this formula.
      buffer_bytes: by formula and counted.
    """

    key: Key
    formula: str
    sent_bytes: float
    buffer_bytes: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysed:
    """A scheme on one step and one cluster. All numbers are of one device and one step.

    Args:
      scheme: with its formulas.
      reason: why it does not apply; "" where it does, and then what follows is there.
      preset: with all its sizes.
      symbols: the values of the formulas' symbols.
      moves: what a device sends, in the busiest rank.
      sent_bytes: by formula, and counted.
      held_bytes: by formula, each kind of memory.
      memory: counted, of the rank that holds most; its workspace is in no formula.
      limit_bytes: that a device may hold.
      bubble: by formula, and simulated with the stages as they are; None without stages.
    """

    scheme: Scheme
    reason: str = ""
    preset: str = ""
    symbols: Mapping[str, float]
    moves: tuple[Moved, ...] = ()
    sent_bytes: tuple[float, float] = (0.0, 0.0)
    held_bytes: Mapping[str, float]
    memory: Memory | None = None
    limit_bytes: float = inf
    bubble: tuple[float, float] | None = None

    @property
    def counted_held_bytes(self) -> float:
        """What formulas speak of: all but the workspace of the backward pass."""
        return self.memory.total - self.memory.workspace if self.memory is not None else 0.0

    @property
    def fits(self) -> bool:
        """Whether all that is counted fits a device, without rematerialisation."""
        return self.memory is not None and self.memory.total <= self.limit_bytes


@no_mesh()
def analyse(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    cluster: Cluster | str = "local",
    microbatches: int | None = None,
    stages: int | None = None,
    schemes: Sequence[Scheme] = SCHEMES,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Analysed, ...]:
    """Communication and memory of every scheme, by formula and counted.

    Args:
      step: as of `planning.plan_for`.
      args: the same.
      cluster: the same.
      microbatches: of every scheme that cuts the batch; None for one, and for pipelines up to four a rank.
      stages: ranks of pipelines; None for as many as suit, at most four.
      schemes: which.
      tell: called with a few words at each part of the work.

    Raises:
      PlanError: for a step without a marked loss function, one device, or numbers that are none.
    """
    where = load_cluster(cluster) if isinstance(cluster, str) else cluster
    if where.num_devices == 1:
        raise PlanError(
            refused="the schemes", got=f"1 device of cluster {where.name}", needed="at least 2: one shares nothing",
            where="cluster=", try_="--cluster p3.16xlarge:1",
        )  # fmt: skip
    for name, number in (("microbatches", microbatches), ("stages", stages)):
        least = 1 if name == "microbatches" else 2
        if number is not None and number < least:
            raise PlanError(
                refused=f"the number of {name}", got=str(number), needed=f"{least} or more", where=f"{name}=",
                try_=f"{name}={least}",
            )  # fmt: skip
    with as_traced_for(PlanOptions(cluster=where)):
        traces = traces_of(step)
        found = _Schemes(traces, args, where, microbatches, stages)
        program = found.program(1 if microbatches is None else microbatches)
        if not program.marked:
            raise PlanError(
                refused="the schemes", got=program.marks.got,
                needed="a step whose loss function is marked, so that its parameters are known", where=traces.name,
                try_=program.marks.advice,
            )  # fmt: skip
        answers = []
        for scheme in schemes:
            tell(scheme.title)
            answers.append(found.of(scheme))
    return tuple(answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A preset and its plan, whatever memory it needs.

    Args:
      preset: with all sizes.
      result: of the search.
    """

    preset: Preset
    result: SearchResult


class _Schemes:
    """The schemes of one step on one cluster; arguments as of `analyse`."""

    def __init__(
        self, traces: Traces, args: Sequence[Any], cluster: Cluster, microbatches: int | None, stages: int | None
    ) -> None:
        self._traces, self._args, self._cluster = traces, args, cluster
        hosts = (replace(host, device=replace(host.device, memory_bytes=_ALL_BYTES)) for host in cluster.hosts)
        self._roomy = replace(cluster, hosts=tuple(hosts))
        self._microbatches, self._ranks = microbatches, stages
        self._known: dict[int, dict[str, float]] = {}

    def program(self, microbatches: int) -> Program:
        """The step in so many microbatches."""
        return self._traces.program(self._args, microbatches=microbatches)

    def of(self, scheme: Scheme) -> Analysed:
        """A scheme in the largest size that suits the program, or why there is none."""
        refused: PlanError | None = None
        largest: _Planned | None = None
        for size in self._sizes(scheme):
            try:
                preset = scheme.preset(size).on(self._cluster.num_devices)
                planned = self._planned(preset, self._count(scheme, preset))
            except PlanError as error:
                refused = refused or error
                continue
            if _suits(planned):
                return self._analysed(scheme, planned)
            largest = largest or planned
        if largest is not None:
            return self._analysed(scheme, largest)
        reason = f"got {refused.got}; needed {refused.needed}" if refused is not None else "no number of devices"
        return Analysed(scheme=scheme, reason=reason, symbols={}, held_bytes={})

    def _planned(self, preset: Preset, microbatches: int) -> _Planned:
        """A preset with nothing computed again, were there memory for all of it.

        Raises:
          PlanError: if it does not suit the program or the cluster.
        """
        asked = request_of(
            self._traces, self._args, PlanOptions(
                cluster=self._roomy, preset=replace(preset, remat="none"),
                microbatches=microbatches,
            ), started=time.perf_counter(),
        )  # fmt: skip
        programs = StepPrograms(asked, microbatch_counts(asked))
        return _Planned(preset=preset, result=StageSearch(stage_request(asked, programs)).run())

    def _sizes(self, scheme: Scheme) -> list[int]:
        """Sizes of the own axis of a scheme, the largest first."""
        devices = self._cluster.num_devices
        most = devices
        if scheme.own == "d":
            return [devices]
        if scheme.own == "t":
            most = min(host.devices for host in self._cluster.hosts)
            most = most if most > 1 else devices
        if scheme.own == "p":
            if self._ranks is not None:
                return [self._ranks]
            most = min(devices, _RANKS)
        return [size for size in range(most, 1, -1) if devices % size == 0]

    def _count(self, scheme: Scheme, preset: Preset) -> int:
        """Microbatches of a scheme."""
        if scheme.one_microbatch or (self._microbatches is None and preset.stages == 1):
            return 1
        if self._microbatches is not None:
            return self._microbatches
        extents = batch_extents(self._args, 0)
        counts = [each * preset.stages for each in range(_MICROBATCHES, 0, -1)]
        whole = (n for n in counts if all(extent % (n * preset.blocks) == 0 for extent in extents))
        return next(whole, preset.stages)

    def _analysed(self, scheme: Scheme, planned: _Planned) -> Analysed:
        symbols, plan = self._symbols(planned), planned.result.plan
        ranks = counted_ranks(planned.result)
        busiest = max(ranks, key=lambda one: one.sent_bytes)
        moves = _moved(scheme, symbols, busiest.buffers)
        bubble = evaluate(scheme.bubble, symbols) if scheme.bubble else None
        return Analysed(
            scheme=scheme, preset=str(planned.preset), symbols=symbols, moves=moves,
            sent_bytes=(sum(one.sent_bytes for one in moves), busiest.sent_bytes),
            held_bytes={kind: evaluate(text, symbols) for kind, text in zip(KINDS, scheme.holds, strict=True)},
            memory=max((one.memory for one in ranks), key=lambda memory: memory.total),
            limit_bytes=min(host.device.usable_memory_bytes for host in self._cluster.hosts),
            bubble=None if bubble is None else (bubble, simulate_plan(plan).bubble_fraction),
        )  # fmt: skip

    def _symbols(self, planned: _Planned) -> dict[str, float]:
        preset, count = planned.preset, planned.result.plan.microbatches
        if count not in self._known:
            self._known[count] = quantities(self.program(count))
        handed: dict[int, float] = {}
        for one in planned.result.plan.transfers:
            handed[one.source] = handed.get(one.source, 0.0) + count * one.bytes
        return self._known[count] | {
            "X": max(handed.values(), default=0.0), "n": self._cluster.num_devices, "d": preset.size("batch"),
            "t": preset.size("tensor"), "e": preset.size("expert"), "p": preset.stages, "v": preset.chunks, "m": count,
        }  # fmt: skip


def _suits(planned: _Planned) -> bool:
    """Whether all products can be split, and each stage hands one array to the next one and nothing to others; single
    numbers do not count."""
    tensor, program, plan = planned.preset.size("tensor"), planned.result.program, planned.result.plan
    assert program is not None  # the stage search has it
    values = program.graph.values
    if tensor > 1 and not splits_evenly(program.graph, tensor):
        return False
    arrays = [one for one in plan.transfers if prod(values[one.value].shape) > 1]
    return len(arrays) == len(plan.stages) - 1 and all(one.target == one.source + 1 for one in arrays)


def _moved(scheme: Scheme, symbols: Mapping[str, float], counted: Mapping[Key, float]) -> tuple[Moved, ...]:
    """The collectives of formulas beside those that were counted; over one device nothing moves."""
    texts: dict[Key, list[str]] = {}
    buffers: dict[Key, float] = {}
    for kind, letters, when, buffer in scheme.moves:
        over = "".join(letter for letter in letters if symbols[letter] > 1)
        if over:
            key = kind, over, when
            texts.setdefault(key, []).append(buffer)
            buffers[key] = buffers.get(key, 0.0) + evaluate(buffer, symbols)
    found = []
    for key in (*texts, *sorted(counted.keys() - texts.keys())):
        text = sent(*key[:2], " + ".join(texts[key])) if key in texts else ""
        found.append(
            Moved(
                key=key, formula=text, sent_bytes=evaluate(text, symbols) if text else 0.0,
                buffer_bytes=(buffers.get(key, 0.0), counted.get(key, 0.0)),
            )
        )  # fmt: skip
    return tuple(found)

"""What a range of layers costs on a submesh: estimated from its layers, solved where it matters.

The stage search asks for every range of layers on every kind of submesh; hundreds of integer programs, of which a dozen
will matter. So a range is first *estimated*: each of its layers is solved by itself on each logical mesh, and the
seconds are added up. That leaves out only the conversions between layers that want different layouts, so that an
estimate is nearly always too low, by a few percent where layers are alike, and the search may trust it to rule a range
out. Ranges that a best plan uses are then *solved* whole, and the search repeated, until the best plan is made of
solved ranges only (`pipeline`). What is the same program, whatever its place, is solved once.

Memory: where the fastest layouts of all layers fit together, that is the estimate. Where they do not, each layer is
solved again with a price on memory, the same for all layers, and the estimate lies between the last price at which they
do not fit and the first at which they do: what one multiplier for the whole range would find (Everett, 1963). With and
without rematerialisation. Solved ranges are solved within the limit, for the microbatches in flight at their place.

Known limit: between equal layers that would rather leave their sums partial an estimate is too high, since every layer
alone has to finish them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..program.staged import StagedProgram
from .inter_op import Crossing, Option
from .intra_op import ParameterInfo
from .pins import Pins
from .stage_problem import StageSeconds
from .stage_solver import Place, SolvedStage, StageSolver
from .submeshes import Submesh, Submeshes

# Prices of memory, in units of the whole program's seconds over the limit.
_PRICES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)

# Below this share of the memory limit rematerialisation is not tried.
_EASY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """A layer solved by itself.

    Args:
      seconds: of it, and its bytes.
      boundary_seconds: of receiving, which it does not do inside a range.
      fixed_seconds: of the collective for its gradients, which it shares inside a range.
    """

    seconds: StageSeconds
    boundary_seconds: float
    fixed_seconds: float


class StageCosts:
    """Options for ranges of layers of one program on submeshes of one cluster.

    Args:
      program: in layers, at the size of one microbatch.
      parameters: by position in the program's `graph.parameters`.
      submeshes: of the cluster.
      pins: what the user has fixed.
      remat: "none", "layer", or None to choose for each stage.
      meshes: logical meshes to consider, as (names, sizes), on submeshes that have so many devices; none for all.
    """

    def __init__(
        self,
        program: StagedProgram,
        *,
        parameters: Sequence[ParameterInfo],
        submeshes: Submeshes,
        pins: Pins,
        remat: str | None,
        meshes: Sequence[tuple[tuple[str, ...], tuple[int, ...]]] = (),
    ) -> None:
        self.program = program
        self.submeshes = submeshes
        self.solver = StageSolver(program, parameters=parameters, submeshes=submeshes, pins=pins, meshes=meshes)
        # Ranges that alone take longer than this, in all microbatches, are left out.
        self.bound_seconds = float("inf")
        # While it is set, so are ranges whose fastest layouts do not fit.
        self.only_easy = False
        self._remat = remat
        self._limit = self.solver.limit_bytes
        self._layers: dict[tuple[int, int, int, str, int, int], _Alone | None] = {}
        self._weights: dict[tuple[int, int], float] = {}
        self._solved: dict[tuple[int, int], dict[int, tuple[Option, ...]]] = {}
        self._estimated: dict[tuple[int, int, int, int], tuple[Option, ...]] = {}

    # What the stage search asks

    def options(self, first: int, last: int, submesh: Submesh, in_flight: int) -> Sequence[Option]:
        """Ways to run the layers `first` to before `last`; solved ones if there are any, else estimates."""
        kind = self.solver.kind_of[submesh]
        if (self.solver.number(first, last), kind) in self._solved:
            # Solved once, it is solved for any place; where memory does not bind, by the same solution.
            return self.solve(first, last, submesh, in_flight)
        if self.only_easy:
            return self._estimate(first, last, kind, in_flight)
        key = (first, last, kind, in_flight)
        if key not in self._estimated:
            self._estimated[key] = self._estimate(first, last, kind, in_flight)
        return self._estimated[key]

    def is_solved(self, first: int, last: int, submesh: Submesh, in_flight: int) -> bool:
        """Whether the options of a range are those of solutions."""
        return in_flight in self._solved.get((self.solver.number(first, last), self.solver.kind_of[submesh]), {})

    def forget_estimates(self) -> None:
        """Estimate every range again, whatever it takes."""
        self.bound_seconds = float("inf")
        self._estimated.clear()

    def crossings(self) -> tuple[Crossing, ...]:
        """What layers share: values, those with the same producer and readers together, and parameters."""
        graph, cutter, layers = self.program.graph, self.program.cutter, self.program.layers
        layer_of = [number for number, (first, last) in enumerate(layers) for _ in range(first, last)]
        values: dict[tuple[int, ...], list[float]] = {}
        for value, equations in cutter.read_at.items():
            if not cutter.crosses(value):
                continue
            made = layer_of[cutter.made_at[value]]
            readers = sorted({layer_of[e] for e in equations} - {made})
            if readers:
                sums = values.setdefault((made, *readers), [0.0, 0.0])
                sums[0] += graph.values[value].bytes
                sums[1] += graph.values[value].bytes if graph.values[value].differentiated else 0.0
        held: dict[tuple[int, ...], float] = {}
        for position in graph.parameters:
            value = graph.inputs[position]
            equations = {e for e in cutter.read_at.get(value, ()) if e not in self.program.rows}
            holders = tuple(sorted({layer_of[e] for e in equations}))
            if len(holders) > 1:
                held[holders] = held.get(holders, 0.0) + graph.values[value].bytes
        return (
            *(Crossing(layers=k, forward_bytes=f, backward_bytes=b) for k, (f, b) in sorted(values.items())),
            *(Crossing(layers=k, once_bytes=size) for k, size in sorted(held.items())),
        )

    def least_bytes(self) -> float:
        """What no plan can be below on every device: parameters, gradients and optimizer state spread over all."""
        graph = self.program.graph
        total = sum(2 * graph.values[graph.inputs[p]].bytes for p in graph.parameters)
        total += sum(info.optimizer_bytes for info in self.solver.parameters)
        return total / self.submeshes.cluster.num_devices

    # Estimates

    def _estimate(self, first: int, last: int, kind: int, in_flight: int) -> tuple[Option, ...]:
        wishes = [remat for remat in ("none", "layer") if self._remat in (None, remat)]
        found = []
        for number in range(len(self.solver.meshes[kind])):
            for remat in wishes:
                option = self._estimate_on(first, last, kind, number, remat, in_flight)
                if option is not None:
                    found.append(option)
                    if option.constant_bytes + in_flight * option.in_flight_bytes <= _EASY * self._limit:
                        break  # memory does not bind: nothing to gain by computing anything twice
        return _best_of(found)

    def _estimate_on(self, first: int, last: int, kind: int, number: int, remat: str, in_flight: int) -> Option | None:
        """On one logical mesh: the least price of memory at which the layers fit together."""
        before: Option | None = None
        for price in range(len(_PRICES) + 1):
            option = self._sum(first, last, kind, number, remat, price, in_flight)
            if option is None:
                return None
            held = option.constant_bytes + in_flight * option.in_flight_bytes
            if held <= self._limit:
                if before is None:
                    return option if self._is_of_interest(option) else None
                over = before.constant_bytes + in_flight * before.in_flight_bytes
                return _between(before, option, (over - self._limit) / (over - held))
            if price == 0 and (
                self.only_easy
                or not self._is_of_interest(option)
                or self._least(first, last, kind, number, remat, in_flight) > self._limit
            ):
                return None
            before = option
        return None

    def _is_of_interest(self, option: Option) -> bool:
        return self.program.microbatches * option.seconds <= self.bound_seconds

    def _least(self, first: int, last: int, kind: int, number: int, remat: str, in_flight: int) -> float:
        """Bytes on a device that no layout of the layers is below."""
        total = 0.0
        for layer in range(first, last):
            place = Place(layer, layer + 1, kind, number)
            built = self.solver.problem(place, remat)
            built = built or self.solver.problem(place, "none")
            assert built is not None
            constant, kept, received = built[0].least_bytes()
            # Inside a range what a layer receives another one keeps, or nobody.
            total += constant + in_flight * (kept if layer == first else kept - received)
        return total

    def _sum(
        self, first: int, last: int, kind: int, number: int, remat: str, price: int, in_flight: int
    ) -> Option | None:
        """The layers of a range, each by itself at one price of memory."""
        # Neighbouring numbers in flight give neighbouring layouts; bytes are counted for the one that is asked for.
        about = 1
        while price > 0 and about < in_flight:
            about *= 4
        parts = []
        for layer in range(first, last):
            part = self._layer(layer, kind, number, remat, price, about)
            if part is None:
                return None
            parts.append(part)
        # Inside the range nothing is received, and gradients are summed by one collective.
        received = sum(part.boundary_seconds for part in parts[1:])
        fixed = [part.fixed_seconds for part in parts]
        once = sum(part.seconds.synchronise_seconds + part.seconds.update_seconds for part in parts)
        return Option(
            forward_seconds=max(0.0, sum(part.seconds.forward_seconds for part in parts) - received),
            backward_seconds=sum(part.seconds.backward_seconds for part in parts),
            once_seconds=max(0.0, once - sum(fixed) + max(fixed)),
            constant_bytes=sum(part.seconds.constant_bytes for part in parts),
            in_flight_bytes=sum(part.seconds.in_flight_bytes for part in parts),
            tag=number,
        )

    def _layer(self, layer: int, kind: int, number: int, remat: str, price: int, in_flight: int) -> _Alone | None:
        """A layer on one logical mesh at one price of memory (0 for none); None if no layout exists."""
        key = (self.solver.number(layer, layer + 1), kind, number, remat, price, in_flight)
        if key in self._layers:
            return self._layers[key]
        place = Place(layer, layer + 1, kind, number)
        if remat == "layer" and self.solver.problem(place, remat) is None:
            # It has nothing to compute again.
            self._layers[key] = self._layer(layer, kind, number, "none", price, in_flight)
            return self._layers[key]
        stage = None
        if price == 0:
            stage = self.solver.free(place, remat)
        elif self.solver.problem(place, remat) is not None:
            seconds = _PRICES[price - 1] * self._free_weight(kind, number) / self._limit
            stage = self.solver.chosen(place, remat, float("inf"), in_flight=in_flight, price=seconds)
        if stage is None:
            self._layers[key] = None
        else:
            boundary, fixed = stage.problem.boundary_seconds(stage.chosen)
            self._layers[key] = _Alone(seconds=stage.seconds, boundary_seconds=boundary, fixed_seconds=fixed)
        return self._layers[key]

    def _free_weight(self, kind: int, number: int) -> float:
        """Seconds a step of all layers on one logical mesh: with the limit, the scale of prices."""
        if (kind, number) not in self._weights:
            total = 0.0
            for layer in range(len(self.program.layers)):
                part = self._layer(layer, kind, number, "none", 0, 1)
                total += self._weight(part.seconds) if part is not None else 0.0
            self._weights[kind, number] = total
        return self._weights[kind, number]

    # Solutions

    def solve(self, first: int, last: int, submesh: Submesh, in_flight: int) -> Sequence[Option]:
        """Solve a range, and have `options` say so from now on."""
        kind = self.solver.kind_of[submesh]
        known = self._solved.setdefault((self.solver.number(first, last), kind), {})
        if in_flight in known:
            return known[in_flight]
        estimates: dict[int, float] = {}
        for option in self._estimate(first, last, kind, in_flight):
            estimates[option.tag] = min(estimates.get(option.tag, float("inf")), self._weight(option))
        found: list[Option] = []
        best = float("inf")
        for number in sorted(estimates, key=lambda n: (estimates[n], n)):
            if estimates[number] >= best:
                break
            for stage in self._solve_on(first, last, kind, number, in_flight):
                option = _option_of(stage)
                found.append(option)
                best = min(best, self._weight(option))
        known[in_flight] = _best_of(found)
        return known[in_flight]

    def _weight(self, one: Option | StageSeconds) -> float:
        """Seconds a step of a stage that sets the period: what its problem minimises."""
        if isinstance(one, Option):
            once = one.once_seconds
        else:
            once = one.synchronise_seconds + one.update_seconds
        return self.program.microbatches * (one.forward_seconds + one.backward_seconds) + once

    def _solve_on(self, first: int, last: int, kind: int, number: int, in_flight: int) -> list[SolvedStage]:
        """Solutions on one logical mesh, without and with rematerialisation as far as they can matter."""
        found = []
        place = Place(first, last, kind, number)
        empty = self._remat == "layer" and self.solver.problem(place, "layer") is None
        if self._remat != "layer" or empty:
            plain = self.solver.within(place, "none", in_flight)
            if plain is not None:
                found.append(plain)
        fits_easily = found and found[0].held_bytes(in_flight) <= _EASY * self._limit
        if self._remat == "layer" or (self._remat is None and not fits_easily):
            again = self.solver.within(place, "layer", in_flight)
            if again is not None:
                found.append(again)
        return found


def _between(slow: Option, fits: Option, share: float) -> Option:
    """What lies `share` of the way from one option to the next."""
    mixed = {
        name: (1 - share) * getattr(slow, name) + share * getattr(fits, name)
        for name in ("forward_seconds", "backward_seconds", "once_seconds", "constant_bytes", "in_flight_bytes")
    }
    return Option(**mixed, tag=fits.tag)


def _option_of(stage: SolvedStage) -> Option:
    seconds = stage.seconds
    return Option(
        forward_seconds=seconds.forward_seconds,
        backward_seconds=seconds.backward_seconds,
        once_seconds=seconds.synchronise_seconds + seconds.update_seconds,
        constant_bytes=seconds.constant_bytes,
        in_flight_bytes=seconds.in_flight_bytes,
        tag=stage,
    )


def _best_of(options: Sequence[Option]) -> tuple[Option, ...]:
    """Those that no other is at least as good as in everything; the first of equals."""
    kept: list[Option] = []
    for option in sorted(options, key=_criteria):
        if not any(all(a <= b for a, b in zip(_criteria(other), _criteria(option), strict=True)) for other in kept):
            kept.append(option)
    return tuple(kept)


def _criteria(option: Option) -> tuple[float, ...]:
    return (
        option.seconds, option.forward_seconds, option.backward_seconds, option.once_seconds, option.constant_bytes,
        option.in_flight_bytes,
    )  # fmt: skip

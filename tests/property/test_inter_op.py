"""The stage search against brute force: every plan of small random problems, priced from the definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf, isfinite
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, sampled_from, tuples

from meshwright.schedule import Edge, Schedule, adaptive_warm_up, make_schedule
from meshwright.search.best_known import bounds
from meshwright.search.inter.dynamic_program import solve_inter_op
from meshwright.search.inter.problem import ORDERS, Crossing, InterOpProblem, Option, Order, best_of, loose_ends
from meshwright.search.inter.submeshes import Submesh
from meshwright.search.pipelines.timing import StagedTiming, best_schedule
from meshwright.simulate import EdgeTiming, StageTiming, Timing, step_seconds

Plan = list[tuple[int, int, Submesh, Option]]


def random_problem(seed: int, order: Order) -> InterOpProblem:
    """At most 5 layers on at most 5 devices, with skips, shared parameters, unlike submeshes and memory that binds."""
    generator = np.random.default_rng([seed, ORDERS.index(order)])
    layers, devices = int(generator.integers(1, 6)), int(generator.integers(1, 6))
    submeshes = [
        Submesh(a, b)
        for a in range(devices)
        for b in range(a + 1, devices + 1)
        if generator.random() < 0.8 or b - a == 1
    ]
    table: dict[Any, list[Option]] = {}
    slow = generator.random((devices + 1,)) + 0.5
    for first, last in combinations(range(layers + 1), 2):
        for submesh in submeshes:
            table[first, last, submesh] = [
                Option(
                    forward_seconds=float(generator.random() * (last - first) * slow[submesh.first] / submesh.size),
                    backward_seconds=(backward := float(generator.random() * 2 * (last - first) / submesh.size)),
                    weight_seconds=backward * float(generator.random()) if order == "zero_bubble" else 0.0,
                    per_step_seconds=float(generator.random() * generator.choice([0.0, 1.0, 4.0])),
                    constant_bytes=float(generator.integers(0, 6) * (last - first)),
                    in_flight_bytes=float(generator.integers(0, 4)),
                )
                for _ in range(int(generator.integers(0, 3) if generator.random() < 0.2 else generator.integers(1, 3)))
            ]
    crossings = []
    for made in range(layers - 1):
        if generator.random() < 0.9:
            crossings.append(_value(generator, (made, made + 1)))
    for _ in range(int(generator.integers(0, 3))):
        touched = tuple(
            sorted(generator.choice(layers, size=min(layers, int(generator.integers(2, 4))), replace=False))
        )
        if len(touched) > 1:
            if generator.random() < 0.5:
                crossings.append(_value(generator, touched))
            else:
                crossings.append(Crossing(layers=tuple(map(int, touched)), once_bytes=float(generator.random())))
    rates = generator.random((devices + 1, devices + 1)) + 0.5
    limit = float(generator.choice([inf, 12.0, 24.0]))
    return InterOpProblem(
        layers=layers,
        devices=devices,
        loose=loose_ends(crossings, layers),
        submeshes=submeshes,
        options=lambda first, last, submesh, _: table[first, last, submesh],
        crossings=crossings,
        transfer_seconds=lambda a, b, size: 0.05 + size * float(rates[a.first, b.stop]) / min(a.size, b.size),
        microbatches=int(generator.integers(1, 9)),
        # A device's memory depends on where it is.
        limit_bytes=lambda submesh, last: limit * (0.9 if last else 1.0) * (1.0 if submesh.first % 2 else 0.8),
        order=order,
        num_stages=None if generator.random() < 0.8 and order != "zero_bubble" else int(generator.integers(1, 4)),
    )


def _value(generator: np.random.Generator, layers: tuple[Any, ...]) -> Crossing:
    size = float(generator.random())
    back = size if generator.random() < 0.8 else 0.0
    return Crossing(layers=tuple(map(int, layers)), forward_bytes=size, backward_bytes=back)


def all_plans(problem: InterOpProblem) -> Iterator[Plan]:
    for count in range(1, min(problem.layers, problem.devices) + 1):
        if problem.num_stages not in (None, count):
            continue
        for layer_cuts in combinations(range(1, problem.layers), count - 1):
            ranges = list(zip((0, *layer_cuts), (*layer_cuts, problem.layers), strict=True))
            for device_cuts in combinations(range(1, problem.devices), count - 1):
                places = [
                    Submesh(a, b) for a, b in zip((0, *device_cuts), (*device_cuts, problem.devices), strict=True)
                ]
                if not all(place in problem.submeshes for place in places):
                    continue
                lists = [problem.options(*r, p, 1) for r, p in zip(ranges, places, strict=True)]
                for options in product(*lists):
                    yield [(*r, p, o) for r, p, o in zip(ranges, places, options, strict=True)]


def moved(problem: InterOpProblem, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of every edge, forward and backward, and of the exchange of gradients: each `[source, target]`."""
    n = len(plan)
    forward, backward, once = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    for one in problem.crossings:
        holders = sorted({i for i, (first, last, _, _) in enumerate(plan) for x in one.layers if first <= x < last})
        for i, j in pairwise(holders):
            once[i, j] += one.once_bytes
        for target in holders[1:]:
            forward[holders[0], target] += one.forward_bytes
            backward[holders[0], target] += one.backward_bytes
    for table in (forward, backward, once):
        for i, j in zip(*np.nonzero(table), strict=True):
            table[i, j] = problem.transfer_seconds(plan[i][2], plan[j][2], float(table[i, j]))
    return forward, backward, once


def price(problem: InterOpProblem, plan: Plan) -> float:
    """The objective, from its definition; infinite for a plan that does not fit."""
    n, b, ahead = len(plan), problem.microbatches, list[int]()
    for i, (_, last, submesh, option) in enumerate(plan):
        kept = {
            "one_f_one_b": min(b, n - i), "gpipe": b, "zero_bubble": min(b, n),
        }.get(problem.order, min(b, 2 * (n - i) - 1))  # fmt: skip
        limit = problem.limit_bytes(submesh, last == problem.layers)
        if option.constant_bytes + kept * option.in_flight_bytes > limit:
            return inf
        fit = [k for k in range(1, b + 1) if option.constant_bytes + k * option.in_flight_bytes <= limit]
        ahead.append(fit[-1] if problem.order == "eager_one_f_one_b" else min(b, n - i))
    forward, backward, once = moved(problem, plan)
    exchange = once.sum(axis=1)
    f = np.array([option.forward_seconds for *_, option in plan])
    g = np.array([option.backward_seconds for *_, option in plan])
    there = np.array([forward[i, i + 1] if i + 1 < n else 0.0 for i in range(n)])
    back = np.array([backward[i, i + 1] if i + 1 < n else 0.0 for i in range(n)])
    widest = [max(forward[i].max(), backward[i].max()) for i in range(n)]
    w = np.array([option.weight_seconds for *_, option in plan])
    if problem.order != "zero_bubble":
        w = 0 * w

    # Of each stage the first and one past the last of those around it of which each reads what the one before it makes.
    apart = [0, *(i + 1 for i in range(n - 1) if not there[i] and plan[i][1] in problem.loose), n]
    since = [max(start for start in apart if start <= i) for i in range(n)]
    until = [min(stop for stop in apart if stop > i) for i in range(n)]

    def way(i: int, j: int) -> float:
        """Of a microbatch from stage i to before stage j and back."""
        return float((f + g - w + there + back)[i:j].sum())

    def held_back(i: int) -> float:
        """Where so many run ahead: the sum of all that waits for each other."""
        k, whole, one, far = ahead[i], f[i] + g[i], f[i] + g[i] - w[i], way(i, until[i])
        pair = way(i, i + 1) + ((f + g - w)[i + 1] if i + 1 < until[i] else 0.0)
        if problem.order == "eager_one_f_one_b":
            pair = 0.0
        found = [far - k * f[i] - g[i] + b * whole, far - f[i] - k * g[i] + b * whole]
        found += [(ways + 1) * far + (b - 1 - ways * k) * one for ways in range(1, (b - 1) // k + 1)]
        if b > k:
            found += [2 * far + (b - 1 - k) * whole]
            found += [2 * far + pairs * pair + (b - 1 - k - 2 * pairs) * one for pairs in range((b - 1 - k) // 2 + 1)]
        return max(found) + w[i]

    ends = []
    for i, stop in enumerate(until):
        if problem.order == "gpipe":
            periods = max(f[i:stop].max(), there[i:stop].max()) + max(g[i:stop].max(), back[i:stop].max())
            busy = way(i, stop) + (b - 1) * periods
        elif problem.order == "zero_bubble":
            busy = max(
                b * (f[i] + g[i]), b * widest[i],
                w[i] + max(way(i, j) + b * (f + g)[j] - min(b, n) * w[j] for j in range(i, stop)),
                held_back(i),
            )  # fmt: skip
        else:
            # Some stage after it, or edge, is busy with all microbatches; or no more run ahead.
            least = [b * max(f[j] + g[j], widest[j]) for j in range(n)]
            if problem.order != "adaptive":
                least = [max(one, held_back(j)) for j, one in enumerate(least)]
            busy = max(way(i, j) + least[j] for j in range(i, stop))
        ends.append(float((f + there)[since[i] : i].sum()) + busy + plan[i][3].per_step_seconds + exchange[i])
    return float(max(ends))


def timing_of(problem: InterOpProblem, plan: Plan) -> Timing:
    """Of a plan, as the simulator has it."""
    forward, backward, once = moved(problem, plan)
    split = problem.order == "zero_bubble"
    return Timing(
        stages=tuple(
            StageTiming(
                forward_seconds=one.forward_seconds, backward_seconds=one.backward_seconds,
                synchronise_seconds=one.per_step_seconds + float(exchange),
                constant_bytes=one.constant_bytes, in_flight_bytes=one.in_flight_bytes,
                backward_input_seconds=one.backward_seconds - one.weight_seconds if split else None,
                backward_weight_seconds=one.weight_seconds if split else None,
            )
            for (*_, one), exchange in zip(plan, once.sum(axis=1), strict=True)
        ),
        edges=tuple(
            EdgeTiming(
                edge=Edge(i, j), forward_seconds=float(forward[i, j]), backward_seconds=float(backward[i, j]),
            )
            for i, j in zip(*map(np.ndarray.tolist, np.nonzero(forward)), strict=True)
        ),
    )  # fmt: skip


def schedules_of(problem: InterOpProblem, timing: Timing) -> Iterator[Schedule]:
    """Those that the objective of an order bounds."""
    stages, edges = len(timing.stages), tuple(one.edge for one in timing.edges)
    names = ["adaptive", "eager_one_f_one_b", "gpipe"] if problem.order == "adaptive" else [problem.order]
    for name in names:
        options: dict[str, Any] = {}
        if name == "adaptive":
            period = max(one.forward_seconds + one.backward_seconds for one in timing.stages)
            both_ways = [(one.forward_seconds + one.backward_seconds) / 2 for one in timing.edges]
            options["warm_up"] = adaptive_warm_up(both_ways, period_seconds=period)
        yield make_schedule(name, stages, problem.microbatches, edges=edges, **options)


def chain_of(
    forward: Sequence[float], backward: Sequence[float], weights: Sequence[float], once: Sequence[float],
    edges: Sequence[float], *, microbatches: int, order: Order,
) -> tuple[InterOpProblem, Plan]:  # fmt: skip
    """The problem of one plan, in a stage for each of these numbers, and the plan; edges take as long both ways."""
    n = len(forward)
    options = [
        Option(
            forward_seconds=f, backward_seconds=b, weight_seconds=w * b if order == "zero_bubble" else 0.0,
            per_step_seconds=s,
        ) for f, b, w, s in zip(forward, backward, weights, once, strict=True)
    ]  # fmt: skip
    problem = InterOpProblem(
        layers=n, devices=n, submeshes=[Submesh(i, i + 1) for i in range(n)],
        options=lambda first, last, _, __: [options[first]] if last == first + 1 else [],
        crossings=[Crossing(layers=(i, i + 1), forward_bytes=1.0, backward_bytes=1.0) for i in range(n - 1)],
        transfer_seconds=lambda a, b, size: size * edges[a.first], microbatches=microbatches,
        limit_bytes=lambda submesh, last: inf, order=order, num_stages=n,
    )  # fmt: skip
    return problem, [(i, i + 1, Submesh(i, i + 1), one) for i, one in enumerate(options)]


def steps_of(problem: InterOpProblem, plan: Plan) -> list[float]:
    """What a plan takes under each schedule that its objective bounds."""
    timing = timing_of(problem, plan)
    return [step_seconds(one, timing) for one in schedules_of(problem, timing)]


def objective_of(problem: InterOpProblem) -> float:
    found = solve_inter_op(problem)
    assert found is not None
    return found.seconds


SECONDS = floats(0.01, 10.0)


@given(
    stages=lists(tuples(SECONDS, SECONDS, floats(0.0, 1.0), floats(0.0, 10.0), SECONDS), min_size=1, max_size=6),
    microbatches=integers(1, 20),
    order=sampled_from([order for order in ORDERS if bounds(order)]),
)
def test_the_objective_is_no_more_than_the_simulated_step(
    stages: list[tuple[float, ...]], microbatches: int, order: Order
) -> None:
    problem, plan = chain_of(*zip(*stages, strict=True), microbatches=microbatches, order=order)
    assert objective_of(problem) <= min(steps_of(problem, plan)) * (1 + 1e-9)


# Objectives that together bound what may be chosen from.
TOGETHER: list[tuple[Order, ...]] = [("one_f_one_b", "adaptive"), ("one_f_one_b",), ("gpipe",), ("zero_bubble",)]


@pytest.mark.parametrize("orders", TOGETHER, ids=" ".join)
def test_objectives_are_seldom_much_less_than_the_simulated_step(orders: tuple[Order, ...]) -> None:
    generator = np.random.default_rng(TOGETHER.index(orders))
    shares = []
    for _ in range(150):
        n, count = int(generator.integers(1, 7)), int(generator.choice([1, 2, 3, 4, 8, 16, 32]))
        spread = float(generator.choice([0.05, 0.5, 1.0]))
        f = 1 + 2 * spread * generator.random(n)
        g = 2 * f * (1 + spread * (generator.random(n) - 0.5))
        w = 0.3 + 0.4 * generator.random(n) if orders == ("zero_bubble",) else np.zeros(n)
        once = generator.random(n) * generator.choice([0.0, 3.0])
        edges = np.full(n, generator.choice([1e-3, 0.1, 0.5]))
        numbers = [one.tolist() for one in (f, g, w, once, edges)]
        cases = [chain_of(*numbers, microbatches=count, order=order) for order in orders]
        least = min(objective_of(problem) for problem, _ in cases)
        shares.append(least / min(seconds for case in cases for seconds in steps_of(*case)))
    assert max(shares) < 1 + 1e-9
    assert np.median(shares) > 0.995
    assert min(shares) > 0.88


# All but a tenth are left to `make test-all`.
@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))])
def test_no_plan_that_fits_is_simulated_to_take_less_than_is_bounded(block: int) -> None:
    """Layouts that keep less take longer; what is in flight says which of them fit. Some stages read nothing of the one
    before them."""
    binding = 0
    for seed in range(8 * block, 8 * block + 8):
        generator = np.random.default_rng(seed)
        problem, layouts = random_problem(seed, "adaptive"), {}
        limit = float(generator.choice([6.0, 10.0]))
        for first, last in combinations(range(problem.layers + 1), 2):
            for submesh in problem.submeshes:
                work = (last - first) * (0.5 + generator.random(3)) / submesh.size
                layouts[first, last, submesh] = [
                    Option(
                        forward_seconds=float(seconds), backward_seconds=2 * float(seconds),
                        weight_seconds=float(seconds), per_step_seconds=float(generator.random()),
                        constant_bytes=float(generator.integers(0, 2)), in_flight_bytes=float(kept) / submesh.size,
                    ) for seconds, kept in zip(np.sort(work), (5, 2, 1), strict=True)
                ]  # fmt: skip
        problem = replace(
            problem, limit_bytes=lambda submesh, last, limit=limit: limit, num_stages=None,
            options=lambda first, last, submesh, kept, layouts=layouts, limit=limit: best_of(
                [
                    one for one in layouts[first, last, submesh]
                    if one.constant_bytes + kept * one.in_flight_bytes <= limit
                ]
            ),
        )  # fmt: skip
        everything = replace(problem, options=lambda *key, layouts=layouts: layouts[key[:3]])
        for order in filter(bounds, ORDERS):
            found = solve_inter_op(replace(problem, order=order))
            least = found.lower_bound if found is not None else inf
            best = {True: inf, False: inf}
            for plan in all_plans(everything):
                timing = timing_of(replace(problem, order=order), plan)
                names = ["adaptive", "eager_one_f_one_b", "gpipe"] if order == "adaptive" else [order]
                for binds in (True, False):
                    kept = tuple(one.in_flight_bytes for *_, one in plan)
                    staged = StagedTiming(
                        timing=timing, sent=(), bytes_delayed=kept,
                        limit_bytes=(limit if binds else inf,) * len(plan),
                    )  # fmt: skip
                    taken = best_schedule(staged, problem.microbatches, names)
                    best[binds] = min(best[binds], taken.step_seconds if taken is not None else inf)
            assert least <= best[True] * (1 + 1e-9), (seed, order)
            binding += isfinite(best[True]) and best[True] > best[False] * (1 + 1e-9)
    assert binding > 3, "where memory does not bind little is tested"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block", range(10))
def test_no_plan_is_better(order: Order, block: int) -> None:
    """1,000 problems in all, a fifth of them in each order."""
    feasible = 0
    for seed in range(20 * block, 20 * block + 20):
        problem = random_problem(seed, order)
        best = min((price(problem, plan) for plan in all_plans(problem)), default=inf)
        found = solve_inter_op(problem)
        if best == inf:
            assert found is None, seed
            continue
        feasible += 1
        assert found is not None, seed
        assert found.exact
        assert found.seconds == pytest.approx(best, rel=1e-9), seed
        plan = [(s.first, s.last, s.submesh, s.option) for s in found.stages]
        assert price(problem, plan) == pytest.approx(found.seconds, rel=1e-9)
    assert feasible > 5


@pytest.mark.parametrize("order", ORDERS)
def test_options_that_are_dropped_are_of_no_best_plan(order: Order) -> None:
    """Of a split backward one that is slower may be, if less of its backward pass has to be waited for."""
    dropped = 0
    for seed in range(40):
        problem = random_problem(seed, order)

        def every(*place: Any, given: Any = problem.options) -> list[Option]:
            return [
                one._replace(forward_seconds=slower * one.forward_seconds, weight_seconds=share * one.backward_seconds)
                for one in given(*place) for slower, share in ((1.0, 0.1), (1.1, 0.5), (1.1, 0.4), (1.2, 0.6))
            ]  # fmt: skip

        kept = replace(problem, options=lambda *place, every=every: best_of(every(*place)))
        best, found = solve_inter_op(replace(problem, options=every)), solve_inter_op(kept)
        assert (best and best.seconds) == (found and found.seconds), seed
        dropped += len(every(0, 1, problem.submeshes[0], 1)) > len(kept.options(0, 1, problem.submeshes[0], 1))
    assert dropped > 10


@pytest.mark.parametrize("seed", range(10))
def test_a_narrow_beam_is_never_better_and_says_how_far_off_it_may_be(seed: int) -> None:
    problem = random_problem(seed, "one_f_one_b")
    wide = solve_inter_op(problem)
    for beam in (1, 2):
        narrow = solve_inter_op(problem, beam=beam)
        if wide is None or narrow is None:
            return
        assert narrow.lower_bound <= wide.seconds * (1 + 1e-12) <= narrow.seconds * (1 + 2e-12)
        assert wide.exact


def test_the_same_numbers_give_the_same_plan() -> None:
    problem = random_problem(3, "one_f_one_b")
    assert solve_inter_op(problem) == solve_inter_op(problem)


def test_without_a_number_of_stages_a_split_backward_is_bounded() -> None:
    """By what the best plan of any number takes, or less: a stage keeps no more than there are stages."""
    met = 0
    for seed in range(150):
        problem = random_problem(seed, "zero_bubble")
        counts = range(1, min(problem.layers, problem.devices) + 1)
        each = (solve_inter_op(replace(problem, num_stages=count)) for count in counts)
        best = min((found.seconds for found in each if found is not None), default=inf)
        bound = solve_inter_op(replace(problem, num_stages=None))
        least = bound.lower_bound if bound is not None else inf
        assert least <= best * (1 + 1e-9), seed
        met += isfinite(best) and least == pytest.approx(best, rel=1e-9)
    assert met > 50, "a bound that is never met says little"

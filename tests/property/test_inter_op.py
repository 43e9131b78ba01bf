"""The stage search against brute force: every plan of small random problems, priced from the definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import ceil, inf, isfinite
from typing import Any

import numpy as np
import pytest

from meshwright.schedule import make_schedule
from meshwright.search.best_known import bounds
from meshwright.search.inter.dynamic_program import solve_inter_op
from meshwright.search.inter.problem import ORDERS, Crossing, InterOpProblem, Option, Order
from meshwright.search.inter.submeshes import Submesh
from meshwright.simulate import StageTiming, Timing, simulate

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
                    once_seconds=float(generator.random() * generator.choice([0.0, 1.0, 4.0])),
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
        submeshes=submeshes,
        options=lambda first, last, submesh, _: table[first, last, submesh],
        crossings=crossings,
        transfer_seconds=lambda a, b, size: 0.05 + size * float(rates[a.first, b.stop]) / min(a.size, b.size),
        microbatches=int(generator.integers(1, 9)),
        # A device's memory depends on where it is.
        limit_bytes=lambda submesh, last: limit * (0.9 if last else 1.0) * (1.0 if submesh.first % 2 else 0.8),
        order=order,
        holds_back=bool(generator.random() < 0.5),
        max_stages=None if generator.random() < 0.8 else int(generator.integers(1, 4)),
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
        if problem.max_stages is not None and count > problem.max_stages:
            return
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


def price(problem: InterOpProblem, plan: Plan) -> float:
    """The objective, from its definition; infinite for a plan that does not fit."""
    n, b = len(plan), problem.microbatches
    for i, (_, last, submesh, option) in enumerate(plan):
        kept = {
            "adaptive": min(b, n - i), "one_f_one_b": min(b, n - i), "eager_one_f_one_b": min(b, 2 * (n - i) - 1),
            "gpipe": b, "zero_bubble": min(b, n),
        }[problem.order]  # fmt: skip
        limit = problem.limit_bytes(submesh, last == problem.layers)
        if option.constant_bytes + kept * option.in_flight_bytes > limit:
            return inf
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
    exchange = once.sum(axis=1)
    f = np.array([option.forward_seconds for *_, option in plan])
    g = np.array([option.backward_seconds for *_, option in plan])
    there = np.array([forward[i, i + 1] if i + 1 < n else 0.0 for i in range(n)])
    back = np.array([backward[i, i + 1] if i + 1 < n else 0.0 for i in range(n)])
    widest = [max(forward[i].max(), backward[i].max()) for i in range(n)]
    w = np.array([option.weight_seconds for *_, option in plan])
    if problem.order != "zero_bubble":
        w = 0 * w

    def way(i: int, j: int) -> float:
        """Of a microbatch from stage i to before stage j and back."""
        return float((f + g - w + there + back)[i:j].sum())

    ends = []
    for i in range(n):
        if problem.order in ("gpipe", "one_f_one_b", "eager_one_f_one_b"):
            periods = {
                "gpipe": max(f[i:].max(), there[i:].max()) + max(g[i:].max(), back[i:].max()),
                "one_f_one_b": max((f + g + there + back)[i:].max(), *widest[i:]),
                "eager_one_f_one_b": max((f + g)[i:].max(), *widest[i:]),
            }[problem.order]
            busy = way(i, n) + (b - 1) * periods
        elif problem.order == "zero_bubble":
            busy = max(
                b * (f[i] + g[i]), b * widest[i],
                w[i] + max(way(i, j) + b * (f + g)[j] - min(b, n) * w[j] for j in range(i, n)),
                way(i, n) + b * (f[i] + g[i]) - min(b, n) * f[i] - (g[i] - w[i]),
            )  # fmt: skip
        else:
            # Some stage after it, or edge, is busy with all microbatches; or no more are in flight.
            least = [b * max(f[j] + g[j], widest[j]) for j in range(n)]
            if problem.holds_back:
                most = [min(b, n - j) for j in range(n)]
                least = [
                    max(one, ceil(b / k) * way(j, n), way(j, n) + b * (f[j] + g[j]) - k * f[j] - g[j])
                    for j, (one, k) in enumerate(zip(least, most, strict=True))
                ]
            busy = max(way(i, j) + least[j] for j in range(i, n))
        ends.append(float((f + there)[:i].sum()) + busy + plan[i][3].once_seconds + exchange[i])
    return float(max(ends))


@pytest.mark.parametrize(("order", "holds_back"), [*((order, False) for order in ORDERS), ("adaptive", True)])
def test_what_bounds_is_no_more_than_the_simulated_step_and_seldom_much_less(order: Order, holds_back: bool) -> None:
    generator = np.random.default_rng(ORDERS.index(order))
    shares = []
    for _ in range(150):
        n, count = int(generator.integers(1, 7)), int(generator.choice([1, 2, 3, 4, 8, 16, 32]))
        spread = float(generator.choice([0.05, 0.5, 1.0]))
        f = 1 + 2 * spread * generator.random(n)
        g = 2 * f * (1 + spread * (generator.random(n) - 0.5))
        w = g * (0.3 + 0.4 * generator.random(n)) if order == "zero_bubble" else np.zeros(n)
        once, moved = generator.random(n) * generator.choice([0.0, 3.0]), generator.choice([0.0, 0.1, 0.5])
        options = [
            Option(forward_seconds=a, backward_seconds=b, weight_seconds=c, once_seconds=d)
            for a, b, c, d in zip(f.tolist(), g.tolist(), w.tolist(), once.tolist(), strict=True)
        ]
        problem = InterOpProblem(
            layers=n, devices=n, submeshes=[Submesh(i, i + 1) for i in range(n)],
            options=lambda first, last, _, __, options=options: [options[first]] if last == first + 1 else [],
            crossings=[Crossing(layers=(i, i + 1), forward_bytes=1.0, backward_bytes=1.0) for i in range(n - 1)],
            transfer_seconds=lambda a, b, size, moved=moved: size * moved, microbatches=count,
            limit_bytes=lambda submesh, last: inf, order=order, holds_back=holds_back, num_stages=n,
        )  # fmt: skip
        found = solve_inter_op(problem)
        assert found is not None
        edges = Timing.uniform(stages=n, forward_seconds=1, backward_seconds=1, transfer_seconds=float(moved)).edges
        timing = Timing(
            stages=tuple(
                StageTiming(
                    forward_seconds=one.forward_seconds, backward_seconds=one.backward_seconds,
                    synchronise_seconds=one.once_seconds,
                    backward_input_seconds=one.backward_seconds - one.weight_seconds if one.weight_seconds else None,
                    backward_weight_seconds=one.weight_seconds or None,
                )
                for one in options
            ),
            edges=edges,
        )  # fmt: skip
        tries = [(order, {})]
        if order == "adaptive":
            tries = [("one_f_one_b", {}), *([] if holds_back else [("eager_one_f_one_b", {}), ("gpipe", {})])]
        step = min(simulate(make_schedule(name, n, count, **more), timing).step_seconds for name, more in tries)
        shares.append(found.seconds / step)
    if bounds(order):
        assert max(shares) < 1 + 1e-9
        assert np.median(shares) > 0.995
        assert min(shares) > 0.88
    else:
        assert 1 - 1e-9 < min(shares) <= max(shares) < 1.25


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block", range(10))
def test_no_plan_is_better(order: Order, block: int) -> None:
    """800 problems in all, a quarter of them on each schedule."""
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
    problem = random_problem(3, "eager_one_f_one_b")
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


@pytest.mark.parametrize("order", ORDERS)
def test_plans_of_one_stage_may_have_a_bound_of_their_own(order: Order) -> None:
    ruled_out = 0
    for seed in range(60):
        problem = replace(random_problem(seed, order), num_stages=None if order != "zero_bubble" else 1)
        plans = list(all_plans(problem))
        alone = min((price(problem, plan) for plan in plans if len(plan) == 1), default=inf)
        several = min((price(problem, plan) for plan in plans if len(plan) > 1), default=inf)
        if not isfinite(alone):
            continue
        for share in (0.99, 1.01):
            found = solve_inter_op(problem, alone_bound=share * alone)
            best = min(several, alone if share > 1 else inf)
            assert (found.seconds if found is not None else inf) == pytest.approx(best, rel=1e-9), seed
        ruled_out += alone < several
    assert ruled_out > 10

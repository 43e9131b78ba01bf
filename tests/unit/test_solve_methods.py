"""All methods on one shared set of problems whose optimum is known by argument, not by another solver."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from meshwright.solve import (
    Infeasible,
    Problem,
    Solution,
    Unsolved,
    presolve,
    solve,
    solve_by_brute_force,
    solve_by_elimination,
    solve_by_labels,
    solve_by_milp,
    solve_by_multiplier,
)
from meshwright.solve.eliminate import Elimination
from meshwright.solve.order import elimination_order

Method = Callable[[Problem], Solution]
EXACT: list[Method] = [solve, solve_by_labels, solve_by_milp, solve_by_brute_force]
NO_LIMIT: list[Method] = [solve_by_elimination, solve_by_multiplier]
DIFFER = [[0.0, 1.0], [1.0, 0.0]]
AGREE = [[1.0, 0.0], [0.0, 1.0]]


def cycle(nodes: int, table: list[list[float]]) -> Problem:
    pairs = [(v, v + 1) for v in range(nodes - 1)] + [(0, nodes - 1)]
    return Problem(costs=([0.0, 0.0],) * nodes, edges=dict.fromkeys(pairs, table))


UNLIMITED = {
    "nothing": (Problem(costs=()), 0.0),
    "one node": (Problem(costs=([3.0, 1.0, 2.0],)), 1.0),
    "no edges": (Problem(costs=([3.0, 1.0], [2.0, 5.0])), 3.0),
    # an odd cycle cannot be coloured with two colours, an even one can
    "odd cycle": (cycle(7, AGREE), 1.0),
    "even cycle": (cycle(8, AGREE), 0.0),
    "forbidden pair": (Problem(costs=([0.0, 5.0], [0.0, 7.0]), edges={(0, 1): [[math.inf, 0.0], [0.0, 0.0]]}), 5.0),
    "two parts": (Problem(costs=([1.0, 0.0],) * 4, edges={(0, 2): DIFFER, (1, 3): [[0.0, 9.0], [9.0, 4.0]]}), 2.0),
    "single choices": (Problem(costs=([2.0], [3.0], [1.0, 4.0]), edges={(0, 1): [[5.0]], (1, 2): [[9.0, 0.5]]}), 14.5),
    # four colours are enough for K4, three leave one pair of equal colour
    "K4, 3 colours": (
        Problem(costs=(np.zeros(3),) * 4, edges={(u, v): np.eye(3) for u in range(4) for v in range(u + 1, 4)}),
        1.0,
    ),
}
LIMITED = {
    # a knapsack: of savings (60, 100, 120) for (10, 20, 30) bytes within 50, the last two are best
    "knapsack": (
        Problem(
            costs=([60.0, 0.0], [100.0, 0.0], [120.0, 0.0]),
            memory=([0.0, 10.0], [0.0, 20.0], [0.0, 30.0]),
            memory_limit=50.0,
        ),
        60.0,
    ),
    "met with equality": (Problem(costs=([1.0, 0.0],) * 3, memory=([1.0, 2.0],) * 3, memory_limit=4.0), 2.0),
    "fractional bytes met with equality": (
        Problem(costs=([1.0, 0.0],) * 3, memory=([0.1, 0.2],) * 3, memory_limit=0.4),
        2.0,
    ),
    "zero bytes": (Problem(costs=([1.0, 0.0],) * 2, memory=([0.0, 2.0],) * 2, memory_limit=0.0), 2.0),
    # all equal or pay: half the chain may be heavy, so one border is paid or all stay light
    "chain, one border": (
        Problem(
            costs=([1.0, 0.0],) * 8,
            edges={(v, v + 1): [[0.0, 1.5], [1.5, 0.0]] for v in range(7)},
            memory=([0.0, 1.0],) * 8,
            memory_limit=4.0,
        ),
        5.5,
    ),
    "limit does not bind": (Problem(costs=([1.0, 0.0],), memory=([0.0, 5.0],), memory_limit=6.0), 0.0),
}


def certify(problem: Problem, solution: Solution) -> None:
    """What a solution says of itself is so."""
    assert solution.objective == problem.objective(solution.choices)
    assert solution.memory == problem.memory_of(solution.choices)
    assert problem.fits(solution.memory)
    assert 0 <= solution.lower_bound <= solution.objective
    assert solution.gap >= 0
    assert solution.seconds >= 0
    assert all(type(s) is int for s in solution.choices)


@pytest.mark.parametrize("method", EXACT + NO_LIMIT)
@pytest.mark.parametrize("name", UNLIMITED)
def test_known_optimum(method: Method, name: str) -> None:
    problem, optimum = UNLIMITED[name]
    solution = method(problem)
    certify(problem, solution)
    assert solution.objective == pytest.approx(optimum, rel=1e-12)
    assert solution.lower_bound == pytest.approx(optimum, rel=1e-6, abs=1e-9)
    assert solution.proven


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("name", LIMITED)
def test_known_optimum_within_limit(method: Method, name: str) -> None:
    problem, optimum = LIMITED[name]
    solution = method(problem)
    certify(problem, solution)
    assert solution.objective == pytest.approx(optimum, rel=1e-12)
    assert solution.lower_bound == pytest.approx(optimum, rel=1e-6, abs=1e-9)
    assert solution.proven


@pytest.mark.parametrize("name", LIMITED)
def test_multiplier_is_honest(name: str) -> None:
    problem, optimum = LIMITED[name]
    solution = solve_by_multiplier(problem)
    certify(problem, solution)
    assert solution.lower_bound <= optimum <= solution.objective
    assert solution.proven == (solution.lower_bound == solution.objective)


@pytest.mark.parametrize("method", [*EXACT, solve_by_multiplier])
def test_over_memory(method: Method) -> None:
    # the least memory alone, 1 + 1, is forbidden by the edge; 1 + 5 is the least that is allowed
    problem = Problem(
        costs=([0.0, 0.0], [0.0, 0.0]),
        edges={(0, 1): [[math.inf, 0.0], [0.0, 0.0]]},
        memory=([1.0, 8.0], [1.0, 5.0]),
        memory_limit=5.0,
    )
    with pytest.raises(Infeasible, match=r"got a memory limit of 5 bytes; needed at least 6 bytes") as caught:
        method(problem)
    assert caught.value.least_memory == pytest.approx(6.0)
    assert caught.value.memory_limit == 5.0


@pytest.mark.parametrize("method", EXACT + NO_LIMIT)
@pytest.mark.parametrize("limit", [1.0, math.inf])
def test_nothing_allowed(method: Method, limit: float) -> None:
    three = cycle(
        3, [[math.inf, 0.0], [0.0, math.inf]]
    )  # no odd cycle has two colours: arc consistency does not see it
    problem = Problem(costs=three.costs, edges=three.edges, memory=([0.0, 0.0],) * 3, memory_limit=limit)
    with pytest.raises(Infeasible, match="infinite cost for every assignment") as caught:
        method(problem)
    assert caught.value.least_memory is None


def test_elimination_refuses_a_binding_limit() -> None:
    with pytest.raises(Unsolved, match="optimum of 60 bytes; needed at most 50"):
        solve_by_elimination(LIMITED["knapsack"][0])


def test_too_wide_for_elimination() -> None:
    clique = {(u, v): np.eye(8) for u in range(10) for v in range(u + 1, 10)}
    problem = Problem(costs=(np.zeros(8),) * 10, edges=clique)
    with pytest.raises(Unsolved, match="largest table"):
        solve_by_elimination(problem)
    with pytest.raises(Unsolved, match="assignments"):
        solve_by_brute_force(problem)


def test_too_wide_is_still_solved() -> None:
    rng = np.random.default_rng(0)
    planted = rng.integers(0, 6, 12)  # free choices; anything else costs at least 1 each
    costs = tuple(np.where(np.arange(6) == s, 0.0, 1 + rng.random(6)) for s in planted)
    edges = {}
    for u in range(12):
        for v in range(u + 1, 12):
            edges[(u, v)] = rng.random((6, 6)) * 0.05
            edges[(u, v)][planted[u], planted[v]] = 0.02
    problem = Problem(costs=costs, edges=edges)
    with pytest.raises(Unsolved):
        solve_by_elimination(problem)
    solution = solve(problem)
    certify(problem, solution)
    # changing m nodes costs at least m and saves at most 0.02 on each of the edges they touch, 11 m of them
    assert solution.choices == tuple(planted)
    assert solution.proven


def test_milp_keeps_the_incumbent_when_time_is_out() -> None:
    rng = np.random.default_rng(1)
    side = 14
    edges = {
        (v, u): rng.random((6, 6))
        for v in range(side * side)
        for u in ((v + 1) if (v + 1) % side else 0, v + side)
        if v < u < side * side
    }
    problem = Problem(costs=tuple(rng.random(6) for _ in range(side * side)), edges=edges)
    choices = (0,) * side**2
    known = Solution(
        choices=choices,
        objective=problem.objective(choices),
        memory=0.0,
        lower_bound=1.0,
        method="known",
        proven=False,
        seconds=0.0,
    )
    solution = solve_by_milp(problem, time_limit_seconds=0.05, incumbent=known)
    certify(problem, solution)
    assert solution.objective <= known.objective
    assert solution.lower_bound >= 1.0
    assert not solution.proven


def test_a_loose_gap_stops_early_and_is_kept() -> None:
    rng = np.random.default_rng(5)
    problem = Problem(
        costs=tuple(rng.random(5) for _ in range(60)), memory=tuple(rng.random(5) for _ in range(60)), memory_limit=15.0
    )
    loose = solve(problem, gap=0.1)
    certify(problem, loose)
    assert loose.method == "presolve+multiplier"
    assert loose.proven
    assert loose.gap <= 0.1
    assert solve(problem).objective <= loose.objective


def test_min_marginals_of_a_cycle() -> None:
    rng = np.random.default_rng(2)
    edges = {pair: rng.random((3, 3)) for pair in [(0, 1), (1, 2), (2, 3), (0, 3), (1, 3)]}
    problem = Problem(costs=tuple(rng.random(3) for _ in range(5)), edges=edges)
    marginals = Elimination(problem).min_marginals(problem.costs)
    totals = {s: problem.objective(s) for s in np.ndindex(*problem.sizes)}
    assert marginals.optimum == pytest.approx(min(totals.values()))
    for v in range(5):
        for a in range(3):
            assert marginals.nodes[v][a] == pytest.approx(min(t for s, t in totals.items() if s[v] == a))
    for u, v in edges:
        for a, b in np.ndindex(3, 3):
            assert marginals.edges[(u, v)][a, b] == pytest.approx(
                min(t for s, t in totals.items() if (s[u], s[v]) == (a, b))
            )


def test_orders() -> None:
    chain = elimination_order([4] * 50, [(v, v + 1) for v in range(49)])
    assert chain.largest == 16
    assert sorted(chain.nodes) == list(range(50))
    ladder = [(v, v + 2) for v in range(98)] + [(v, v + 1) for v in range(0, 99, 2)]
    assert elimination_order([3] * 100, ladder).largest == 27
    assert elimination_order([9] * 40, [(u, v) for u in range(40) for v in range(u)]).largest > 1 << 60


def test_presolve_keeps_what_matters() -> None:
    # choice 1 of node 0 is dominated; node 2 has one choice; node 3 is indifferent in memory and hangs on node 1
    problem = Problem(
        costs=([1.0, 2.0, 0.0], [0.0, 1.0], [5.0], [0.0, 1.0]),
        edges={
            (0, 1): [[0.0, 1.0], [0.5, 1.0], [9.0, 9.0]],
            (0, 2): [[0.0], [0.0], [1.0]],
            (1, 3): [[3.0, 0.0], [0.0, 3.0]],
        },
        memory=([1.0, 1.0, 0.0], [4.0, 2.0], [7.0], [1.0, 1.0]),
        memory_limit=12.0,
    )
    reduction = presolve(problem)
    assert reduction.nodes == (0, 1)
    assert reduction.choices[0].tolist() == [0, 2]
    inner = solve_by_brute_force(reduction.problem)
    outer = solve_by_brute_force(problem)
    restored = reduction.restore(inner.choices)
    assert problem.objective(restored) == outer.objective == pytest.approx(inner.objective + reduction.offset_seconds)
    assert problem.fits(problem.memory_of(restored))

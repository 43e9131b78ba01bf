"""The parts of the planner against truths found another way: every subset, every tree, every order, every schedule."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import linprog

from meshwright.resharding import Host, Move, Network, Nic, grid_layout, plan_reshard, uniform_network
from meshwright.resharding.flow import least_send_load
from meshwright.resharding.published import Strategy, UnitTask, depth_first, randomised_greedy
from meshwright.resharding.rounds import decompose
from meshwright.resharding.simulate import exclusive_seconds

seeds = st.integers(0, 1 << 30)
few = settings(max_examples=100, deadline=None, derandomize=True)


@few
@given(seeds)
def test_least_send_load_is_the_worst_subset(seed):
    chance = random.Random(seed)
    rates = [Fraction(chance.randint(1, 4)) for _ in range(chance.randint(1, 5))]
    volumes: dict[tuple[int, ...], int] = {}
    for _ in range(chance.randint(0, 6)):
        key = tuple(sorted(chance.sample(range(len(rates)), chance.randint(1, len(rates)))))
        volumes[key] = chance.choice((0, 1, 5, 12, 10**12))
    seconds, flow = least_send_load(volumes, rates)
    worst = Fraction(0)
    for count in range(1, len(rates) + 1):
        for subset in itertools.combinations(range(len(rates)), count):
            inside = sum(volume for key, volume in volumes.items() if set(key) <= set(subset))
            worst = max(worst, Fraction(inside) / sum(rates[s] for s in subset))
    assert seconds == worst
    load = [Fraction(0)] * len(rates)
    for key, volume in volumes.items():
        shares = flow.get(key, {})
        assert sum(shares.values()) == volume
        assert set(shares) <= set(key)
        for s, share in shares.items():
            load[s] += share
    assert all(amount <= rate * seconds for amount, rate in zip(load, rates, strict=True))


def test_a_long_chain_of_classes_levels_out():
    count = 500
    seconds, _ = least_send_load({(i, i + 1): 10 for i in range(count)}, [Fraction(1)] * (count + 1))
    assert seconds == Fraction(10 * count, count + 1)


@few
@given(seeds)
def test_rounds_carry_everything_in_the_time_of_the_busiest_port(seed):
    chance = random.Random(seed)
    alike = chance.random() < 0.5
    kinds = [Fraction(1)] if alike else [Fraction(1), Fraction(2), Fraction(3, 2), Fraction(4)]
    send, receive = ([chance.choice(kinds) for _ in range(chance.randint(1, 6))] for _ in range(2))
    core = chance.choice((None, Fraction(1), Fraction(5, 2), Fraction(100)))
    volumes = {
        (p, q): chance.choice((1, 3, 1000, 10**11))
        for p in range(len(send))
        for q in range(len(receive))
        if chance.random() < 0.6
    }
    found = decompose(volumes, send_rates=send, receive_rates=receive, core_rate=core)
    carried = dict.fromkeys(volumes, 0)
    total = Fraction(0)
    for step in found:
        out, into = [0] * len(send), [0] * len(receive)
        for p, q, size in step:
            assert size > 0
            carried[p, q] += size
            out[p] += size
            into[q] += size
        if alike and core != Fraction(5, 2):  # each port has one peer
            assert len({p for p, _, _ in step}) == len({q for _, q, _ in step}) == len(step)
        loads = [*map(Fraction, out), *map(Fraction, into)]
        seconds = [load / rate for load, rate in zip(loads, [*send, *receive], strict=True)]
        total += max([*seconds, Fraction(sum(out)) / core if core else Fraction(0)])
    assert carried == volumes
    least = [Fraction(sum(v for (p, _), v in volumes.items() if p == i)) / send[i] for i in range(len(send))]
    least += [Fraction(sum(v for (_, q), v in volumes.items() if q == i)) / receive[i] for i in range(len(receive))]
    least.append(Fraction(sum(volumes.values())) / core if core else Fraction(0))
    # Where rates are alike, exactly; else rounds may end between two bytes.
    assert total >= max(least)
    assert total <= max(least) + (0 if alike and core is None else 2 * len(found))


def trees(sender: int, receivers: tuple[int, ...]) -> list[dict[int, int]]:
    """How often each domain sends, for every tree that brings a byte from `sender` to all `receivers`."""
    found = []
    for parents in itertools.product((sender, *receivers), repeat=len(receivers)):
        parent = dict(zip(receivers, parents, strict=True))
        reached, more = {sender}, True
        while more:
            new = {d for d, p in parent.items() if p in reached and d not in reached}
            reached |= new
            more = bool(new)
        if len(reached) == len(receivers) + 1:
            sends: dict[int, int] = {}
            for p in parents:
                sends[p] = sends.get(p, 0) + 1
            if sends not in found:
                found.append(sends)
    return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds)
def test_relay_bound_is_the_best_mixture_of_all_trees(seed):
    chance = random.Random(seed)
    count = chance.randint(2, 5)
    nics = [
        Nic(send_rate=chance.choice((1e9, 1e9, 5e8, 1e8)), receive_rate=chance.choice((1e9, 2e9))) for _ in range(count)
    ]
    network = Network(hosts=tuple(Host(devices=(h,), nics=(nic,)) for h, nic in enumerate(nics)))
    moves = []
    for i in range(chance.randint(1, 4)):
        source = chance.sample(range(count), chance.randint(1, min(2, count - 1)))
        target = chance.sample(range(count), chance.randint(1, min(3, count)))
        layouts = (grid_layout(devices, (len(devices),), ("x",), []) for devices in (source, target))
        first, second = layouts
        size = chance.choice((1 << 20, 1 << 22, 3 << 20))
        moves.append(Move(name=str(i), shape=(size,), item_bytes=1, source=first, destination=second))
    plan = plan_reshard(network, moves)
    columns: list[tuple[int, dict[int, int]]] = []
    tasks = [task for task in plan.demand.classes if task.receivers]
    for i, task in enumerate(tasks):
        columns += [(i, sends) for s in task.senders for sends in trees(s, task.receivers)]
    if not columns:
        assert plan.seconds == 0
        return
    load = np.zeros((count, len(columns) + 1))
    served = np.zeros((len(tasks), len(columns) + 1))
    for j, (i, sends) in enumerate(columns):
        served[i, j] = 1
        for d, times in sends.items():
            load[d, j] = times
    load[:, -1] = [-nic.send_rate / 1e9 for nic in nics]
    cost = np.zeros(len(columns) + 1)
    cost[-1] = 1
    wanted = [task.bytes / 1e9 for task in tasks]
    best = linprog(cost, A_ub=load, b_ub=np.zeros(count), A_eq=served, b_eq=wanted).fun
    least = max(best, float(plan.bound.seconds))
    assert plan.relay_bound_seconds == pytest.approx(least, rel=1e-6)
    assert float(plan.seconds) <= least * (1 + 1 / 64)


def fewest_slots(hosts: int, blocks: list[tuple[frozenset[int], frozenset[int]]]) -> int:
    """The fewest slots in which every block reaches its receivers, a host sending and receiving one block a slot.

    Breadth-first over who holds what; any host may pass on anything.
    """
    start = tuple(frozenset(i for i, (holders, _) in enumerate(blocks) if h in holders) for h in range(hosts))
    wanted = [frozenset(i for i, (_, needers) in enumerate(blocks) if h in needers) for h in range(hosts)]
    seen, frontier, slots = {start}, [start], 0
    while not any(all(w <= h for w, h in zip(wanted, state, strict=True)) for state in frontier):
        following = set()
        for state in frontier:
            options = [
                [(None, None)] + [(s, b) for s in range(hosts) if s != d for b in state[s] if b not in state[d]]
                for d in range(hosts)
            ]
            for choice in itertools.product(*options):
                used = [s for s, _ in choice if s is not None]
                if len(set(used)) == len(used):
                    following.add(tuple(h if b is None else h | {b} for h, (_, b) in zip(state, choice, strict=True)))
        # A state in which everybody holds less than in another one is no better.
        frontier = sorted(following - seen, key=lambda state: [sorted(h) for h in state])
        seen |= following
        slots += 1
    return slots


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seeds)
def test_no_schedule_in_slots_beats_the_bound_or_our_plan_by_more_than_a_64th(seed):
    chance = random.Random(seed)
    hosts = chance.randint(3, 4)
    network = uniform_network([(h,) for h in range(hosts)], nic_rate=1e9)
    senders = list(range(chance.randint(1, hosts - 1)))
    blocks, moves = [], []
    for i in range(chance.randint(1, 3)):
        holders = chance.sample(senders, chance.randint(1, len(senders)))
        others = range(len(senders), hosts)
        needers = chance.sample(others, chance.randint(1, len(others)))
        blocks.append((frozenset(holders), frozenset(needers)))
        source, target = (grid_layout(devices, (len(devices),), ("x",), []) for devices in (holders, needers))
        moves.append(Move(name=str(i), shape=(1 << 20,), item_bytes=1, source=source, destination=target))
    plan = plan_reshard(network, moves)
    best = fewest_slots(hosts, blocks) * Fraction(1 << 20, 10**9)
    assert plan.bound.seconds <= best
    assert plan.seconds <= best * Fraction(65, 64)


@few
@given(seeds)
def test_depth_first_search_finds_the_best_order_and_greedy_none_better(seed):
    chance = random.Random(seed)
    network = uniform_network([(h,) for h in range(5)], nic_rate=1)
    tasks = []
    for _ in range(chance.randint(1, 4)):
        senders = tuple(chance.sample((0, 1), chance.randint(1, 2)))
        devices = tuple(chance.sample((2, 3, 4), chance.randint(1, 3)))
        tasks.append(UnitTask(block=(0, 0), bytes=chance.choice((6, 12, 30)), senders=senders, devices=devices))
    strategy = chance.choice(list(Strategy))
    found = exclusive_seconds(network, depth_first(network, tasks, strategy, most_nodes=10**6))
    greedy = exclusive_seconds(network, randomised_greedy(network, tasks, strategy))
    from meshwright.resharding.published.strategies import whole_leg

    best = math.inf
    for order in itertools.permutations(tasks):
        for senders in itertools.product(*(task.senders for task in order)):
            legs = [whole_leg(strategy, task, s) for task, s in zip(order, senders, strict=True)]
            best = min(best, exclusive_seconds(network, legs))
    assert found == best <= greedy

"""Devices joined by wires between pairs: how fast a group of them can pass data around a ring.

A collective library lays several rings through a group at once, so that all wires inside the group are busy. How much
they carry together is a packing problem: give every Hamiltonian cycle of the group a share, so that the shares over a
pair's wires are at most their number, and the sum of shares is as large as can be. It is solved as the linear program
it is (SciPy's HiGHS), unless a few whole cycles use up all wires of some device: no packing carries more then. Each
cycle is used in both directions. On the hybrid cube-mesh of 8 V100s (NVIDIA DGX-1) the whole group gets all 6 wires of
each device, a row of 4 gets 4, and pairs get 1 or 2: what is measured there.

Cost: a host has at most 8 such devices, so at most 2,520 cycles; every group is solved once. Known limit: a group that
has no ring of its own is taken to borrow one wire of other devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from .errors import ClusterError, check_count

_MOST_DEVICES = 9  # 20,160 cycles: beyond, a machine has a switch

# A linear program is solved where more packings than this would have to be tried.
_MOST_TRIES = 100_000

Pair = frozenset[int]
Wires = tuple[tuple[int, int, int], ...]


def check_wires(devices: int, wires: Wires) -> None:
    """Refuse wires that are none, or that do not join the first `devices` devices. Raises ClusterError."""
    if not wires:
        return
    if devices > _MOST_DEVICES:
        raise _refused(f"{devices} devices", f"at most {_MOST_DEVICES}", "leaving wires out: a switch joins all pairs")
    seen = set()
    for wire in wires:
        if len(wire) != 3 or not all(isinstance(end, int) and end >= 0 for end in wire[:2]) or wire[0] == wire[1]:
            raise _refused(repr(list(wire)), "two different devices (numbered from 0) and a number", "[0, 1, 2]")
        check_count("Host", "wires", wire[2])
        if frozenset(wire[:2]) in seen:
            raise _refused(f"the devices {wire[0]} and {wire[1]} twice", "each pair once", "adding their numbers up")
        seen.add(frozenset(wire[:2]))
    reached, waiting = {0}, [0]
    while waiting:
        here = waiting.pop()
        for pair in seen:
            for there in pair - {here} if here in pair else ():
                if there < devices and there not in reached:
                    reached.add(there)
                    waiting.append(there)
    missing = sorted(set(range(devices)) - reached)
    if missing:
        raise _refused(
            f"wires that do not reach device {missing[0]} from device 0", f"a way between all {devices} devices",
            f"a wire to device {missing[0]}",
        )  # fmt: skip


@lru_cache(maxsize=4096)
def ring_wires(wires: Wires, group: tuple[int, ...]) -> float:
    """How many wires' bandwidth a ring over `group` has in each direction, all rings together.

    >>> ring_wires(((0, 1, 2), (1, 2, 1), (0, 2, 1)), (0, 1, 2))
    2.0
    """
    between = {frozenset((a, b)): count for a, b, count in wires if a in group and b in group}
    if len(group) == 2:
        return float(max(between.values(), default=1))
    first, *rest = group
    # Each cycle in one direction only.
    orders = [(first, *order, first) for order in itertools.permutations(rest) if order[0] < order[-1]]
    cycles = [tuple(map(frozenset, itertools.pairwise(order))) for order in orders]
    cycles = [cycle for cycle in cycles if between.keys() >= set(cycle)]
    if not cycles:
        return 1.0
    fewest = min(sum(count for pair, count in between.items() if device in pair) for device in group)
    if fewest % 2 == 0 and len(cycles) ** (fewest // 2) <= _MOST_TRIES and _holds(between, cycles, fewest // 2):
        return float(fewest)

    from scipy.optimize import linprog  # a third of a second, which most never need

    pairs = {pair: row for row, pair in enumerate(between)}
    uses = np.zeros((len(pairs), len(cycles)))
    for column, cycle in enumerate(cycles):
        uses[[pairs[pair] for pair in cycle], column] = 1
    packed = linprog(-np.ones(len(cycles)), A_ub=uses, b_ub=list(between.values()), method="highs")
    # To a thousandth of a wire: a solver's last digits differ between machines.
    return round(2 * -float(packed.fun), 3)


def _holds(left: Mapping[Pair, int], cycles: Sequence[tuple[Pair, ...]], count: int) -> bool:
    """Whether so many whole cycles fit the wires that are left."""
    fitting = [cycle for cycle in cycles if all(left[pair] for pair in cycle)]
    return count == 0 or any(
        _holds({pair: wires - (pair in cycle) for pair, wires in left.items()}, fitting[place:], count - 1)
        for place, cycle in enumerate(fitting)
    )


def _refused(got: str, needed: str, try_: str) -> ClusterError:
    return ClusterError(refused="this host", got=got, needed=needed, where="Host.wires", try_=try_)

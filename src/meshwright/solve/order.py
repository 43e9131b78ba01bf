"""In which order to eliminate nodes so that no table grows large.

Finding the best order is NP-hard; greedy orders are near the best on graphs of small treewidth (Bodlaender and Koster,
"Treewidth computations I", 2010). Two are tried: least table first, and least fill-in first. Ties go to the lowest
node, so that long chains are eaten from one end. Cost: about 10 microseconds a node and neighbour.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

# Logarithms of table sizes as integers: adding and removing neighbours then never drifts and ties stay ties.
_LOG_SCALE = 1 << 20
# Above this many neighbours a node is never the one of least fill-in, and counting its missing edges costs too much.
_FILL_DEGREE = 32
# Orders that cost less than this many table entries are not worth a second try.
_CHEAP_ENTRIES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An elimination order.

    Args:
        nodes: the nodes, first eliminated first.
        separators: for each of them in the same order, the nodes its table still mentions, first eliminated first.
        largest: entries of the largest table, the eliminated node included.
        entries: entries of all tables together.
        held: entries of all messages together: of the tables without the eliminated node.
    """

    nodes: tuple[int, ...]
    separators: tuple[tuple[int, ...], ...]
    largest: int
    entries: int
    held: int


def elimination_order(sizes: Sequence[int], edges: Iterable[tuple[int, int]]) -> Order:
    """The cheaper of two greedy orders.

    Args:
        sizes: the number of choices of each node.
        edges: pairs of nodes.
    """
    edges = tuple(edges)
    by_weight = _greedy(sizes, edges, _weight)
    if by_weight.entries <= _CHEAP_ENTRIES:
        return by_weight
    by_fill = _greedy(sizes, edges, _fill)
    return min(by_weight, by_fill, key=lambda order: order.entries)


def _weight(node: int, neighbours: list[set[int]], logs: list[int]) -> tuple[int, int]:
    del neighbours
    return (logs[node], 0)


def _fill(node: int, neighbours: list[set[int]], logs: list[int]) -> tuple[int, int]:
    around = neighbours[node]
    if len(around) > _FILL_DEGREE:
        return (len(around) ** 2, logs[node])
    present = sum(len(neighbours[u] & around) for u in around)
    return ((len(around) * (len(around) - 1) - present) // 2, logs[node])


def _greedy(
    sizes: Sequence[int],
    edges: Iterable[tuple[int, int]],
    priority: Callable[[int, list[set[int]], list[int]], tuple[int, int]],
) -> Order:
    own = [round(math.log2(k) * _LOG_SCALE) for k in sizes]
    logs = list(own)  # of the table that eliminating the node now would build
    neighbours: list[set[int]] = [set() for _ in sizes]
    for u, v in edges:
        neighbours[u].add(v)
        neighbours[v].add(u)
        logs[u] += own[v]
        logs[v] += own[u]
    current = [priority(v, neighbours, logs) for v in range(len(sizes))]
    heap = [(rank, v) for v, rank in enumerate(current)]
    heapq.heapify(heap)
    position = [-1] * len(sizes)
    nodes: list[int] = []
    around_each: list[tuple[int, ...]] = []
    while heap:
        rank, v = heapq.heappop(heap)
        if position[v] >= 0 or rank != current[v]:
            continue  # an entry made stale by an earlier elimination
        position[v] = len(nodes)
        nodes.append(v)
        around = sorted(neighbours[v])
        around_each.append(tuple(around))
        touched = set(around)
        for u in around:
            neighbours[u].discard(v)
            logs[u] -= own[v]
        for i, u in enumerate(around):
            for w in around[i + 1 :]:
                if w not in neighbours[u]:
                    neighbours[u].add(w)
                    neighbours[w].add(u)
                    logs[u] += own[w]
                    logs[w] += own[u]
                    if priority is _fill:  # a new edge changes the fill-in of everybody who sees both its ends
                        touched |= neighbours[u] & neighbours[w]
        for u in sorted(touched):
            new = priority(u, neighbours, logs)
            if new != current[u]:
                current[u] = new
                heapq.heappush(heap, (new, u))
        if len(around) > 1 and sum(own[u] for u in around) > 64 * _LOG_SCALE:
            # No computer holds this table, and filling in the rest would take quadratic time for nothing.
            return Order(nodes=(), separators=(), largest=1 << 64, entries=1 << 64, held=1 << 64)
    separators = tuple(tuple(sorted(around, key=position.__getitem__)) for around in around_each)
    messages = [math.prod(sizes[u] for u in s) for s in separators]
    tables = [sizes[v] * message for v, message in zip(nodes, messages, strict=True)]
    return Order(
        nodes=tuple(nodes),
        separators=separators,
        largest=max(tables, default=0),
        entries=sum(tables),
        held=sum(messages),
    )

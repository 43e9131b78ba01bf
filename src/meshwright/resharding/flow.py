"""The least possible send load: every class must leave its senders, and the busiest one should be done soonest.

min over x of max_s (sum_c x[c, s]) / rate[s], with sum_{s in N_c} x[c, s] = volume_c. By the max-flow min-cut theorem
the optimum is the largest, over sets S of senders, of (volume of the classes with N_c inside S) / (rate of S). The
set is found by Dinkelbach's iteration: guess the time, ask a max-flow (Dinic 1970) whether it suffices, take the cut
as the next guess. All numbers are integers or fractions, so the result is exact. Cost: a few max-flows on a graph
with one node per distinct set of senders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction


def least_send_load(
    volumes: Mapping[tuple[int, ...], int], rates: Sequence[Fraction]
) -> tuple[Fraction, dict[tuple[int, ...], dict[int, Fraction]]]:
    """The least time in which `volumes` can leave, and how much leaves where.

    >>> seconds, flow = least_send_load({(0,): 6, (0, 1): 6}, [Fraction(1), Fraction(1)])
    >>> seconds, flow[0, 1] == {1: 6}
    (Fraction(6, 1), True)

    Args:
      volumes: bytes that may leave from any of a set of senders, ascending.
      rates: bytes/s of each sender.

    Returns:
      seconds, and for each set the bytes that each of its senders sends.
    """
    sets = sorted(key for key, volume in volumes.items() if volume > 0)
    if not sets:
        return Fraction(0), {}
    senders = sorted({s for key in sets for s in key})
    total = sum(volumes[key] for key in sets)
    seconds = Fraction(total) / sum((rates[s] for s in senders), Fraction(0))
    while True:
        # In integers: all capacities times the common denominator.
        capacity = {s: rates[s] * seconds for s in senders}
        scale = math.lcm(*(c.denominator for c in capacity.values()))
        value, flow, reached = _max_flow(
            [(key, volumes[key] * scale) for key in sets], {s: int(c * scale) for s, c in capacity.items()}
        )
        if value == total * scale:
            return seconds, {key: {s: Fraction(v, scale) for s, v in flow[key].items() if v} for key in sets}
        inside = {s for s in senders if s in reached}
        held = sum(volumes[key] for key in sets if inside.issuperset(key))
        seconds = Fraction(held) / sum((rates[s] for s in inside), Fraction(0))


def _max_flow(
    sources: Sequence[tuple[tuple[int, ...], int]], capacity: Mapping[int, int]
) -> tuple[int, dict[tuple[int, ...], dict[int, int]], set[int]]:
    """Dinic's algorithm on classes -> senders.

    Returns the flow's value, the flow from each class to each sender, and the senders on the source side of the cut.
    """
    left = [amount for _, amount in sources]
    room = dict(capacity)
    flow: list[dict[int, int]] = [dict.fromkeys(key, 0) for key, _ in sources]
    users: dict[int, list[int]] = {s: [] for s in capacity}
    for i, (key, _) in enumerate(sources):
        for s in key:
            users[s].append(i)
    while True:
        # Levels by breadth-first search: classes at even, senders at odd levels.
        level_of_class = {i: 0 for i, amount in enumerate(left) if amount > 0}
        level_of_sender: dict[int, int] = {}
        frontier, level, found = list(level_of_class), 0, False
        while frontier and not found:
            reached = sorted({s for i in frontier for s in flow[i] if s not in level_of_sender})
            level_of_sender.update(dict.fromkeys(reached, level + 1))
            found = any(room[s] > 0 for s in reached)
            level += 2
            frontier = sorted({i for s in reached for i in users[s] if flow[i][s] > 0 and i not in level_of_class})
            level_of_class.update(dict.fromkeys(frontier, level))
        if not found:
            break
        search = _Search(flow, room, users, level_of_class, level_of_sender)
        for i in [i for i, amount in enumerate(left) if amount > 0]:
            while left[i] > 0:
                sent = search.push(i, left[i])
                if not sent:
                    break
                left[i] -= sent
    value = sum(amount for _, amount in sources) - sum(left)
    return value, {key: flow[i] for i, (key, _) in enumerate(sources)}, set(level_of_sender)


class _Search:
    """One blocking flow: depth-first along levels, each arc looked at once after it failed."""

    def __init__(
        self,
        flow: list[dict[int, int]],
        room: dict[int, int],
        users: dict[int, list[int]],
        level_of_class: dict[int, int],
        level_of_sender: dict[int, int],
    ) -> None:
        self.flow, self.room = flow, room
        self.level_of_class, self.level_of_sender = level_of_class, level_of_sender
        self.senders = {i: list(flow[i]) for i in level_of_class}
        self.users = {s: list(users[s]) for s in level_of_sender}

    def push(self, first: int, amount: int) -> int:
        """Send at most `amount` from class `first` along one path; how much went."""
        # Classes and senders in turn; a loop, since a path may be longer than Python allows calls.
        path = [first]
        while path:
            here = path[-1]
            if len(path) % 2:
                arcs, level = self.senders[here], self.level_of_class[here] + 1
                while arcs and self.level_of_sender.get(arcs[-1]) != level:
                    arcs.pop()
                if arcs:
                    path.append(arcs[-1])
                else:
                    path.pop()
                    if path:
                        self.users[path[-1]].pop()
            elif self.room[here] > 0:
                return self._send(path, amount)
            else:
                back, level = self.users[here], self.level_of_sender[here] + 1
                while back and not (self.level_of_class.get(back[-1]) == level and self.flow[back[-1]][here] > 0):
                    back.pop()
                if back:
                    path.append(back[-1])
                else:
                    path.pop()
                    self.senders[path[-1]].pop()
        return 0

    def _send(self, path: list[int], amount: int) -> int:
        forward = list(zip(path[::2], path[1::2], strict=True))
        backward = list(zip(path[2::2], path[1::2], strict=False))
        sent = min([amount, self.room[path[-1]], *(self.flow[i][s] for i, s in backward)])
        self.room[path[-1]] -= sent
        for i, s in forward:
            self.flow[i][s] += sent
        for i, s in backward:
            self.flow[i][s] -= sent
        return sent

"""Depth-first search over the order of unit tasks and their senders, with pruning.

A node is a set of tasks that run; its children are the next task with a sender, earliest start first. A branch is
cut off when its bound, which never exceeds the best completion (a port's busy time so far plus what must still pass it,
receive ports and ports of only senders alike), is no better than the best schedule known. The search ends when it has
looked at every branch or at `most_nodes` nodes; the first dive is a greedy schedule, so there always is an answer.
Equal tasks are one child.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..network import Network
from ..simulate import Leg
from .kinds import Choice, Kind, kinds_of
from .strategies import Strategy, UnitTask

MOST_NODES = 4000


def depth_first(
    network: Network, tasks: Sequence[UnitTask], strategy: Strategy, *, most_nodes: int = MOST_NODES
) -> list[Leg]:
    """The legs of the best order found."""
    search = _Search(kinds_of(network, tasks, strategy), 2 * len(network.members), most_nodes)
    search.run()
    return search.best


class _Search:
    def __init__(self, kinds: list[Kind], ports: int, nodes: int) -> None:
        self.kinds, self.nodes = kinds, nodes
        self.left = [kind.count for kind in kinds]
        self.free = [0.0] * ports
        # Of each kind, what passes a port whoever sends it.
        self.certain = [
            {
                port: min(c.seconds for c in kind.choices)
                for port in set.intersection(*(set(c.ports) for c in kind.choices))
            }
            for kind in kinds
        ]
        self.waiting = [0.0] * ports
        for kind, certain in zip(kinds, self.certain, strict=True):
            for port, seconds in certain.items():
                self.waiting[port] += seconds * kind.count
        self.best: list[Leg] = []
        self.best_seconds = math.inf

    def run(self) -> None:
        """Search; iterative, since there may be more tasks than Python allows calls."""
        path: list[tuple[int, Choice, list[float]]] = []
        stack = [self._children()]
        while stack and self.nodes > 0:
            if not stack[-1]:
                stack.pop()
                if path:
                    self._undo(*path.pop())
                continue
            i, choice = stack[-1].pop()
            self.nodes -= 1 if self.best else 0  # the first dive is free
            path.append((i, choice, self._do(i, choice)))
            seconds = max(self.free)
            if not any(self.left) and seconds < self.best_seconds:
                self.best_seconds, self.best = seconds, [c.leg for _, c, _ in path]
            bound = max(f + w for f, w in zip(self.free, self.waiting, strict=True))
            # A schedule must be better by more than rounding to be another one.
            stack.append(self._children() if any(self.left) and bound < self.best_seconds * (1 - 1e-12) else [])

    def _children(self) -> list[tuple[int, Choice]]:
        """Next tasks with a sender, best last."""
        keyed = []
        for i, kind in enumerate(self.kinds):
            if self.left[i]:
                for j, choice in enumerate(kind.choices):
                    start = max(self.free[p] for p in choice.ports)
                    waiting = max(self.waiting[p] for p in choice.ports)
                    keyed.append(((start, -waiting, -choice.seconds, i, j), (i, choice)))
        keyed.sort(key=lambda entry: entry[0], reverse=True)
        return [entry for _, entry in keyed]

    def _do(self, i: int, choice: Choice) -> list[float]:
        before = [self.free[p] for p in choice.ports]
        end = max(before) + choice.seconds
        for p in choice.ports:
            self.free[p] = end
        for p, seconds in self.certain[i].items():
            self.waiting[p] -= seconds
        self.left[i] -= 1
        return before

    def _undo(self, i: int, choice: Choice, before: list[float]) -> None:
        for p, value in zip(choice.ports, before, strict=True):
            self.free[p] = value
        for p, seconds in self.certain[i].items():
            self.waiting[p] += seconds
        self.left[i] += 1

"""Rounds of other algorithms for a plan's demand, to be run in place of its own (`resharding_network`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.resharding import Piece, RoundMessages
from meshwright.resharding.messages import as_messages, disjoint_groups, pieces
from meshwright.resharding.simulate import shared_seconds


def _unit_tasks(plan: Any) -> Iterator[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
    """Every slice that has to cross hosts: the piece, who holds it, who needs it."""
    demand = plan.demand
    for number, task in enumerate(demand.classes):
        if task.receivers:
            for entry, piece in pieces(plan, number, 0, task.bytes):
                yield piece, *demand.patterns[demand.pattern[entry]]


def send_recv(plan: Any) -> list[Any]:
    """Every slice from one of its holders, the one with least to send so far, to each device that needs it."""
    sent: dict[tuple[int, int], list[Any]] = {}
    home, load = plan.demand.network.domain_of, {}
    for piece, holders, needers in _unit_tasks(plan):
        far = [d for d in needers if home[d] not in {home[h] for h in holders}]
        giver = min(holders, key=lambda d: (load.get(home[d], 0), d))
        load[home[giver]] = load.get(home[giver], 0) + (piece.stop - piece.start) * len(far)
        for taker in far:
            sent.setdefault((giver, taker), []).append(piece)
    return _rounds(sent, {})


def local_all_gather(plan: Any) -> list[Any]:
    """Every slice cut among the devices that need it in a host, which then share what they have."""
    sent: dict[tuple[int, int], list[Any]] = {}
    shared: dict[tuple[int, int], list[Any]] = {}
    home, load = plan.demand.network.domain_of, {}
    for piece, holders, needers in _unit_tasks(plan):
        near = {home[h] for h in holders}
        for host in sorted({home[d] for d in needers} - near):
            takers = [d for d in needers if home[d] == host]
            giver = min(holders, key=lambda d: (load.get(home[d], 0), d))
            load[home[giver]] = load.get(home[giver], 0) + piece.stop - piece.start
            count = piece.stop - piece.start
            cuts = [piece.start + count * i // len(takers) for i in range(len(takers) + 1)]
            for taker, first, last in zip(takers, cuts, cuts[1:], strict=False):
                part = Piece(move=piece.move, slice=piece.slice, start=first, stop=last)
                sent.setdefault((giver, taker), []).append(part)
                for other in takers:
                    if other != taker:
                        shared.setdefault((taker, other), []).append(part)
    return _rounds(sent, shared)


def seconds_of(plan: Any, rounds: list[Any]) -> float:
    """What rounds take that are run as they are here: all messages of one on their way at once, sharing NICs fairly."""
    home, total = plan.demand.network.domain_of, 0.0
    for one in rounds:
        pairs: dict[tuple[int, int], int] = {}
        for message in (message for step in one.steps for message in step):
            ends = home[message.sender], home[message.receiver]
            size = sum((p.stop - p.start) * plan.demand.moves[p.move].item_bytes for p in message.pieces)
            pairs[ends] = pairs.get(ends, 0) + size
        total += shared_seconds(plan.demand.network, pairs)
    return total


def _rounds(sent: dict[tuple[int, int], list[Any]], shared: dict[tuple[int, int], list[Any]]) -> list[Any]:
    return [RoundMessages(steps=disjoint_groups(as_messages(sent)), spread=as_messages(shared))]

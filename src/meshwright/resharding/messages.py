"""What the rounds of a plan are on devices: messages, the copies inside a domain after them, and what needs no
network at all.

A transfer names a range of a tape, so a few data slices or parts of them. A *piece* is such a part: a range of the
elements of one slice in row-major order, which is one box or a few (`Piece.boxes`). In the sending domain the devices
that hold a slice take turns, in the receiving domain one of the devices that need it takes it in and the others copy
it from there, all before the next round: a relay's next hop may begin at any of them. Where a device holds what it
needs, the piece is *kept*: a view, no copy.

Computed round by round, on demand: a plan of a whole model stays small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .layout import Box
from .plan import ReshardPlan, domains_of_ports, rounds
from .ports import first_ports


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, stop), in row-major order, of a data slice of a tensor.

    >>> Piece(move=0, slice=((2, 4), (0, 3)), start=1, stop=6).boxes
    (((2, 3), (1, 3)), ((3, 4), (0, 3)))

    Args:
      move: position of the tensor.
      slice: the slice's box in the tensor.
      start: first element.
      stop: one past the last.
    """

    move: int
    slice: Box
    start: int
    stop: int

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The piece as disjoint boxes of the tensor, in row-major order."""
        return tuple(_boxes(self.slice, self.start, self.stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one device gives another in a round, or inside a domain.

    Args:
      sender: device id.
      receiver: device id.
      pieces: what is given, in tape order.
    """

    sender: int
    receiver: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMessages:
    """One round on devices.

    Args:
      steps: messages over the network, in groups in which no device sends or receives twice; with one NIC a host and
        one slice at a time there is one group.
      spread: copies inside the receiving domains, to be made once the round is over.
    """

    steps: tuple[tuple[Message, ...], ...]
    spread: tuple[Message, ...]


def round_messages(plan: ReshardPlan) -> Iterator[RoundMessages]:
    """The rounds of `plan` on devices, in order."""
    demand, moved = plan.demand, plan.transfers
    first = first_ports(demand.network)
    domain_of_port = domains_of_ports(demand).tolist()
    home, pattern = demand.network.domain_of, demand.pattern.tolist()
    ends: dict[tuple[int, int, int, int], tuple[list[int], list[int]]] = {}
    for entries in rounds(moved):
        sent: dict[tuple[int, int], list[Piece]] = {}
        spread: dict[tuple[int, int], list[Piece]] = {}
        # Ports that a port sends to at once, or receives from: each by another device, so that they do go at once.
        outward: dict[int, list[int]] = {}
        inward: dict[int, list[int]] = {}
        columns = (moved.number, moved.start, moved.stop, moved.sender, moved.receiver, moved.hop)
        for number, start, stop, sender, receiver, hop in zip(*(c[entries].tolist() for c in columns), strict=True):
            source, target = domain_of_port[sender], domain_of_port[receiver]
            if receiver not in outward.setdefault(sender, []):
                outward[sender].append(receiver)
            if sender not in inward.setdefault(receiver, []):
                inward[receiver].append(sender)
            turns = outward[sender].index(receiver), inward[receiver].index(sender)
            for entry, piece in pieces(plan, number, start, stop):
                key = (pattern[entry], source, target, hop)
                if key not in ends:
                    holders, needers = demand.patterns[key[0]]
                    givers = [d for d in (needers if hop else holders) if home[d] == source]
                    ends[key] = (givers, [d for d in needers if home[d] == target])
                givers, takers = ends[key]
                giver = givers[(entry + sender - first[source] + turns[0]) % len(givers)]
                taker = takers[(entry + receiver - first[target] + turns[1]) % len(takers)]
                sent.setdefault((giver, taker), []).append(piece)
                for other in takers:
                    if other != taker:
                        spread.setdefault((taker, other), []).append(piece)
        yield RoundMessages(steps=disjoint_groups(as_messages(sent)), spread=as_messages(spread))


def local_messages(plan: ReshardPlan) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """What needs no network: pieces that devices keep (sender = receiver), and copies inside a domain."""
    demand, home = plan.demand, plan.demand.network.domain_of
    kept: dict[tuple[int, int], list[Piece]] = {}
    copied: dict[tuple[int, int], list[Piece]] = {}
    for number, task in enumerate(demand.classes):
        for entry, piece in pieces(plan, number, 0, task.bytes):
            holders, needers = demand.patterns[demand.pattern[entry]]
            for d in needers:
                if d in holders:
                    kept.setdefault((d, d), []).append(piece)
                else:
                    near = [h for h in holders if home[h] == home[d]]
                    if near:
                        copied.setdefault((near[entry % len(near)], d), []).append(piece)
    return as_messages(kept), as_messages(copied)


def pieces(plan: ReshardPlan, number: int, start: int, stop: int) -> Iterator[tuple[int, Piece]]:
    """The pieces of a range of the tape of class `number`, each with its unit task."""
    demand, task = plan.demand, plan.demand.classes[number]
    starts = demand.start[task.first : task.last]
    first = task.first + int(np.searchsorted(starts, start, side="right")) - 1
    last = task.first + int(np.searchsorted(starts, stop, side="left"))
    columns = (demand.start, demand.bytes, demand.item_bytes, demand.move, demand.slice)
    rows = zip(*(column[first:last].tolist() for column in columns), strict=True)
    for entry, (begin, size, item, move, place) in enumerate(rows, start=first):
        low, high = max(start - begin, 0), min(stop - begin, size)
        yield entry, Piece(move=move, slice=demand.grids[move].box(place), start=low // item, stop=high // item)


def as_messages(found: dict[tuple[int, int], list[Piece]]) -> tuple[Message, ...]:
    """What (sender, receiver) are given, as messages in their order."""
    return tuple(Message(sender=s, receiver=r, pieces=tuple(p)) for (s, r), p in sorted(found.items()))


def disjoint_groups(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], ...]:
    """Koenig's edge colouring: as few groups as the busiest device has messages; large messages are placed first."""
    order = sorted(messages, key=lambda m: (-sum(p.stop - p.start for p in m.pieces), m.sender, m.receiver))
    # Of each end (device, whether it receives) the message of each group.
    at: dict[tuple[int, bool], dict[int, Message]] = {}
    for message in order:
        giver, taker = at.setdefault((message.sender, False), {}), at.setdefault((message.receiver, True), {})
        one, other = _free(giver), _free(taker)
        if one != other:
            # Swap the two groups along the path that begins at the receiver: afterwards `one` is free there too.
            path, end, group = [], (message.receiver, True), one
            while group in at[end]:
                path.append((at[end][group], group))
                step = at[end][group]
                end = (step.sender, False) if end[1] else (step.receiver, True)
                group = one + other - group
            for step, group in path:
                for end in ((step.sender, False), (step.receiver, True)):
                    if at[end].get(group) is step:
                        del at[end][group]
            for step, group in path:
                at[step.sender, False][one + other - group] = at[step.receiver, True][one + other - group] = step
        giver[one] = taker[one] = message
    found: dict[int, list[Message]] = {}
    for (_, receives), groups in sorted(at.items(), key=lambda entry: entry[0]):
        for group, message in groups.items() if not receives else ():
            found.setdefault(group, []).append(message)
    return tuple(tuple(found[group]) for group in sorted(found))


def _free(groups: dict[int, Message]) -> int:
    return next(i for i in range(len(groups) + 1) if i not in groups)


def _boxes(box: Box, start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if not box:
        yield ()
        return
    (low, _), *rest = box
    row = math.prod(b - a for a, b in rest)
    if len(box) == 1:
        yield ((low + start, low + stop),)
        return
    head, tail = -(-start // row), stop // row
    if head > tail:  # inside one row
        for inner in _boxes(tuple(rest), start - tail * row, stop - tail * row):
            yield ((low + tail, low + tail + 1), *inner)
        return
    for inner in _boxes(tuple(rest), start - (head - 1) * row, row) if start % row else ():
        yield ((low + head - 1, low + head), *inner)
    if head < tail:
        yield ((low + head, low + tail), *rest)
    for inner in _boxes(tuple(rest), 0, stop - tail * row):
        yield ((low + tail, low + tail + 1), *inner)

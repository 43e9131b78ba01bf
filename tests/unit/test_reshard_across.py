"""Copies between processes of one domain as rounds: each process is sent a piece once, in parts that fit."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from meshwright.resharding import Message, Piece, RoundMessages
from meshwright.runtime.resharding.across import with_rounds_across

ITEMS = (4, 1)


def process_of(device: int) -> int:
    return device // 2


def piece(move: int, start: int, stop: int) -> Piece:
    return Piece(move=move, slice=((0, 64),), start=start, stop=stop)


@st.composite
def messages(draw: st.DrawFn) -> list[Message]:
    """What devices of three processes give each other: no device a piece twice."""
    found = []
    for move, start in ((0, 0), (0, 32), (1, 7)):
        taken = piece(move, start, start + draw(st.integers(1, 32)))
        sender = draw(st.integers(0, 5))
        for receiver in sorted(draw(st.sets(st.integers(0, 5))) - {sender}):
            found.append(Message(sender=sender, receiver=receiver, pieces=(taken,)))
    return found


@settings(max_examples=200, deadline=None)
@given(messages(), st.integers(1, 200))
def test_everybody_gets_everything_and_every_process_once(asked: list[Message], most: int) -> None:
    """After a round that brings the pieces to their senders."""
    plan = [RoundMessages(steps=(), spread=tuple(asked))]
    rounds, near = with_rounds_across(
        plan, (), process_of=process_of, holder=lambda piece, process: None, item_bytes=ITEMS, most_bytes=most
    )
    assert near == ()
    wanted = {(m.receiver, p.move, e) for m in asked for p in m.pieces for e in range(p.start, p.stop)}
    has = {(m.sender, p.move, e) for m in asked for p in m.pieces for e in range(p.start, p.stop)}
    entered: list[tuple[int, int, int]] = []
    for one in rounds:
        for step in one.steps:
            assert len({m.sender for m in step}) == len({m.receiver for m in step}) == len(step)
        sent = [m for step in one.steps for m in step]
        for m in sent:
            assert process_of(m.sender) != process_of(m.receiver)
            sizes = [(p.stop - p.start) * ITEMS[p.move] for p in m.pieces]
            assert sum(sizes) <= most or [p.stop - p.start for p in m.pieces] == [1]
        for m in [*sent, *one.spread]:
            if m in one.spread:
                assert process_of(m.sender) == process_of(m.receiver)
            for p in m.pieces:
                for e in range(p.start, p.stop):
                    assert (m.sender, p.move, e) in has
                    has.add((m.receiver, p.move, e))
                    entered += [(process_of(m.receiver), p.move, e)] if m in sent else []
    assert wanted <= has
    assert len(entered) == len(set(entered))


def test_what_a_process_has_is_not_sent_to_it() -> None:
    far = Message(sender=0, receiver=3, pieces=(piece(0, 0, 64), piece(1, 0, 64)))
    rounds, near = with_rounds_across(
        [], [far, Message(sender=0, receiver=1, pieces=(piece(0, 0, 8),))], process_of=process_of,
        holder=lambda piece, process: 2 if (piece.move, process) == (0, 1) else None, item_bytes=ITEMS,
        most_bytes=1 << 20,
    )  # fmt: skip
    assert [(m.sender, m.receiver, m.pieces) for m in near] == [
        (0, 1, (piece(0, 0, 8),)), (2, 3, (piece(0, 0, 64),))
    ]  # fmt: skip
    assert [[(m.sender, m.receiver, m.pieces) for m in step] for one in rounds for step in one.steps] == [
        [(0, 3, (piece(1, 0, 64),))]
    ]

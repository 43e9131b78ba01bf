"""Watching over what this process waits for: for how long, and whether the others are still to come.

A step of several processes is blocked in a collective, out of reach of Python's exceptions, until all have issued it.
So a thread watches over the waits of the main thread, and ends the process with an error that says what it waited for
and whose part is missing:

* Calls that several processes make together (a step, the planning of one) are numbered. When nothing has happened for a
  moment, the thread tells the others in which call its process is, and reads of theirs (`peers`). If one has left before
  a call that others are in, or is in another call of the same number (it plans for arguments of other shapes, runs
  another step), nobody waits for it any longer: all processes end with an error that says so.
* A process that lives and does not come, because it hangs in its own code, can be told from a slow one by time alone:
  a wait without anything happening for `limit_seconds` is given up.

What a process knows is whom it waits for, who may wait in turn: where several processes give up, the one at fault is
the one that is named and names nobody.

A call costs a step some microseconds: it is counted and put into a queue. Nothing is sent while steps follow each other.

Time is counted in ticks of the thread, so that a process that was stopped and goes on does not count the pause.

At exit the thread ends before Python does, once what was expected is there: Python kills the threads that it outlives
wherever they are, and one that is inside of JAX's C++ then takes the whole process with it (SIGABRT).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from .peers import Over, peers

LIMIT_SECONDS = 600.0

# How often the thread looks at exit.
_LAST_TICK_SECONDS = 0.01
# How many of the last calls others are told of: those that may be issued and not computed yet, for the most part.
_RECENT_CALLS = 32


class Token(Protocol):
    """Something that is computed, such as a small array."""

    def is_ready(self) -> bool:
        """Whether it has been."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """What several processes do together: `number` counts from 1 among the calls of the same processes."""

    among: tuple[int, ...]
    number: int
    what: str


class Watch:
    """Watches over the waits of one thread.

    Args:
      limit_seconds: how long a wait may take without anything happening.
      give_up: called, in a thread of its own, with what was waited for and for how long; by default it ends all
        processes with an error.
    """

    def __init__(self, limit_seconds: float, give_up: Callable[[str, float], None] | None = None) -> None:
        self.limit_seconds = limit_seconds
        self._give_up = give_up or self._end_all
        self._waiting: Callable[[], str] | None = None
        self._call: Call | None = None
        self._issued: deque[tuple[Callable[[], str], Token, Call | None]] = deque()
        self._made: Counter[tuple[int, ...]] = Counter()
        self._recent: deque[Call] = deque(maxlen=_RECENT_CALLS)
        self._progress = 0
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    @contextlib.contextmanager
    def call(self, what: str, among: tuple[int, ...]) -> Iterator[None]:
        """A call that several processes make together, in the `with` block.

        Args:
          what: the same text in all of them.
          among: their numbers, in order.
        """
        if len(among) < 2:
            yield
            return
        self._start()
        self._made[among] += 1
        around, self._call = self._call, Call(among, self._made[among], what)
        self._recent.append(self._call)
        try:
            yield
        finally:
            self._call = around
            self._progress += 1

    @contextlib.contextmanager
    def over(self, what: Callable[[], str]) -> Iterator[None]:
        """A wait in the `with` block; an error there is told what was waited for.

        Args:
          what: says what is waited for and whose part it needs.
        """
        self._start()
        self._waiting = what
        try:
            yield
        except Exception as error:
            error.add_note(f"meshwright: while waiting for {what()}")
            raise
        finally:
            self._waiting = None
            self._progress += 1

    def follow(self, what: Callable[[], str], token: Token) -> None:
        """Expect, without waiting, that `token` is computed; one that is computed in error counts as well."""
        self._start()
        self._issued.append((what, token, self._call))

    def calls(self) -> dict[str, Any]:
        """The calls so far, for other processes: how many, and the last ones."""
        return {
            "made": [[list(among), number] for among, number in list(self._made.items())],
            "recent": [[list(one.among), one.number, one.what] for one in list(self._recent)],
        }

    def _start(self) -> None:
        if self._thread is None:
            peers.calls = self.calls
            self._thread = threading.Thread(target=self._run, name="meshwright.watch", daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def _end(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        seen, still, told = (0, 0), 0.0, (-1, -1)
        while not self._ending.is_set() or self._issued:
            tick = min(1.0, self.limit_seconds / 10)
            if self._ending.wait(tick):
                tick = min(tick, _LAST_TICK_SECONDS)
                time.sleep(tick)
            while self._issued and _is_over(self._issued[0][1]):
                self._issued.popleft()
                self._progress += 1
            now = (self._progress, self._made.total())
            what = self._waiting or (self._issued[0][0] if self._issued else None)
            still = still + tick if what is not None and seen == now else 0.0
            if seen == now and peers.are_joined:
                with contextlib.suppress(ConnectionError, RuntimeError, OSError):  # without it, nobody is told
                    if told != now:
                        peers.tell_at(self.calls())
                        told = now
                    self._compare()
            seen = now
            if what is not None and still >= self.limit_seconds:
                self._give_up(what(), still)
                return

    def _outstanding(self) -> list[Call]:
        """The calls whose end this process waits for, oldest first."""
        of_tokens = [call for _, _, call in list(self._issued) if call is not None]
        return list(dict.fromkeys(of_tokens if self._call is None else [*of_tokens, self._call]))

    def _compare(self) -> None:
        """End all processes if one will never come to a call that this one is in."""
        calls = self._outstanding()
        if not calls:
            return
        over = never_comes(calls, peers.me, peers.left(), peers.at(), peers.names)
        if over is not None:
            peers.end(over)

    def _end_all(self, what: str, seconds: float) -> NoReturn:
        """End all processes after `seconds` of waiting for `what`."""
        missing: list[str] = []
        calls = self._outstanding()
        if calls and peers.are_joined:
            with contextlib.suppress(Exception):
                missing = behind(calls[0], peers.at(), peers.names)
        peers.end(
            Over(
                got=f"nothing for {seconds:.0f} s from {what}{''.join(f'; {text}' for text in missing)}",
                needed="its part",
                try_="looking at the logs of those processes: one hangs, takes another way through the script, or "
                "itself waits for one that does, which its log then names; or "
                "meshwright.initialize(step_timeout_seconds=) where they need longer",
                by=peers.me,
            )
        )


def _made(calls: Mapping[str, Any], among: tuple[int, ...]) -> int:
    return next((number for those, number in calls["made"] if tuple(those) == among), 0)


def never_comes(
    calls: Sequence[Call],
    me: int,
    left: Mapping[int, Mapping[str, Any]],
    at: Mapping[int, Mapping[str, Any]],
    names: Callable[..., str],
) -> Over | None:
    """Why one of the processes will not come to a call, if that is known.

    Args:
      calls: those that process `me` is in.
      me: its number.
      left: of processes that have left, the calls that they have made (`Watch.calls`), and "how" they left.
      at: of processes that have been where they are for a while, the calls that they have made.
      names: processes in words.
    """
    for call in calls:
        waits = f"{names(me)} waits for it in {call.what}"
        for other in call.among:
            if other in left and _made(left[other], call.among) < call.number:
                return Over(
                    got=f"the end of {names(other)}, by {left[other]['how']}, while {waits}",
                    needed="as many steps in every process",
                    try_="loops that end after the same step in every process: batches of equal number on every host",
                    by=me,
                )
        # Who differs from the first process tells; that is enough for all to differ from none.
        first = call.among[0]
        for among, number, what in at.get(first, {}).get("recent", ()):
            if first != me and (tuple(among), number) == (call.among, call.number) and what != call.what:
                return Over(
                    got=f"{names(first)} in {what}, while {waits}",
                    needed="the same call in every process",
                    try_="arguments of the same shapes, and the same way through the script, in every process",
                    by=me,
                )
    return None


def behind(call: Call, at: Mapping[int, Mapping[str, Any]], names: Callable[..., str]) -> list[str]:
    """The processes that have not come to a call, and where they were last."""
    found = []
    for other in call.among:
        if other in at and (made := _made(at[other], call.among)) < call.number:
            last = next((what for _, _, what in reversed(at[other]["recent"])), "none")
            found.append(f"{names(other)} has made {made} of {call.number} calls, the last of which is {last}")
    return found


def _is_over(token: Token) -> bool:
    try:
        return token.is_ready()
    except RuntimeError:
        return True  # deleted, or failed: whoever reads it hears of that


# Of this process: its main thread walks through steps, and waits in one place at a time.
watch = Watch(LIMIT_SECONDS)

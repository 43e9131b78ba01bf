"""Watching over what this process waits for: for how long, and whether the others are still to come.

A step of several processes is blocked in a collective, out of reach of Python's exceptions, until all have issued it.
So a thread watches over the waits of the main thread, and ends the process with an error that says what it waited for
and whose part is missing:

* Calls that several processes make together (a step, the planning of one) are numbered. When nothing has happened for a
  moment, the thread tells the others in which call its process is; from time to time it reads of theirs (`peers`). If
  one has left before a call that others are in, or is in another call of the same number (it plans for arguments of
  other shapes, runs another step), all processes end with an error that says so.
* A process that lives and does not come, because it hangs in its own code, can be told from a slow one by time alone:
  a wait without anything happening for `limit_seconds` is given up.

A process knows only which process it waits for itself, and that one may be waiting for a third. Where several processes
give up, the faulty one is the process that others name in their errors and that has no such error itself.

A call costs a step some microseconds: it is counted and put into a queue. While steps follow each other the thread
sends a request every few seconds.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from .peers import Over, early, last_call, made_by, peers

LIMIT_SECONDS = 600.0

# How often the thread looks at exit.
_LAST_TICK_SECONDS = 0.01
# How often the thread reads of the others when nothing happens, and while steps follow each other: that one has left is
# noticed also by a process that waits for none.
_LOOK_SECONDS = 1.0
_SELDOM_SECONDS = 4.0
# How many runs of the same call others are told of. A process may be ahead of another by calls that wait for none.
_RECENT_RUNS = 32


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
        # Runs of the same call: processes, first and last number, and what it is.
        self._runs: deque[tuple[tuple[int, ...], int, int, str]] = deque(maxlen=_RECENT_RUNS)
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
        number = self._made[among] = self._made[among] + 1
        around, self._call = self._call, Call(among, number, what)
        first = number
        if self._runs and self._runs[-1][0] == among and self._runs[-1][3] == what:
            first = self._runs.pop()[1]
        self._runs.append((among, first, number, what))
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
        """The calls so far, for other processes: how many among which, and what the last are, in runs of the same."""
        return {
            "made": [[list(among), number] for among, number in list(self._made.items())],
            "recent": [[list(among), *rest] for among, *rest in list(self._runs)],
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
        seen, still, told, since_look = (0, 0), 0.0, (-1, -1), 0.0
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
            since_look += tick
            if peers.are_joined and since_look >= (_LOOK_SECONDS if seen == now else _SELDOM_SECONDS):
                since_look = 0.0
                with contextlib.suppress(Exception):  # of the connection to the coordinator, whose errors are many
                    if seen == now and told != now:
                        peers.tell_at(self.calls())
                        told = now
                    self._look()
            seen = now
            if what is not None and still >= self.limit_seconds:
                self._give_up(what(), still)
                return

    def _look(self) -> None:
        """End all processes if one will not come to a call that this one has made."""
        calls = self.calls()
        firsts = {among[0] for among, _ in calls["made"]} - {peers.me}
        over = never_comes(calls, peers.me, peers.left(), peers.at(firsts), peers.names)
        if over is not None:
            peers.end(over)

    def _end_all(self, what: str, seconds: float) -> NoReturn:
        """End all processes after `seconds` of waiting for `what`."""
        missing: list[str] = []
        call = self._issued[0][2] if self._issued else self._call
        if call is not None and peers.are_joined:
            with contextlib.suppress(Exception):
                missing = behind(call, peers.at(call.among), peers.names)
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


def never_comes(
    calls: Mapping[str, Any],
    me: int,
    left: Mapping[int, Mapping[str, Any]],
    at: Mapping[int, Mapping[str, Any]],
    names: Callable[..., str],
) -> Over | None:
    """Why one of the processes will not come to a call that this one has made, if that is known.

    Args:
      calls: those that process `me` has made (`Watch.calls`).
      me: its number.
      left: of processes that have left, those that they have made, and "how" they left; None of some.
      at: of processes that have been where they are for a while, those that they have made.
      names: processes in words.
    """
    for among, number in calls["made"]:
        for other in among:
            # Of one that is gone without a word that is not known: it may have made them all.
            if other in left and left[other]["made"] is not None and made_by(left[other], among) < number:
                return early(other, left[other], f"{names(me)} waits for it in {last_call(calls, among)}", me, names)
    for among, first, last, what in calls["recent"]:
        # Who differs from the first process tells; that is enough for all to differ from none.
        other = among[0]
        known = left.get(other) or at.get(other)
        for those, its_first, its_last, theirs in known["recent"] if known is not None and other != me else ():
            number = max(first, its_first)
            if those == among and number <= min(last, its_last) and theirs != what:
                return Over(
                    got=f"{names(other)} in {theirs} (call {number}), while {names(me)} waits for it in {what}",
                    needed="the same call in every process",
                    try_="arguments of the same shapes, and the same way through the script, in every process",
                    by=me,
                )
    return None


def behind(call: Call, at: Mapping[int, Mapping[str, Any]], names: Callable[..., str]) -> list[str]:
    """The processes that have not come to a call, and where they were last."""
    found = []
    for other in call.among:
        if other in at and made_by(at[other], call.among) < call.number:
            last = last_call(at[other], call.among)
            found.append(f"{names(other)} has not come to call {call.number}, its last is {last}")
    return found


def _is_over(token: Token) -> bool:
    try:
        return token.is_ready()
    except RuntimeError:
        return True  # deleted, or failed: whoever reads it hears of that


# Of this process: its main thread walks through steps, and waits in one place at a time.
watch = Watch(LIMIT_SECONDS)

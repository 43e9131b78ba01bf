"""A limit on waiting for other processes, where nobody else sets one.

A launcher ends all processes when one fails, and JAX's heartbeats end them when one dies. Neither sees a process that
lives and does not come: one that hangs in its own code, or took another branch than the others. Those that wait for it
are blocked in a collective, out of reach of Python's exceptions. So a thread watches over the waits, counts how long
nothing has happened, and ends the process with an error that says what it waited for and whose part is missing.

What a process knows is whom it waits for, who may wait in turn: where several processes give up, the one at fault is
the one that is named and names nobody.

Time is counted in ticks of the thread, so that a process that was stopped and goes on does not count the pause.

At exit the thread ends before Python does, once what was expected is there: Python kills the threads that it outlives
wherever they are, and one that is inside of JAX's C++ then takes the whole process with it (SIGABRT).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol

LIMIT_SECONDS = 600.0

# How often the thread looks at exit.
_LAST_TICK_SECONDS = 0.01


class Token(Protocol):
    """Something that is computed, such as a small array."""

    def is_ready(self) -> bool:
        """Whether it has been."""
        ...


class Watch:
    """Watches over the waits of one thread.

    Args:
      limit_seconds: how long a wait may take without anything happening.
      give_up: called, in a thread of its own, with what was waited for and for how long; by default it prints an error
        and ends the process with status 1.
    """

    def __init__(self, limit_seconds: float, give_up: Callable[[str, float], None] | None = None) -> None:
        self.limit_seconds = limit_seconds
        self._give_up = give_up or end_this_process
        self._waiting: Callable[[], str] | None = None
        self._issued: deque[tuple[Callable[[], str], Token]] = deque()
        self._progress = 0
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

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
        self._issued.append((what, token))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="meshwright.watch", daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def _end(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        seen, still = self._progress, 0.0
        while not self._ending.is_set() or self._issued:
            tick = min(1.0, self.limit_seconds / 10)
            if self._ending.wait(tick):
                tick = min(tick, _LAST_TICK_SECONDS)
                time.sleep(tick)
            while self._issued and _is_over(self._issued[0][1]):
                self._issued.popleft()
                self._progress += 1
            what = self._waiting or (self._issued[0][0] if self._issued else None)
            still = still + tick if what is not None and seen == self._progress else 0.0
            seen = self._progress
            if what is not None and still >= self.limit_seconds:
                self._give_up(what(), still)
                return


def _is_over(token: Token) -> bool:
    try:
        return token.is_ready()
    except RuntimeError:
        return True  # deleted, or failed: whoever reads it hears of that


def end_this_process(what: str, seconds: float) -> NoReturn:
    """Print that `seconds` were spent on waiting for `what`, and leave without exit handlers, which would wait too."""
    message = (
        f"meshwright: refused to wait any longer: got nothing for {seconds:.0f} s from {what}; needed its part; where: "
        f"process {os.environ.get('MESHWRIGHT_PROCESS_ID', os.getpid())}; try looking at the logs of those processes: "
        "one hangs, takes another way through the script, or itself waits for one that does, which its log then names; "
        "or meshwright.initialize(step_timeout_seconds=) where they need longer"
    )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # one that is closed or full cannot be helped here
            if stream is sys.stderr:
                print(message, file=stream)
            stream.flush()
    os._exit(1)


# Of this process: its main thread walks through steps, and waits in one place at a time.
watch = Watch(LIMIT_SECONDS)

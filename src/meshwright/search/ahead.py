"""Work that a second process does ahead of time.

A copy of this process sends what this process would have found out itself, so that plans are the same with it and
without; where it cannot be, or comes to nothing, nothing is lost but time. There is one at a time.

Threads of a runtime do not survive in a copy: it may trace with JAX, but run nothing, and none is made beside
accelerators that are open, in runs of several processes, or where there is but one core.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pickle import UnpicklingError
from typing import Any

from .._jax.copies import renew_threads
from .._jax.distributed import accelerators_are_in_use, is_connected

# Of results that wait.
_PIPE_BYTES = 1 << 20

# Whether this process is a copy itself; and the copy of this one that is at work.
_copied = False
_at_work: Ahead | None = None


def is_copy() -> bool:
    """Whether this process is one."""
    return _copied


def can_copy() -> bool:
    """Whether a second process is of use, and safe: on Linux alone libraries of the system bear being copied."""
    if _copied or sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        return False
    return not is_connected() and not accelerators_are_in_use()


class Ahead:
    """A copy of this process, at work; none if there is one already. Use as a context: at its end the copy is gone.

    Args:
      work: what the copy does. It is given a function that sends something to this process, pickled.
    """

    def __init__(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        self._process = 0
        if not can_copy() or (_at_work is not None and _at_work.at_work):
            return
        with suppress(OSError):  # no memory, process or file is left for it: then there is no copy
            self._copy(work)

    def _copy(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        global _at_work
        self._messages, sender = Pipe(duplex=False)
        with sender, warnings.catch_warnings():
            _widen(sender)
            # Of threads of this process, which the copy does not have and does not wait for.
            warnings.simplefilter("ignore")
            self._process = os.fork()
            if not self._process:
                self._work(work, sender)
        _at_work = self

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def at_work(self) -> bool:
        """Whether there is a copy that has not come to its end."""
        if not self._process:
            return False
        with suppress(ChildProcessError):  # where somebody else waits for all children
            return os.waitid(os.P_PID, self._process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        return False

    def heard(self, wait_seconds: float = 0.0) -> list[Any]:
        """What the copy has sent since this was asked last.

        Args:
          wait_seconds: for the first of it.
        """
        found: list[Any] = []
        end = time.perf_counter() + wait_seconds
        while self._process:
            try:
                if not self._messages.poll(0.0 if found else max(end - time.perf_counter(), 0.0)):
                    break
                found.append(self._messages.recv())
            except (EOFError, OSError, UnpicklingError):
                self.end()
        return found

    def taken(self) -> list[Any]:
        """The same; the copy is gone then."""
        found = self.heard()
        self.end()
        return found

    def end(self) -> None:
        """Let the copy go, whatever it is at."""
        global _at_work
        if self._process:
            os.kill(self._process, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._process, 0)
            self._messages.close()
            self._process = 0
            _at_work = None

    def _work(self, work: Callable[[Callable[[Any], None]], None], sender: Connection) -> None:
        """What the copy does; it never returns."""
        global _copied
        _copied = True
        gc.disable()  # what it would look at lies in pages that the two share
        self._messages.close()  # so that sending fails where nobody is left to hear
        try:
            with open(os.devnull, "w") as nowhere:  # what there is to say this process says itself
                for stream in (1, 2):
                    os.dup2(nowhere.fileno(), stream)
            renew_threads()
            work(sender.send)
        finally:
            os._exit(0)


def _widen(sender: Connection) -> None:
    """Let results wait until somebody listens, rather than the copy."""
    import fcntl  # not on every system; copies are made on Linux alone

    with suppress(OSError):  # where so much is not allowed
        fcntl.fcntl(sender.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

"""Work that a second process does ahead of time.

A copy of this process sends what this process would have found out itself, so that plans are the same with it and
without; where it cannot be, or comes to nothing, nothing is lost but time. There is one at a time.

Threads of a runtime do not survive in a copy: it may trace with JAX, but run nothing, and none is made beside
accelerators that are open, in runs of several processes, or where there is but one core.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .._jax.copies import renew_threads
from .._jax.distributed import accelerators_are_in_use, is_connected
from .post import PIPE_BYTES, Unpacked, packed, widen

_INTERRUPTING = (signal.SIGINT, signal.SIGTERM)

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
        self._owner = os.getpid()
        self._unpacked = Unpacked()
        if not can_copy() or (_at_work is not None and _at_work.at_work):
            return
        with suppress(OSError):  # no memory, process or file is left for it: then there is no copy
            self._copy(work)

    def _copy(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        global _at_work
        self._pipe, sender = os.pipe()
        os.set_blocking(self._pipe, False)
        widen(sender)
        # Nobody is to be interrupted where it is not clear yet which of the two they are.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTING)
        try:
            with warnings.catch_warnings():
                # Of threads of this process, which the copy does not have and does not wait for.
                warnings.simplefilter("ignore")
                self._process = os.fork()
            if not self._process:
                self._work(work, sender, before)
            _at_work = self
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(sender)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def is_there(self) -> bool:
        """Whether there is a copy that this process made and has not let go, so that something may be heard from it:
        another copy may have inherited this."""
        return bool(self._process) and self._owner == os.getpid()

    @property
    def at_work(self) -> bool:
        """Whether there is a copy that has not come to its end."""
        if not self.is_there:
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
        while self.is_there:
            at_end = True
            try:
                while data := os.read(self._pipe, PIPE_BYTES):
                    found += self._unpacked.whole(data)
            except BlockingIOError:
                at_end = False
            except Exception:  # whatever came of it: it is of no use
                pass
            left = end - time.perf_counter()
            if at_end:
                self.end()
            elif found or left <= 0:
                break
            else:
                poll = select.poll()
                poll.register(self._pipe, select.POLLIN)
                poll.poll(1e3 * left)
        return found

    def end(self) -> None:
        """Let the copy go, whatever it is at."""
        global _at_work
        if not self.is_there:
            return
        with suppress(ProcessLookupError, ChildProcessError):  # where somebody else waits for all children
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        os.close(self._pipe)
        self._process = 0
        if _at_work is self:
            _at_work = None

    def _work(self, work: Callable[[Callable[[Any], None]], None], sender: int, mask: set[Any]) -> None:
        """What the copy does; it never returns."""
        global _copied
        try:
            _copied = True
            gc.disable()  # what it would look at lies in pages that the two share
            os.close(self._pipe)  # so that sending fails where nobody is left to hear
            for interrupting in _INTERRUPTING:
                signal.signal(interrupting, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            with open(os.devnull, "w") as nowhere:  # what there is to say this process says itself
                for stream in (1, 2):
                    os.dup2(nowhere.fileno(), stream)
            renew_threads()

            def send(found: Any) -> None:
                data = packed(found)
                while data:
                    data = data[os.write(sender, data) :]

            work(send)
        finally:
            os._exit(0)

"""Work that a second process does ahead of time.

A copy of this process does pieces of work in an order of their own. It sends what this process would have found out
itself, so that plans are the same with it and without; where it cannot be, or comes to nothing, nothing is lost but
time.

Threads of a runtime do not survive in a copy: its work must not call JAX, and none is made beside accelerators that are
open, in runs of several processes, or where there is but one core.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from .._jax.distributed import accelerators_are_in_use, is_connected

# Nobody waits longer for one piece of work.
_MOST_SECONDS = 60.0

# What no piece of work is called.
_NOTHING = object()


# Of results that wait.
_PIPE_BYTES = 1 << 20

# Whether this process is a copy itself.
_is_copy = False


def can_copy() -> bool:
    """Whether a second process is of use, and safe: on Linux alone libraries of the system bear being copied."""
    if _is_copy or sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        return False
    return not is_connected() and not accelerators_are_in_use()


class Ahead:
    """A copy of this process, at work. Use as a context: at its end the copy is gone.

    Args:
      keys: of the pieces of work, in the order in which they are done.
      work: one of them, without JAX; what it returns is pickled.
    """

    def __init__(self, keys: Sequence[Hashable], work: Callable[[Any], Any]) -> None:
        self._keys = list(keys) if can_copy() else []
        self._found: dict[Hashable, Any] = {}
        self._begun: set[Hashable] = set()
        self._given: set[Hashable] = set()
        self._process = 0
        if not self._keys:
            return
        with suppress(OSError):  # no memory, process or file is left for it: then there is no copy
            self._copy(work)

    def _copy(self, work: Callable[[Any], Any]) -> None:
        # A byte for each: whether this process does it after all.
        self._mine = mmap.mmap(-1, len(self._keys))
        self._messages, sender = Pipe(duplex=False)
        with sender, warnings.catch_warnings():
            _widen(sender)
            # Of threads of this process, which the copy does not have and does not wait for.
            warnings.simplefilter("ignore")
            self._process = os.fork()
            if not self._process:
                self._work(work, sender)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process:
            os.kill(self._process, signal.SIGKILL)
            with suppress(ChildProcessError):  # where somebody else waits for all children
                os.waitpid(self._process, 0)
            self._messages.close()
            self._process = 0

    def taken(self) -> list[Any]:
        """What came of all work so far; the copy is gone then."""
        found = [self.take(key, wait_seconds=0.0) for key in self._keys]
        self.__exit__()
        return [one for one in found if one is not None]

    def take(self, key: Hashable, *, wait_seconds: float = _MOST_SECONDS) -> Any:
        """What came of a piece of work, if the copy has begun it; None if not, and then it never will. It is given
        once.

        Args:
          key: of the work.
          wait_seconds: for it to be done.
        """
        self._listen(0.0)
        if wait_seconds > 0 and key in self._begun and key not in self._found and key not in self._given:
            self._listen(min(wait_seconds, _MOST_SECONDS), until=key)
        if self._process and key in self._keys and key not in self._begun:
            self._mine[self._keys.index(key)] = 1
        found = self._found.pop(key, None)
        if found is not None:
            self._given.add(key)
        return found

    def _listen(self, seconds: float, until: Hashable = _NOTHING) -> None:
        """Hear what the copy has to say, for so long or until it has said this."""
        end = time.perf_counter() + seconds
        while self._process and until not in self._found:
            try:
                if not self._messages.poll(max(end - time.perf_counter(), 0.0)):
                    break
                key, found = self._messages.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                self.__exit__()
                break
            if found is None:
                self._begun.add(key)
            else:
                self._found[key] = found
        if until is not _NOTHING and until not in self._found:
            self.__exit__()  # it hangs, or is gone

    def _work(self, work: Callable[[Any], Any], sender: Connection) -> None:
        """What the copy does; it never returns."""
        global _is_copy
        _is_copy = True
        gc.disable()  # what it would look at lies in pages that the two share
        self._messages.close()  # so that sending fails where nobody is left to hear
        parent = os.getppid()
        try:
            for number, key in enumerate(self._keys):
                if not self._mine[number] and os.getppid() == parent:
                    sender.send((key, None))
                    sender.send((key, work(key)))
        finally:
            os._exit(0)


def _widen(sender: Connection) -> None:
    """Let results wait until somebody listens, rather than the copy."""
    import fcntl  # not on every system; copies are made on Linux alone

    with suppress(OSError):  # where so much is not allowed
        fcntl.fcntl(sender.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

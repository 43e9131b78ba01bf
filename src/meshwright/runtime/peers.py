"""What the processes of a run tell each other of their ends: one that fails, or leaves early, is named in all of them.

JAX alone does not tell: a process that leaves waits in JAX's exit handler for the others, which wait for it in a
collective, until a barrier fails after minutes and every process is aborted from C++. Here a process tells by the
coordinator's key-value store, which every process of a run is connected to:

    meshwright/over      why the run is over, once: an `Over`; or nothing, when all processes have left without error
    meshwright/left/P    that process P has left without error, and after which calls (`watch`)
    meshwright/at/P      in which call process P is, when it has been there for a while
    meshwright/who/P     the host and the process id of process P

A thread in each process waits for the first of these, which takes one pending request to the coordinator and no time of
a step. When it comes, the process prints it and ends with status 1, without exit handlers. A process that leaves without
error waits until all others have left as well, so that JAX's own barrier finds all of them there.

A process that is killed, or leaves by os._exit, tells nothing: `lifeline` sees that.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

# A request to the coordinator is renewed after so long.
_REQUEST_SECONDS = 60.0
# How long an error that a collective reports may be ahead of the reason that another process tells.
_AHEAD_SECONDS = 3.0
# How long process 0, which holds the coordinator, stays for the others to hear why the run is over.
_HEARD_SECONDS = 3.0
_TICK_SECONDS = 0.02
# One that has left waits for so long for the others to leave, and is then in the hands of JAX's barrier: they may have
# shut JAX down by hand, which is a barrier of its own.
_LEAVING_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """Why a run is over: an error for all of its processes.

    Args:
      got: what happened, with the processes to blame.
      needed: what would have been accepted.
      try_: real options.
      by: the process that found it.
    """

    got: str
    needed: str
    try_: str
    by: int

    def words(self, me: int) -> str:
        """The error, as process `me` prints it."""
        return (
            f"meshwright: refused to go on: got {self.got}; needed {self.needed}; where: process {me}; try {self.try_}"
        )


class Peers:
    """The processes of this run, of which this is one.

    Attributes:
      me: the number of this process.
      number: how many there are; 1 before they are joined.
      leaving: how this process leaves, when it does so without error.
    """

    def __init__(self) -> None:
        self.me, self.number = 0, 1
        self.leaving = "the end of its script, or sys.exit"
        self.calls: Callable[[], Any] = dict  # what `watch` knows of the calls so far, as JSON
        self._pid = 0
        self._listener: threading.Thread | None = None
        self._ending = threading.Lock()  # of the thread that ends this process
        self._over: Over | None = None
        self._heard = threading.Event()

    def join(self) -> None:
        """Take part, once this process is connected to the coordinator. Later calls do nothing."""
        from .._jax import distributed

        if self._listener is not None:
            return
        self.me, self.number = distributed.place()
        if self.number == 1:
            return
        self._pid = os.getpid()
        distributed.publish(f"meshwright/who/{self.me}", f"{socket.gethostname()}, pid {self._pid}", again=True)
        self._listener = threading.Thread(target=self._listen, name="meshwright.peers", daemon=True)
        self._listener.start()
        atexit.register(self._leave)

    @property
    def are_joined(self) -> bool:
        """Whether there are others, and they are told of this process. A fork of it is not one of them."""
        return self._listener is not None and os.getpid() == self._pid

    def names(self, *numbers: int) -> str:
        """Processes with their hosts, as far as these can be told."""
        from .._jax import distributed

        who: dict[str, str] = {}
        with contextlib.suppress(Exception):
            who = distributed.published("meshwright/who")
        return ", ".join(f"process {n} ({who.get(str(n), 'of an unknown host')})" for n in numbers)

    def left(self) -> dict[int, dict[str, Any]]:
        """The processes that have left without error: how, and after which calls."""
        return self._read("left")

    def at(self) -> dict[int, dict[str, Any]]:
        """The calls of processes that have been in one, or in none, for a while."""
        return self._read("at")

    def tell_at(self, calls: Any) -> None:
        """Tell the others in which call this process is."""
        from .._jax import distributed

        distributed.publish(f"meshwright/at/{self.me}", json.dumps(calls), again=True)

    def _read(self, folder: str) -> dict[int, dict[str, Any]]:
        from .._jax import distributed

        return {int(n): json.loads(text) for n, text in distributed.published(f"meshwright/{folder}").items()}

    # Ends

    def end(self, over: Over) -> NoReturn:
        """End this process and all others with an error that one of them has found; from any thread."""
        self._take_over_ending()
        said = self._told(over) if self.are_joined else over
        print_error(said.words(self.me))
        self._leave_at_once(1)

    def fail(self, reason: str, status: int, report: Callable[[], None], *, consequence: bool = False) -> NoReturn:
        """End this process with an error of its own, and all others because of it.

        Args:
          reason: the error, in a line.
          status: of this process.
          report: prints the error.
          consequence: whether it may come of the end of another process, which then may have told already.
        """
        self._take_over_ending()
        report()
        if self.are_joined:
            if consequence:
                self._heard.wait(_AHEAD_SECONDS)
            said = self._over or self._told(self._failure(reason))
            if said.by != self.me:
                print_error(said.words(self.me))
        self._leave_at_once(status)

    def _failure(self, reason: str) -> Over:
        return Over(
            got=f"the end of {self.names(self.me)} by {reason}", needed="every process of the run",
            try_=f"looking at the log of process {self.me}", by=self.me,
        )  # fmt: skip

    def _take_over_ending(self) -> None:
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread of this process is about to end it

    def _told(self, over: Over) -> Over:
        """Tell that the run is over; returns what was told first."""
        from .._jax import distributed

        try:
            distributed.publish("meshwright/over", json.dumps(asdict(over)))
        except FileExistsError:
            with contextlib.suppress(Exception):
                text = distributed.read("meshwright/over", _AHEAD_SECONDS)
                return Over(**json.loads(text)) if text else over
        except Exception:
            pass  # no coordinator any more: the others hear of that
        return over

    def _leave_at_once(self, status: int) -> NoReturn:
        from .._jax import distributed

        if self.are_joined:
            with contextlib.suppress(Exception):
                heard = distributed.count("meshwright/heard", 1 if self.me else 0)
                until = time.monotonic() + _HEARD_SECONDS
                while self.me == 0 and heard < self.number - 1 and time.monotonic() < until:
                    time.sleep(_TICK_SECONDS)
                    heard = distributed.count("meshwright/heard", 0)
        flush()
        os._exit(status)

    def _listen(self) -> None:
        from .._jax import distributed

        while True:
            try:
                text = distributed.read("meshwright/over", _REQUEST_SECONDS)
            except TimeoutError:
                continue
            except ConnectionAbortedError:
                return  # this process has left the coordinator itself
            except Exception as error:
                self._over = self._lost(error)
            else:
                if not text:
                    return
                self._over = Over(**json.loads(text))
            self._heard.set()
            if self._ending.acquire(blocking=False):
                print_error(self._over.words(self.me))
                self._leave_at_once(1)
            return

    def _lost(self, error: Exception) -> Over:
        return Over(
            got=f"no connection to the coordinator of process 0: {str(error).splitlines()[0]}",
            needed="every process of the run", try_="looking at the log of process 0", by=0,
        )  # fmt: skip

    def _leave(self) -> None:
        """At exit: tell the others, and wait until they have left as well, or one has told of an error."""
        from .._jax import distributed

        if not self.are_joined or self._listener is None or not distributed.is_connected():
            return
        with contextlib.suppress(Exception):
            calls = {"how": self.leaving, **self.calls()}
            distributed.publish(f"meshwright/left/{self.me}", json.dumps(calls), again=True)
            if distributed.count("meshwright/leaving") == self.number:
                distributed.publish("meshwright/over", "")
        self._listener.join(_LEAVING_SECONDS)


def print_error(text: str) -> None:
    """A line on stderr, if that can be written to."""
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr, flush=True)


def flush() -> None:
    """Write out what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # one that is closed or full cannot be helped here
            stream.flush()


# Those of this process.
peers = Peers()

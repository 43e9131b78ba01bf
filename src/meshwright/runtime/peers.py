"""What the processes of a run tell each other of their ends: one that fails, or leaves early, is named in all of them.

JAX alone does not tell: a process that leaves waits in JAX's exit handler for the others, which wait for it in a
collective, until a barrier fails after minutes and every process is aborted from C++. Here a process tells by the
coordinator's key-value store, which every process of a run is connected to:

    meshwright/over         why the run is over, once: an `Over`; or nothing, when all processes have left without error
    meshwright/left/P       that process P has left, how, and after which calls (`watch`)
    meshwright/at/P/calls   in which call process P is, when it has been there for a while
    meshwright/who/P        the host and the process id of process P

A thread in each process waits for the first of these, which takes one pending request to the coordinator and no time
of a step. When it comes, the process prints it and ends with status 1, without exit handlers. A process that leaves
without error waits until all others have left as well, so that JAX's own barrier finds all of them there.

A process that is killed, or leaves by os._exit, tells nothing: `lifeline` notices, and process 0 tells.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from .lifeline import keep_lifeline

# A request to the coordinator is renewed after so long.
_REQUEST_SECONDS = 60.0
# How long an error that a collective reports may be ahead of the reason that another process tells.
_AHEAD_SECONDS = 3.0
# How long process 0, which holds the coordinator, stays for the others to hear why the run is over.
_HEARD_SECONDS = 3.0
_TICK_SECONDS = 0.02
# A process that is gone without a word ends the others after so long, unless they end before, in the same way.
_GONE_SECONDS = 5.0
# What others hear may come of an error that this process is about to report itself.
_OWN_SECONDS = 0.5


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


_SILENT = "SIGKILL, a crash or os._exit: it told nothing"


class Peers:
    """The processes of this run, of which this is one.

    Attributes:
      me: the number of this process.
      number: how many there are; 1 before they are joined.
      leaving: how this process leaves, when it does so without error.
      calls: the calls so far that it has made together with others, for them (`watch.Watch.calls`).
      before_end: called when this process is about to end because of an error.
    """

    def __init__(self) -> None:
        self.me, self.number = 0, 1
        self.leaving = "the end of its script, or sys.exit"
        self.calls: Callable[[], dict[str, Any]] = lambda: {"made": [], "recent": []}
        self.before_end: Callable[[], None] = lambda: None
        self._pid = 0
        self._listener: threading.Thread | None = None
        self._ending = threading.Lock()  # of the thread that ends this process
        self._over: Over | None = None
        self._heard = threading.Event()
        self._are_gone: set[int] = set()

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
        host = (distributed.coordinator_address() or "").rpartition(":")[0].strip("[]")
        with contextlib.suppress(OSError):  # no port to be had: JAX's heartbeats alone
            keep_lifeline(
                self.me, host, lambda text: distributed.publish("meshwright/lifeline", text),
                lambda: distributed.read("meshwright/lifeline", _REQUEST_SECONDS), self._gone,
            )  # fmt: skip
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
        """The processes that have left: how, and after which calls; of those that are gone without a word, None."""
        from .._jax import distributed

        return {int(n): json.loads(text) for n, text in distributed.published("meshwright/left").items()}

    def at(self, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
        """The calls of those of some processes that have been in one, or in none, for a while."""
        from .._jax import distributed

        told = {n: distributed.published(f"meshwright/at/{n}").get("calls") for n in numbers}
        return {n: json.loads(text) for n, text in told.items() if text is not None}

    def tell_at(self, calls: Any) -> None:
        """Tell the others in which call this process is."""
        from .._jax import distributed

        distributed.publish(f"meshwright/at/{self.me}/calls", json.dumps(calls), again=True)

    # Ends

    def end(self, over: Over) -> NoReturn:
        """End this process and all others with an error that one of them has found; from any thread."""
        self._take_over_ending()
        self.before_end()
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
        self.before_end()
        report()
        if self.are_joined:
            said = self._told((consequence and self._cause()) or self._end_of(self.me, reason))
            if consequence and said.by != self.me:
                print_error(said.words(self.me))
        self._leave_at_once(status)

    def _end_of(self, process: int, reason: str) -> Over:
        return Over(
            got=f"the end of {self.names(process)} by {reason}", needed="every process of the run",
            try_=f"looking at the log of process {process}", by=process,
        )  # fmt: skip

    def _cause(self) -> Over | None:
        """The end of another process that explains an error here, if one becomes known soon."""
        until = time.monotonic() + _AHEAD_SECONDS
        while not self._heard.wait(_TICK_SECONDS) and time.monotonic() < until:
            with contextlib.suppress(Exception):
                for process, one in self.left().items():
                    if one["made"] is None:
                        return self._end_of(process, one["how"])
        return self._over

    def _gone(self, process: int) -> None:
        """Another process has ended, perhaps without a word: by process 0 all are told, or by each of process 0."""
        from .._jax import distributed

        self._are_gone.add(process)
        if process == 0:
            self._lost()
            return
        if self._heard.wait(_TICK_SECONDS):
            return
        with contextlib.suppress(Exception):
            left = {"how": _SILENT, "made": None, "recent": []}
            distributed.publish(f"meshwright/left/{process}", json.dumps(left), again=True)
        if not self._heard.wait(_GONE_SECONDS):
            self.end(self._end_of(process, _SILENT))

    def _take_over_ending(self) -> None:
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread of this process is about to end it

    def _told(self, over: Over) -> Over:
        """Tell that the run is over; returns what was told first."""
        from .._jax import distributed

        if self._over is not None:
            return self._over
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
        flush()
        if self.are_joined and self.me == 0:
            # With it goes the coordinator, of which the others are to hear first.
            until = time.monotonic() + _HEARD_SECONDS
            while len(self._are_gone) < self.number - 1 and time.monotonic() < until:
                time.sleep(_TICK_SECONDS)
        os._exit(status)

    def _listen(self) -> None:
        from .._jax import distributed

        while True:
            try:
                text = distributed.read("meshwright/over", _REQUEST_SECONDS)
            except TimeoutError:
                continue
            except ConnectionAbortedError:
                self._heard.set()  # of the rest nothing can be heard: the script has shut JAX down itself
                return
            except Exception:
                self._lost()
                return
            self._over = Over(**json.loads(text)) if text else None
            self._heard.set()
            if self._over is None:
                return
            time.sleep(_OWN_SECONDS)
            if self._ending.acquire(blocking=False):
                self.before_end()
                print_error(self._over.words(self.me))
                self._leave_at_once(1)
            return

    def _lost(self) -> None:
        """Process 0 and the coordinator are gone. JAX is about to abort this process because of that."""
        from .._jax import distributed

        if not self._heard.is_set():
            self._over = Over(
                got=f"the end of process 0 ({distributed.coordinator_address()}) by {_SILENT}", by=0,
                needed="every process of the run", try_="looking at the log of process 0",
            )  # fmt: skip
            self._heard.set()
            self.end(self._over)

    def _leave(self) -> None:
        """At exit: tell the others, and wait until they have left as well, or one has told of an error."""
        from .._jax import distributed

        if not self.are_joined or self._listener is None or not distributed.is_connected():
            return
        with contextlib.suppress(Exception):
            calls = {"how": self.leaving, **self.calls()}
            distributed.publish(f"meshwright/left/{self.me}", json.dumps(calls), again=True)
            if distributed.count("meshwright/leaving") == self.number:
                over = unequal(self.left(), self.names)
                distributed.publish("meshwright/over", json.dumps(asdict(over)) if over else "")
        # As long as the others live: JAX's own barrier gives up after five minutes, and aborts them.
        self._listener.join()


def made_by(calls: Mapping[str, Any], among: Sequence[int]) -> int:
    """How many calls among some processes one of them has made.

    >>> made_by({"made": [[[0, 1], 3], [[0, 2], 5]]}, (0, 2))
    5
    """
    return next((number for those, number in calls["made"] if tuple(those) == tuple(among)), 0)


def unequal(left: Mapping[int, Mapping[str, Any]], names: Callable[..., str]) -> Over | None:
    """What is wrong when all processes have left without error: that one has made fewer calls than another.

    Args:
      left: of each process the calls that it has made, and how it left.
      names: processes in words.
    """
    for process, one in left.items():
        for among, number in one["made"]:
            for other in among:
                if made_by(left[other], among) < number:
                    return early(
                        other, left[other], f"{names(process)} went on to {last_call(one, among)}", process, names
                    )
    return None


def last_call(calls: Mapping[str, Any], among: Sequence[int]) -> str:
    """The last call among some processes that one of them has made."""
    return next(
        (f"{what} (call {last})" for those, _, last, what in reversed(calls["recent"]) if tuple(those) == tuple(among)),
        "none",
    )


def early(process: int, left: Mapping[str, Any], while_: str, by: int, names: Callable[..., str]) -> Over:
    """That a process has left before others have."""
    return Over(
        got=f"the end of {names(process)}, by {left['how']}, while {while_}", needed="as many steps in every process",
        try_="loops that end after the same step in every process: batches of equal number on every host", by=by,
    )  # fmt: skip


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

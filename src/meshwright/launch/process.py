"""One local process: started in a session of its own, waited for, and ended with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from .ending import failed_seconds
from .guard import Guard
from .log import FollowedLog
from .result import ProcessResult


class LocalProcess:
    """A process of the run, started when this is made.

    Its session is its own: Ctrl-C in the terminal reaches the launcher alone, which decides, and a signal to its
    process group reaches what it started itself (workers that load data, say) and nothing else.

    Args:
      process_id: its number in the run.
      script, arguments: what it runs.
      environment: all of its environment.
      log: what it prints goes there.
      guard: knows of it while it runs.

    Attributes:
      result: how it ended; None before.
      ended_seconds: when that was seen, by the monotonic clock.
    """

    def __init__(
        self,
        process_id: int,
        script: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: FollowedLog,
        guard: Guard,
    ) -> None:
        # -P: the folder the launcher was called in is not searched for modules before Python's own.
        self._told, tells = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        command = [
            sys.executable, "-P", "-m", "meshwright.launch.child", str(os.getpid()), str(tells), script, *arguments,
        ]  # fmt: skip
        self.process_id, self.log, self._guard = process_id, log, guard
        self.result: ProcessResult | None = None
        self.ended_seconds = 0.0
        self._failed_seconds: float | None = None
        self._started = time.monotonic()
        # No preexec_fn: running Python between fork and exec is unsafe in a process with threads, and JAX warns of it.
        try:
            self._process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log.written, stderr=subprocess.STDOUT,
                start_new_session=True, pass_fds=[tells],
            )  # fmt: skip
        except BaseException:
            os.close(self._told)
            raise
        finally:
            os.close(tells)
        guard.watch(self._process.pid)
        self._ended_by_launcher = False
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Its number in the system, which is that of its process group too."""
        return self._process.pid

    @property
    def failed_seconds(self) -> float | None:
        """When an error ended its script, by the monotonic clock; it may still be printing it. None if none has."""
        if self._failed_seconds is None and self.result is None:
            self._failed_seconds = failed_seconds(self._told)
        return self._failed_seconds

    def signal(self, number: int) -> None:
        """Send a signal to the process and to what it started; it counts as ended by the launcher from now on."""
        if self.result is None:
            self._ended_by_launcher = True
            self._signal_group(number)

    def reap(self) -> ProcessResult:
        """How the process ended; to be called once it has. What it left running in its group is killed."""
        if self.result is None:
            self.ended_seconds = time.monotonic()
            _ = self.failed_seconds  # the last that it can tell
            os.close(self._told)
            # Before its status is taken: until then the system gives its number to nobody else.
            self._signal_group(signal.SIGKILL)
            self._guard.forget(self.pid)
            status = self._process.wait()
            os.close(self.pidfd)
            self.result = ProcessResult(
                process_id=self.process_id, pid=self.pid, status=status,
                ended_by_launcher=self._ended_by_launcher, seconds=time.monotonic() - self._started, log=self.log.path,
            )  # fmt: skip
        return self.result

    def _signal_group(self, number: int) -> None:
        # Gone already, or made of processes that have become another user's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

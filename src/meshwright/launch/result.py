"""What became of a run on several local processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import LaunchError

_LAST_LINES = 30
_LAST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """How one process ended.

    Args:
      process_id: its number in the run, from 0.
      pid: its number in the system, while it ran.
      status: its exit status; -9 says that signal 9 killed it.
      ended_by_launcher: whether it was still running when the run was over for another reason, and was ended.
      seconds: how long it ran.
      log: the file with everything it printed.

    >>> ProcessResult(process_id=1, pid=7, status=-9, ended_by_launcher=False, seconds=1.5, log=Path("x")).ending
    'was killed by SIGKILL after 1.5 s'
    """

    process_id: int
    pid: int
    status: int
    ended_by_launcher: bool
    seconds: float
    log: Path

    @property
    def exit_status(self) -> int:
        """The status as a shell gives it: 128 + n for signal n."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        after = f"after {self.seconds:.1f} s"
        if self.status >= 0:
            return f"ended with status {self.status} {after}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:
            name = f"signal {-self.status}"
        return f"was killed by {name} {after}"

    def output(self) -> str:
        """Everything it printed, on stdout and stderr, in order."""
        return self.log.read_text("utf-8", errors="replace")

    def last_lines(self) -> str:
        """The end of what it printed, at most 30 lines."""
        with self.log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LAST_BYTES))
            lines = file.read().decode("utf-8", errors="replace").rstrip().splitlines()
        return "\n".join(lines[-_LAST_LINES:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a run.

    Args:
      script: what was run.
      ended_by: "itself" if every process ended with status 0, "failure" if one did not, "timeout", or "signal" if the
        launcher was told to stop.
      processes: how each process ended, by `process_id`.
      failed: the process that failed first, if one did.
      signal: the signal that told the launcher to stop, else 0.
      seconds: from the start of the first process to the end of the last.
    """

    script: str
    ended_by: Literal["itself", "failure", "timeout", "signal"]
    processes: tuple[ProcessResult, ...]
    failed: ProcessResult | None = None
    signal: int = 0
    seconds: float

    @property
    def exit_status(self) -> int:
        """The launcher's own: 0, the status of the first failure, 124 after a timeout, 128 + n for signal n."""
        if self.failed is not None:
            return self.failed.exit_status
        return {"itself": 0, "timeout": 124}.get(self.ended_by, 128 + self.signal)

    @property
    def problem(self) -> LaunchError | None:
        """None after a success; else the error that names the process to blame and its log, with its last lines."""
        what = f"{self.script} on {len(self.processes)} processes"
        still = [process for process in self.processes if process.ended_by_launcher]
        if self.failed is not None:
            return LaunchError(
                refused=what, got=f"process {self.failed.process_id} (pid {self.failed.pid}) {self.failed.ending}",
                needed="status 0 of every process; the other processes were ended", where=str(self.failed.log),
                try_=f"reading the log, which ends:\n{self.failed.last_lines() or '(it printed nothing)'}",
            )  # fmt: skip
        if self.ended_by == "timeout":
            numbers = ", ".join(str(process.process_id) for process in still)
            return LaunchError(
                refused=what, got=f"{self.seconds:.1f} s with process {numbers} still running",
                needed="an end within the timeout; they were ended", where=str(still[0].log),
                try_=f"a longer timeout, or reading the logs; the one named here ends:\n{still[0].last_lines()}",
            )  # fmt: skip
        if self.ended_by == "signal":
            return LaunchError(
                refused=what, got=f"{signal.Signals(self.signal).name} after {self.seconds:.1f} s",
                needed="to be left running; every process was ended", where=str(self.processes[0].log.parent),
                try_="starting it again",
            )  # fmt: skip
        return None

    def check(self) -> None:
        """Do nothing after a success.

        Raises:
          LaunchError: `problem`, after anything else.
        """
        if (problem := self.problem) is not None:
            raise problem

"""A small process that outlives a killed launcher for as long as it takes to end what the launcher has left.

When the launcher is killed with SIGKILL, the kernel takes the scripts along (`child.die_with`), but not what the
scripts have started. The guard holds the other end of a pipe from the launcher, over which it is told which process
groups run. However the launcher ends, the pipe closes, and the guard kills the groups that still do. It runs this file
by itself, which is why nothing of the package is imported here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable

_LIMIT_SECONDS = 10.0


class Guard:
    """The launcher's side: a guard runs inside the `with` block."""

    def __init__(self) -> None:
        # In a session of its own, out of reach of Ctrl-C and of signals to the launcher's group.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], bufsize=0, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def watch(self, group: int) -> None:
        """Have `group` killed if the launcher goes."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Leave `group` alone from now on; to be called while its number cannot have been given to another."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        # A guard that somebody has killed guards no more; the run goes on.
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None and not self._process.stdin.closed:
                self._process.stdin.write(line.encode())


def left_running(lines: Iterable[str]) -> list[int]:
    """The groups that were watched and not forgotten.

    >>> left_running(["+7\\n", "+8\\n", "-7\\n"])
    [8]
    """
    groups: dict[int, None] = {}
    for line in lines:
        if line.startswith("+"):
            groups[int(line[1:])] = None
        else:
            groups.pop(int(line[1:]), None)
    return list(groups)


if __name__ == "__main__":
    for left in left_running(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(left, signal.SIGKILL)

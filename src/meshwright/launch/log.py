"""The log of one process, and its lines as they come.

The process writes into its file by itself, so the log is complete however the process or the launcher ends, and no
process ever waits for somebody to read. The launcher follows the file and hands on each line once it is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_MOST_AT_ONCE = 1 << 20


class FollowedLog:
    """A log from its start on.

    Args:
      path: the file; it is created, or emptied.
      tell: called with each new line, without its end.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path = path
        # Appending, so that stdout and stderr of all of the process's own children never write over each other.
        self.written = path.open("ab", buffering=0)
        self.written.truncate(0)
        self._read = path.open("rb", buffering=0)
        self._tell = tell
        self._rest = b""

    def follow(self) -> bool:
        """Tell the lines that are new; returns whether there may be more to read already."""
        data = self._read.read(_MOST_AT_ONCE) or b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._tell(line.decode("utf-8", errors="replace"))
        return len(data) == _MOST_AT_ONCE

    def finish(self) -> None:
        """Tell all that is left, also a last line without an end, and close the file."""
        while self.follow():
            pass
        if self._rest:
            self._tell(self._rest.decode("utf-8", errors="replace"))
            self._rest = b""
        self.close()

    def close(self) -> None:
        """Close the file on this side."""
        self.written.close()
        self._read.close()

"""What the tests of several processes share: scripts written on the spot, and processes watched from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# The limit on anything that is expected to end by itself, generous for a busy machine.
LIMIT_SECONDS = 60.0
# The promise: from the first failure to the end of all.
ENDING_SECONDS = 10.0


def write_script(folder: Path, text: str, name: str = "script.py") -> Path:
    """A script of `text`, in which `place` is the number of the process and `mark(name)` leaves its pid in a file."""
    script = folder / name
    head = f"""
        import os, pathlib
        place = int(os.environ.get("MESHWRIGHT_PROCESS_ID", "0"))
        def mark(name, pid=None):
            path = pathlib.Path({str(folder)!r}, name)
            path.with_suffix(".new").write_text(str(pid or os.getpid()))
            path.with_suffix(".new").rename(path)
    """
    script.write_text(textwrap.dedent(head) + textwrap.dedent(text))
    return script


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to notice does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(holds: Callable[[], bool], what: str, seconds: float = LIMIT_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def marked(folder: Path, *names: str) -> list[int]:
    """The pids that scripts have left under `names`, once all are there."""
    wait_until(lambda: all((folder / name).exists() for name in names), f"marks {names}")
    return [int((folder / name).read_text()) for name in names]


@contextlib.contextmanager
def started(*command: str | Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process with its output piped; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


def command_line(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`meshwright launch ...`, to its end."""
    with started("-m", "meshwright", "launch", *arguments) as process:
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
    return subprocess.CompletedProcess([], process.returncode, output, errors)

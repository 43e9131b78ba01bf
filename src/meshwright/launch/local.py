"""Several processes on this machine, as one run: all start, one that fails ends all, none stays behind.

The launcher is one loop in one thread. It sleeps until a process ends (a pidfd becomes readable) or a tenth of a second
has passed, and then hands on what the processes have printed. An error in one causes errors in others, which may be
gone before it has printed its own: named is the one that failed first, which a script that raises tells before it
prints (`ending.tell_failed`). If the launcher itself is killed, the kernel kills the processes (`child.die_with`), and
a guard what they have started (`guard`).

Known limits: Linux only (pidfd, parent-death signals). What a script starts ends with it unless it leaves the script's
process group.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from .environment import Place, child_environment, gpus_for
from .errors import LaunchError
from .guard import Guard
from .log import FollowedLog
from .port import hold_port
from .process import LocalProcess
from .result import Result

_TICK_SECONDS = 0.1
# JAX catches SIGTERM and goes on, so this is for what is not JAX in a script; then comes SIGKILL.
_GRACE_SECONDS = 1.0
# A process in a call to the kernel that hangs does not die of SIGKILL before the call returns.
_KILLED_SECONDS = 5.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    processes: int,
    devices_per_process: int | None = None,
    log_dir: str | Path | None = None,
    timeout_seconds: float | None = None,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Result:
    """Run a script in several local processes, and wait until all have ended.

    Each process finds its place in its environment, where `meshwright.initialize()` reads it. When one fails, or the
    time is over, or SIGINT, SIGTERM or SIGHUP reaches this process, all are ended: SIGTERM, and SIGKILL one second
    later. Before that, those that are printing an error have a second to end by themselves.

    Args:
      script: a Python file.
      arguments: the script's own.
      processes: how many.
      devices_per_process: virtual CPU devices of each process, or GPUs where this machine has any.
      log_dir: where `process-0.log`, `process-1.log`, ... are written; a new folder for temporary files by default.
      timeout_seconds: for the whole run; none by default.
      port: of the coordinator on 127.0.0.1; a free one by default.
      environment: variables set beside those of this process.
      tell: called with each line that a process prints, with its number before it; `print` shows them.

    Returns:
      How it ended. A run that failed returns as well: `Result.check` raises for it.

    Raises:
      LaunchError: if the run cannot start.
    """
    script = str(script)
    _check(script, processes, devices_per_process, timeout_seconds)
    base = {**os.environ, **(environment or {})}
    gpus = gpus_for(base)
    folder = _log_folder(log_dir)
    with ExitStack() as stack:
        held = stack.enter_context(hold_port(port))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        places = [Place(coordinator=address, processes=processes, process_id=number) for number in range(processes)]
        environments = [child_environment(base, place, devices=devices_per_process, gpus=gpus) for place in places]
        stop = stack.enter_context(_stop_signals())
        guard = stack.enter_context(Guard())
        together = stack.enter_context(_Together(stop))
        for number, variables in enumerate(environments):
            log = FollowedLog(folder / f"process-{number}.log", _with_number(tell, number, processes))
            stack.callback(log.close)
            together.start(LocalProcess(number, script, arguments, environment=variables, log=log, guard=guard))
        return together.wait(script, timeout_seconds)


class _Together:
    """The running processes; leaving the `with` block, for whatever reason, ends those that still run."""

    def __init__(self, stop: list[int]) -> None:
        self._stop = stop
        self._all: list[LocalProcess] = []
        self._selector = selectors.DefaultSelector()
        self._started = time.monotonic()

    def __enter__(self) -> _Together:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()
        self._selector.close()

    def start(self, process: LocalProcess) -> None:
        """Take a process that has just been started into care."""
        self._all.append(process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)

    def wait(self, script: str, timeout_seconds: float | None) -> Result:
        """Follow the processes to the end of the run."""
        failed: LocalProcess | None = None
        over = False
        while self._selector.get_map() and failed is None and not self._stop and not over:
            ended = self._ended_within(_TICK_SECONDS)
            self._follow()
            if any(map(_ended_badly, ended)):
                failed = self._first_failure()
            over = timeout_seconds is not None and time.monotonic() - self._started > timeout_seconds
        running = bool(self._selector.get_map())
        self.end_all()
        for process in self._all:
            process.log.finish()
        stopped_by = self._stop[0] if self._stop and running and failed is None else 0
        return Result(
            script=script,
            ended_by="failure" if failed else "signal" if stopped_by else "timeout" if running else "itself",
            processes=tuple(process.reap() for process in self._all),
            failed=failed.reap() if failed else None,
            signal=stopped_by,
            seconds=time.monotonic() - self._started,
        )

    def _first_failure(self) -> LocalProcess:
        """The process that failed first, once those that have met an error have had time to print it."""
        until = time.monotonic() + _GRACE_SECONDS
        soon = time.monotonic() + _TICK_SECONDS
        while self._selector.get_map() and not self._stop and time.monotonic() < (until if self._fails() else soon):
            self._ended_within(_TICK_SECONDS / 4)
            self._follow()
        return min((one for one in self._all if one.failed_seconds or _ended_badly(one)), key=_failed_about)

    def _fails(self) -> bool:
        """Whether one that has met an error is still about to end."""
        return any(one.result is None and one.failed_seconds is not None for one in self._all)

    def end_all(self) -> None:
        """End every process that still runs, and return when none does."""
        stops = len(self._stop)
        self._signal(signal.SIGTERM)
        until = time.monotonic() + _GRACE_SECONDS
        # A second Ctrl-C ends the grace.
        while self._selector.get_map() and time.monotonic() < until and len(self._stop) == stops:
            self._ended_within(_TICK_SECONDS)
        self._signal(signal.SIGKILL)
        until = time.monotonic() + _KILLED_SECONDS
        while self._selector.get_map():
            self._ended_within(_TICK_SECONDS)
            if time.monotonic() > until:
                raise self._will_not_end()

    def _will_not_end(self) -> LaunchError:
        left = [self._selector.unregister(key.fd).data for key in list(self._selector.get_map().values())]
        names = ", ".join(f"process {process.process_id} (pid {process.pid})" for process in left)
        return LaunchError(
            refused="to wait any longer", got=f"{names} still there {_KILLED_SECONDS:g} s after SIGKILL",
            needed="processes that end when they are killed", where=str(left[0].log.path),
            try_="looking for a disk, network file system or driver that hangs: such a call cannot be interrupted",
        )  # fmt: skip

    def _signal(self, number: int) -> None:
        for process in self._all:
            process.signal(number)

    def _ended_within(self, seconds: float) -> list[LocalProcess]:
        ended: list[LocalProcess] = []
        for key, _ in self._selector.select(seconds):
            self._selector.unregister(key.fd)
            key.data.reap()
            ended.append(key.data)
        return ended

    def _follow(self) -> None:
        for process in self._all:
            process.log.follow()


def _ended_badly(process: LocalProcess) -> bool:
    return process.result is not None and process.result.status != 0


def _failed_about(process: LocalProcess) -> float:
    """When a process failed: as it has told, or else somewhat before it was seen to have ended.

    One that is killed cannot tell, and the errors of others may be told before its end is seen. Of SIGABRT that is not
    so: by it JAX ends processes that have lost another.
    """
    if process.failed_seconds is not None:
        return process.failed_seconds
    aborted = process.result is not None and process.result.status == -signal.SIGABRT
    return process.ended_seconds - (0.0 if aborted else _TICK_SECONDS)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals so far that ask for an end. They only leave a note: no process is lost between start and care."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        # Python hands signals to the main thread alone, so there is nothing to catch here.
        yield noted
        return

    def note(number: int, _: FrameType | None) -> None:
        noted.append(number)

    # One that is ignored stays so: nohup and a shell's background jobs mean it.
    wanted = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _with_number(tell: Callable[[str], None] | None, number: int, processes: int) -> Callable[[str], None]:
    if tell is None:
        return lambda line: None
    width = len(str(processes - 1))
    return lambda line: tell(f"[{number:{width}d}] {line}")


def _log_folder(log_dir: str | Path | None) -> Path:
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix="meshwright-launch-"))
    folder = Path(log_dir).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            refused="the folder for logs", got=error.strerror or str(error), needed="a folder that can be written",
            where=str(folder), try_="another --log-dir, or none for a new folder",
        ) from None  # fmt: skip
    return folder


def _check(script: str, processes: int, devices: int | None, timeout_seconds: float | None) -> None:
    if not sys.platform.startswith("linux"):
        raise LaunchError(
            refused="local processes", got=f"the system {sys.platform}", needed="Linux, which ends them with us",
            where="meshwright launch", try_="one process with virtual devices, or a Linux machine or container",
        )  # fmt: skip
    if not os.path.isfile(script):
        raise LaunchError(
            refused=f"script {script!r}", got="no such file" if not os.path.exists(script) else "no file",
            needed="a Python file", where=os.path.abspath(script), try_="its path from the folder you are in",
        )  # fmt: skip
    for name, value in (("processes", processes), ("devices-per-process", devices)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise LaunchError(
                refused=f"this number of {name.replace('-', ' ')}", got=repr(value), needed="a whole number >= 1",
                where=f"--{name}", try_="2",
            )  # fmt: skip
    if timeout_seconds is not None and not 0 < timeout_seconds < float("inf"):
        raise LaunchError(
            refused="the timeout", got=repr(timeout_seconds), needed="a positive number of seconds",
            where="--timeout", try_="600, or none",
        )  # fmt: skip

"""Ending a failed process at once, so that the others learn of it.

A Python process that ends with an error still runs its exit handlers, and JAX's waits there for every other process of
the run to end as well, for up to five minutes, while the others wait for this one in a collective. A process that has
failed therefore reports its error and leaves without exit handlers. Known limit: those of the user are not run either.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType
from typing import NoReturn


def end_on_uncaught_errors() -> None:
    """From now on an error that nobody catches ends this process with status 1 as soon as it is reported."""
    report = sys.excepthook

    def report_and_end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        report(kind, error, traceback)
        # At a prompt (python -i) an error is part of the conversation.
        if not (sys.flags.interactive or hasattr(sys, "ps1")):
            end_at_once(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = report_and_end


def end_at_once(status: int) -> NoReturn:
    """Leave with `status`, with what was printed written out and nothing else done."""
    for stream in (sys.stdout, sys.stderr):
        # A stream that is closed or full cannot be helped here.
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def tell_failed(pipe: int, failed_ns: int) -> None:
    """Tell the launcher when this process failed, by the clock that all processes of a machine share."""
    with contextlib.suppress(OSError):  # the script has closed what it did not open
        os.write(pipe, failed_ns.to_bytes(8, "little"))


def failed_seconds(pipe: int) -> float | None:
    """The launcher's side: when the process failed, by the monotonic clock; None if it has not said so."""
    try:
        told = os.read(pipe, 8)
    except BlockingIOError:
        return None
    return int.from_bytes(told, "little") / 1e9 if len(told) == 8 else None

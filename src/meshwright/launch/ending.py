"""Ending a failed process at once, so that the others learn of it.

A Python process that ends with an error still runs its exit handlers, and JAX's waits there for every other process of
the run to end as well, while the others wait for this one in a collective. A process that has failed therefore reports
its error, tells the others (`runtime.peers`), and leaves without exit handlers. Known limit: those of the user are not
run either.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from types import TracebackType
from typing import NoReturn

from ..runtime.peers import flush, peers


def end_on_uncaught_errors() -> None:
    """From now on an error that nobody catches ends this process with status 1, and tells the others, once it is
    reported."""
    report = sys.excepthook

    def report_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # At a prompt (python -i) an error is part of the conversation.
        if sys.flags.interactive or hasattr(sys, "ps1"):
            report(kind, error, trace)
            return
        peers.fail(
            f"{' '.join(traceback.format_exception_only(kind, error)).strip()[:1000]}{place_of(trace)}",
            130 if issubclass(kind, KeyboardInterrupt) else 1,
            lambda: report(kind, error, trace),
            consequence=_may_come_of_others(error),
        )

    sys.excepthook = report_and_end


def _may_come_of_others(error: BaseException) -> bool:
    """Whether an error is one of a compiled program, whose collectives fail when another process is gone.

    >>> _may_come_of_others(ValueError("UNKNOWN: Gloo all-reduce failed")), _may_come_of_others(ValueError("no"))
    (True, False)
    """
    return type(error).__module__.startswith("jax") or re.match(r"[A-Z_]{5,}: ", str(error)) is not None


def place_of(trace: TracebackType | None) -> str:
    """Where an error was raised, as far as that is known."""
    frames = traceback.extract_tb(trace)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def end_at_once(status: int) -> NoReturn:
    """Leave with `status`, with what was printed written out and nothing else done."""
    flush()
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

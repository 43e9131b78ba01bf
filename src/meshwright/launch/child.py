"""The first code of a local process: tie its life to the launcher's, run the script, and end at once if that fails.

Run by the launcher as ``python -P -m meshwright.launch.child LAUNCHER_PID PIPE SCRIPT [ARGUMENT ...]``. The script sees
what ``python SCRIPT ARGUMENT ...`` would show it: `__name__`, `sys.argv`, its folder first in `sys.path`, and its own
tracebacks. When it fails, the launcher is told so through the pipe before the error is printed: printing takes long
enough for another process to fail of it, and to be gone first.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import time
from types import TracebackType

from ..runtime.peers import peers
from .ending import end_at_once, place_of, tell_failed

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Run the script that the command line names."""
    launcher, pipe, script, *arguments = sys.argv[1:]
    die_with(int(launcher))
    os.set_inheritable(int(pipe), False)  # what the script starts has no part in it
    me = os.getpid()
    peers.before_end = lambda: tell_failed(int(pipe), time.monotonic_ns())
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code is not None and error.code != 0 and os.getpid() == me:  # what was forked has no part in it
            tell_failed(int(pipe), time.monotonic_ns())
        status = _status_of(error)
        peers.leaving = f"sys.exit({error.code!r:.1000}){place_of(error.__traceback__)}"
        if status and os.getpid() == me:
            peers.fail(peers.leaving, status, lambda: None)
        raise
    except BaseException as error:
        if os.getpid() == me:
            tell_failed(int(pipe), time.monotonic_ns())
        shown = error.with_traceback(_own_frames_removed(error.__traceback__))
        sys.excepthook(type(shown), shown, shown.__traceback__)
        end_at_once(130 if isinstance(error, KeyboardInterrupt) else 1)


def die_with(launcher: int) -> None:
    """Have the kernel kill this process when the process `launcher`, its parent, is gone, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # It may have gone before the call: then somebody else is the parent by now.
    if os.getppid() != launcher:
        end_at_once(1)


def _status_of(error: SystemExit) -> int:
    """The exit status Python would give; a text is printed, as Python does."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _own_frames_removed(traceback: TracebackType | None) -> TracebackType | None:
    """Without the leading frames of this file and of runpy; a script that cannot be parsed leaves none."""
    ours = {__file__, runpy.run_path.__code__.co_filename}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


if __name__ == "__main__":
    main()

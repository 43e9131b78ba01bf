"""The command `meshwright`, and `python -m meshwright`: runs `cli.main` and leaves without taking apart what it made.

After a large search Python frees millions of objects one by one that end with the process anyway, a third of a second.
So once everything that is registered for the end of the process has run, the process is left at once.
"""

from __future__ import annotations

import atexit
import os
import sys


def main() -> None:
    """Run the process's one command and exit.

    Raises:
      SystemExit: with the command's status.
    """
    ended: list[int] = []  # with this status; nothing is known of an end by another exception
    atexit.register(_leave, ended)  # before others are, for the first to be registered runs last
    from .cli import main as run  # what it imports registers things too

    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            ended.append(end.code or 0)
        raise


def _leave(ended: list[int]) -> None:
    """Leave with the status there is, unless something that was printed cannot be written: Python says so."""
    if not ended:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(ended[0])


if __name__ == "__main__":
    main()

"""`meshwright calibrate`: measuring under a progress bar, then the cluster as a file, as TOML or as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from .calibration import calibrate, calibration_document, check_out
from .text import calibration_text


def run(*, out: Path | None, quick: bool, as_json: bool) -> str:
    """Calibrate, and say what stdout is to show.

    Args:
      out: where to write the cluster; None for stdout, with the tables on stderr.
      quick: as of `calibrate`.
      as_json: whether stdout shows the one JSON object.

    Raises:
      PlanError: if `out` cannot be written.
    """
    if out is not None:
        check_out(out)
    with progress_bar() as tell:
        calibration = calibrate(quick=quick, tell=tell)
    if out is not None:
        calibration.save(out)
    if as_json:
        return json.dumps(calibration_document(calibration), allow_nan=False)
    if out is not None:
        return f"{calibration_text(calibration)}\n\nwritten to {out}: plan with --cluster {out}"
    # The cluster alone goes to stdout, so that it can be sent to a file.
    print(calibration_text(calibration), file=sys.stderr)
    return calibration.to_toml().rstrip("\n")


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar with what is being done and the share that is done, where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text, share: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda text, share: progress.update(task, description=text, completed=share)

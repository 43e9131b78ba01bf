"""What the command line prints, and where: refusals and progress on stderr, JSON alone on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from .errors import PlanError


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """A refusal is one message, not a traceback, unless the environment asks for one with MESHWRIGHT_DEBUG=1."""
    from .cluster import ClusterError

    try:
        yield
    except (PlanError, ClusterError) as error:
        if os.environ.get("MESHWRIGHT_DEBUG") == "1":
            raise
        print(f"meshwright: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


@contextlib.contextmanager
def stdout_for_json(wanted: bool) -> Iterator[None]:
    """While JSON is wanted, what a user's module prints goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A spinner with what is being done and for how long, where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        task = progress.add_task("")
        yield lambda text: progress.update(task, description=text)


def write(path: Path, text: str) -> None:
    """Write a figure, or refuse.

    Raises:
      PlanError: if the file cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise PlanError(
            refused="to write the figure", got=f"{type(error).__name__}: {error.strerror}", needed="a file to write",
            where=str(path), try_="another path",
        ) from error  # fmt: skip


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(document, allow_nan=False))

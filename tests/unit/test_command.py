"""How the command `meshwright` ends: with its status, what was printed and what was registered, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

HEAD = """
import atexit, sys
from meshwright import __main__, cli

class Taken:
    def __del__(self):
        print("taken apart")

taken = Taken()
taken.itself = taken  # lives until Python takes everything apart
"""


def ended(run: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command, where `cli.main` is `run`."""
    code = f"{HEAD}\ndef run():\n    {run}\n\ncli.main = run\n__main__.main()\n"
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, "-c", code], text=True, timeout=60, **given)


def test_what_is_registered_runs_and_nothing_is_taken_apart() -> None:
    found = ended('atexit.register(print, "last words"); print("first"); sys.exit(3)')
    assert (found.returncode, found.stdout, found.stderr) == (3, "first\nlast words\n", "")


def test_without_a_status_it_is_success() -> None:
    assert ended("sys.exit()").returncode == 0


def test_an_error_is_told_as_always() -> None:
    found = ended('raise RuntimeError("this is why")')
    assert found.returncode == 1
    assert found.stderr.endswith("RuntimeError: this is why\n")
    found = ended('sys.exit("refused")')
    assert (found.returncode, found.stderr) == (1, "refused\n")


def test_what_cannot_be_printed_is_no_success() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        # As an empty string it says nothing: what is printed waits for the end.
        found = ended('print("lost"); sys.exit(0)', stdout=closed, env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert found.returncode == 120  # Python's own
    assert "BrokenPipeError" in found.stderr


def test_the_module_is_the_command() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "meshwright", "plan", "gptt-tiny"], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 2
    assert "gpt-tiny" in found.stderr

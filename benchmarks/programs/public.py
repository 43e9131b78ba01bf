"""Where public code lies, and how to import modules of it that need more than their model does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

FOLDER = "MESHWRIGHT_PROGRAMS"


def import_from(*parts: str) -> None:
    """Let Python import from a folder of public code.

    Args:
      parts: of its path below the folder that the environment variable names, the repository's name first.

    Raises:
      FileNotFoundError: if it is not there.
    """
    sys.path.insert(0, str(_found(*parts)))


def _found(*parts: str) -> Path:
    path = Path(os.environ.get(FOLDER, f"({FOLDER} is not set)"), *parts)
    if not path.exists():
        raise FileNotFoundError(f"no {path}: {FOLDER} names the folder that has the repositories")
    return path


def source_of(*parts: str) -> tuple[str, str]:
    """The text of a file of public code, and its path; arguments as of `import_from`."""
    path = _found(*parts)
    return path.read_text(), str(path)


def stand_in(*modules: str) -> None:
    """Replace modules that public code imports and a train step does not use: input pipelines, logging, checkpoints.

    Args:
      modules: by full name, parents before children.
    """
    for module in modules:
        sys.modules[module] = MagicMock(name=module, __spec__=ModuleSpec(module, None), __path__=[])


def notebook(*parts: str, cells: Sequence[str]) -> dict[str, Any]:
    """What cells of a public notebook define.

    Args:
      parts: of its path, as of `import_from`.
      cells: how those that run begin.
    """
    file = _found(*parts)
    defined: dict[str, Any] = {}
    for cell in json.loads(file.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and source.startswith(tuple(cells)):
            exec(compile(source, str(file), "exec"), defined)
    return defined

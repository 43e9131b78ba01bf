"""Logs that no test asks for by name go where pytest cleans up."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _temporary_files_are_the_tests_own(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

"""The folder in which the pages' blocks run; it looks like a fresh clone after `make train`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``data/digits`` of the examples."""
    folder = tmp_path_factory.mktemp("docs-data") / "digits"
    command = [sys.executable, str(ROOT / "jobs" / "digits.py"), "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture
def clone(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: what is written there is the test's own."""
    for name in ("conf", "jobs", "requirements-petastorm.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(digits)
    monkeypatch.chdir(tmp_path)
    return tmp_path

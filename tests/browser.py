"""A real Chromium with which tests look at a page; a script installs it where it may."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parent.parent / ".ci" / "get_chromium.sh"
_OPTIONS = (
    "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-dev-shm-usage",
    "--no-sandbox",  # which root cannot have, and which pages of our own do not need
)  # fmt: skip


@functools.cache
def _found() -> tuple[str | None, str]:
    done = subprocess.run([_SCRIPT], capture_output=True, text=True, timeout=600)
    return (done.stdout.strip() or None), done.stderr.strip()


def chromium(*arguments: str, dark: bool = False) -> str:
    """Run Chromium with ``arguments``, the last of which is a URL; returns what it prints.

    Skips the test where there is none and none can be installed.
    """
    path, reason = _found()
    if path is None:
        pytest.skip(reason)
    options = [*_OPTIONS, *(["--force-dark-mode"] if dark else [])]
    with tempfile.TemporaryDirectory(prefix="sparkdl-chromium-") as profile:
        done = subprocess.run(
            [path, *options, f"--user-data-dir={profile}", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def dom(url: str, *, milliseconds: int = 0) -> str:
    """The page as it is after its scripts have run for so long, of the browser's own time."""
    budget = [f"--virtual-time-budget={milliseconds}"] if milliseconds else []
    return chromium(*budget, "--dump-dom", url)


def screenshot(url: str, path: Path, *, width: int, height: int, dark: bool = False) -> None:
    """Leave a picture of the page at ``path``."""
    chromium(f"--window-size={width},{height}", f"--screenshot={path}", url, dark=dark)

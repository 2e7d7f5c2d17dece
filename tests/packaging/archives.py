"""The archives that are built, and how a program is run outside of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COMMAND_SECONDS = 240


# What a clone holds; most of it has no place in a package.
SOURCES = (
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md",
    "benchmarks", "conf", "docs", "jobs", "pyproject.toml", "requirements.lock",
    "requirements-dev.lock", "requirements-petastorm.txt", "setup.py", "sparkdl", "tests",
)  # fmt: skip


@dataclass(frozen=True)
class Built:
    """Where the two archives are."""

    wheel: Path
    sdist: Path


def copy_sources(folder: Path) -> Path:
    """Copy them, since building leaves files in the tree; returns the folder.

    What other parts of the suite make in these folders meanwhile is no part of a clone.
    """
    made = shutil.ignore_patterns("_build", "__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=made)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def run(
    command: list[str],
    *,
    seconds: float = COMMAND_SECONDS,
    status: int = 0,
    folder: Path | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, outside of the repository and of this environment."""
    hidden = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        command,
        cwd=folder or "/",
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == status, f"{command}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done

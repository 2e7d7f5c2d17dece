"""Environments with the oldest and with the newest packages that setup.py's ranges allow.

They have the Python of this one, and the newest that of ``NEWEST_PYTHON`` if it names a program.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from tests.packaging.archives import ROOT, run
from tests.test_install import load

FOLDER = ROOT / "build" / "versions"
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
PYTHONS = {"newest": os.environ.get("NEWEST_PYTHON", sys.executable)}
INSTALL_SECONDS = 1500
UV = str(Path(sys.executable).with_name("uv"))
PROGRAM = Path(__file__).with_name("program.py")


@dataclass(frozen=True)
class Environment:
    """An environment, in which programs run outside of the repository."""

    folder: Path

    @property
    def models(self) -> Path:
        """Where its program saves models."""
        return self.folder / "models"

    def run(self, program: str, *arguments: str) -> str:
        """What a program of the environment prints, run to its end."""
        return run([str(self.folder / "bin" / program), *arguments], folder=self.folder).stdout

    def versions(self) -> dict[str, str]:
        """The versions of its Python and of its packages."""
        python = str(self.folder / "bin" / "python")
        listed = run([UV, "pip", "list", "--format", "json", "--python", python]).stdout
        found = {entry["name"]: entry["version"] for entry in json.loads(listed)}
        said = run([python, "-c", "import platform; print(platform.python_version())"]).stdout
        return {**found, "python": said.strip()}


@pytest.fixture(scope="session")
def environments() -> Callable[[str], Environment]:
    """Makes the environment ``oldest`` or ``newest`` anew, and trains in it, when first asked."""

    @cache
    def made(name: str) -> Environment:
        environment = Environment(FOLDER / name)
        words = ["--resolution", RESOLUTIONS[name], "--editable", ".[spark,torch]"]
        install(make_environment(environment.folder, PYTHONS.get(name, sys.executable)), *words)
        environment.run("python", str(PROGRAM), "train", str(environment.models))
        return environment

    return made


def install(python: Path, *words: str, folder: Path = ROOT) -> None:
    """Run ``pip install WORDS`` in a folder for another Python, with uv from where pip takes files.

    Other versions of torch may exist here as builds for CUDA only, which are gigabytes large. So
    it is the torch that ``make tools`` has installed, unless ``CUDA=1`` asks for all of its range.
    """
    ours = load("install")
    listed = run([sys.executable, "-m", "pip", "config", "list"]).stdout
    held = FOLDER / "held.txt"
    FOLDER.mkdir(parents=True, exist_ok=True)
    is_held = not os.environ.get("CUDA")
    held.write_text(f"torch=={metadata.version('torch')}\n" * is_held, encoding="utf-8")
    options = [*ours.uv_options(ours.settings_of(listed)), *ours.NOT_COMPRESSED]
    options += ["--quiet", "--python", str(python), "--constraints", str(held)]
    run([UV, "pip", "install", *options, *words], folder=folder, seconds=INSTALL_SECONDS)


def make_environment(folder: Path, program: str = sys.executable) -> Path:
    """Make an environment without packages anew; its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    make = [program, "-m", "venv", "--without-pip", str(folder)]
    run(make, seconds=INSTALL_SECONDS)
    return folder / "bin" / "python"

"""Environments with the oldest and with the newest packages that setup.py's ranges allow.

They have the Python of this one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
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
INSTALL_SECONDS = 600
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
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "list", "--format", "json"]
        listed = run([*uv, "--python", str(self.folder / "bin" / "python")]).stdout
        found = {entry["name"]: entry["version"] for entry in json.loads(listed)}
        return {**found, "python": platform.python_version()}


@pytest.fixture(scope="session")
def environments() -> Callable[[str], Environment]:
    """Makes the environment ``oldest`` or ``newest`` anew, and trains in it, when first asked."""

    @cache
    def made(name: str) -> Environment:
        environment = Environment(FOLDER / name)
        shutil.rmtree(environment.folder, ignore_errors=True)
        make = [sys.executable, "-m", "venv", "--without-pip", str(environment.folder)]
        run(make, seconds=INSTALL_SECONDS)
        python = environment.folder / "bin" / "python"
        install(python, RESOLUTIONS[name])
        environment.run("python", str(PROGRAM), "train", str(environment.models))
        return environment

    return made


def install(python: Path, resolution: str) -> None:
    """Install sparkdl, as a link to this tree, with uv from where pip takes its files.

    Other versions of torch may exist here as builds for CUDA only, which are gigabytes large. So
    it is the torch that ``make tools`` has installed, unless ``CUDA=1`` asks for all of its range.
    """
    ours = load("install")
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    held = FOLDER / "held.txt"
    is_held = not os.environ.get("CUDA")
    held.write_text(f"torch=={metadata.version('torch')}\n" * is_held, encoding="utf-8")
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet"]
    options = [*ours.uv_options(ours.settings_of(listed)), *ours.NOT_COMPRESSED]
    options += ["--python", str(python), "--resolution", resolution, "--constraints", str(held)]
    run([*uv, *options, "--editable", f"{ROOT}[spark,torch]"], seconds=INSTALL_SECONDS)

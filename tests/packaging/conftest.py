"""The wheel and the sdist, built once, and an environment that has nothing but the wheel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.archives import ROOT, Built, copy_sources, run

CLEAN = ROOT / ".venv-package"
BUILD_SECONDS = 300
INSTALL_SECONDS = 600


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built from a copy, so that nothing is left in the tree; the wheel from the sdist."""
    copy, target = copy_sources(tmp_path_factory.mktemp("clone")), tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(copy)]
    run(command, seconds=BUILD_SECONDS)
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="session")
def clean(built: Built) -> Iterator[Path]:
    """The folder of programs of an environment with the wheel and what it asks for, no more.

    It is kept: the next run needs the network only if ``setup.py`` has changed.
    """
    programs = CLEAN / "bin"
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check"]
    asked_for = (ROOT / "setup.py").read_text(encoding="utf-8")
    record = CLEAN / "installed.setup"
    if not record.is_file() or record.read_text(encoding="utf-8") != asked_for:
        run([sys.executable, "-m", "venv", "--clear", str(CLEAN)], seconds=INSTALL_SECONDS)
        run([*pip, "install", "--quiet", str(built.wheel)], seconds=INSTALL_SECONDS)
        record.write_text(asked_for, encoding="utf-8")
    else:
        again = ["install", "--quiet", "--no-deps", "--force-reinstall", str(built.wheel)]
        run([*pip, *again], seconds=INSTALL_SECONDS)
    yield programs

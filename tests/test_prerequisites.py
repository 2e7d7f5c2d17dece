"""A machine that lacks something hears about it in one sentence, before anything is made."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "check_prerequisites.sh"

GOOD_PYTHON = 'if [ "$1" = --version ]; then echo Python 3.12.1; fi; exit 0'
OLD_PYTHON = 'if [ "$1" = --version ]; then echo Python 3.9.2; exit 0; fi; exit 1'
NO_VENV = 'case "$2" in *ensurepip*) exit 1;; esac; exit 0'
JAVA_17 = "echo 'openjdk version \"17.0.2\" 2022-01-18' >&2"
JAVA_8 = "echo 'java version \"1.8.0_202\"' >&2"


def install(folder: Path, name: str, body: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder that is the whole PATH, with a good Python and a good Java."""
    folder = tmp_path / "bin"
    for tool in ("sh", "sed", "head"):
        install(folder, tool, f'exec {shutil.which(tool)} "$@"')
    install(folder, "python3", GOOD_PYTHON)
    install(folder, "java", JAVA_17)
    return folder


def check(machine: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    shell = shutil.which("sh")
    assert shell is not None
    return subprocess.run(
        [shell, str(SCRIPT), *arguments],
        env={"PATH": str(machine), **variables},
        capture_output=True,
        text=True,
    )


def refusal(machine: Path, **variables: str) -> str:
    """The one line on stderr of a check that fails."""
    result = check(machine, **variables)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    return result.stderr


def test_a_good_machine_gets_the_name_of_its_python(machine: Path) -> None:
    result = check(machine)
    assert (result.returncode, result.stdout, result.stderr) == (0, "python3\n", "")


def test_a_newer_python_is_found_beside_an_old_one(machine: Path) -> None:
    install(machine, "python3", OLD_PYTHON)
    install(machine, "python3.13", GOOD_PYTHON)
    assert check(machine).stdout == "python3.13\n"


def test_an_old_python(machine: Path) -> None:
    install(machine, "python3", OLD_PYTHON)
    assert "needs Python 3.11 or newer (found: Python 3.9.2)" in refusal(machine)


def test_no_python(machine: Path) -> None:
    (machine / "python3").unlink()
    assert "needs Python 3.11 or newer (found: none)" in refusal(machine)


def test_a_python_named_by_hand(machine: Path, tmp_path: Path) -> None:
    install(tmp_path, "mine", GOOD_PYTHON)
    assert check(machine, PYTHON=str(tmp_path / "mine")).stdout == f"{tmp_path}/mine\n"
    install(tmp_path, "mine", OLD_PYTHON)
    assert "is older than 3.11" in refusal(machine, PYTHON=str(tmp_path / "mine"))
    assert "is not an executable" in refusal(machine, PYTHON=str(tmp_path / "none"))


def test_a_python_without_venv(machine: Path) -> None:
    install(machine, "python3", NO_VENV)
    assert "apt-get install python3-venv" in refusal(machine)


def test_no_java(machine: Path) -> None:
    (machine / "java").unlink()
    assert "there is none on the PATH" in refusal(machine)
    assert check(machine, "python").returncode == 0


def test_an_old_java(machine: Path) -> None:
    install(machine, "java", JAVA_8)
    assert "the one on the PATH is version 1;" in refusal(machine)


def test_java_home_comes_first(machine: Path, tmp_path: Path) -> None:
    assert "there is none in JAVA_HOME=/none" in refusal(machine, JAVA_HOME="/none")
    install(tmp_path / "jdk" / "bin", "java", JAVA_17)
    (machine / "java").unlink()
    assert check(machine, JAVA_HOME=str(tmp_path / "jdk")).returncode == 0


def test_make_stops_before_it_makes_anything(machine: Path, tmp_path: Path) -> None:
    make = shutil.which("make")
    assert make is not None
    (machine / "java").unlink()
    copy = tmp_path / "clone"
    (copy / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", copy)
    shutil.copy(SCRIPT, copy / ".ci")
    result = subprocess.run(
        [make, "train"], cwd=copy, env={"PATH": str(machine)}, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "Spark needs Java 17" in result.stderr
    assert sorted(path.name for path in copy.iterdir()) == [".ci", "Makefile"]

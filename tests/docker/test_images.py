"""The images would build, and with the versions of the locks.

Nothing is built: that needs Docker's daemon. What can go wrong without it is looked at here.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.docker.context import (
    DOCKERFILE,
    ROOT,
    copied_files,
    copies,
    instructions,
    lay_out,
    visible_files,
)

TOOLS = Path(sys.executable).parent


def setup_py(name: str) -> object:
    """A constant of setup.py, or an argument of its call of setup()."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return ast.literal_eval(node.value)
        if isinstance(node, ast.keyword) and node.arg == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"setup.py has no {name}")


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements-dev.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def arguments() -> dict[str, str]:
    """ARGs and their defaults."""
    return dict(rest.partition("=")[::2] for name, rest in instructions() if name == "ARG")


def stages() -> dict[str, str]:
    """Each stage's name and what it begins from."""
    found = (rest.split() for name, rest in instructions() if name == "FROM")
    return {words[2]: words[0] for words in found}


def test_hadolint_finds_nothing() -> None:
    command = [TOOLS / "hadolint", "--failure-threshold", "info", "--no-color", DOCKERFILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_source_is_in_the_context() -> None:
    assert copies()
    for sources, _ in copies():
        for source in sources:
            assert copied_files(source), f"COPY {source}: nothing of the context"


def test_the_context_has_nothing_that_is_not_copied() -> None:
    copied = {
        path for sources, _ in copies() for source in sources for path in copied_files(source)
    }
    builder_reads = {".dockerignore", "docker/Dockerfile"}
    assert visible_files() - builder_reads == copied
    assert not [path for path in copied if path.endswith(".pyc")]


@pytest.mark.slow
def test_the_package_can_be_built_from_the_context(tmp_path: Path) -> None:
    lay_out(tmp_path / "image")
    source = tmp_path / "image"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("sparkdl/")}
    assert packed == copied_files("sparkdl")


def test_extras_and_what_they_need_are_known() -> None:
    extras, versions = setup_py("EXTRAS"), locked()
    assert isinstance(extras, dict)
    (named,) = re.findall(r"'\.\[([a-z,]+)\]'", DOCKERFILE.read_text())
    assert "spark" in named.split(",") and "torch" in named.split(",")
    for extra in named.split(","):
        for line in extras[extra]:
            requirement = Requirement(line)
            version = versions[requirement.name.lower()]
            assert requirement.specifier.contains(version), f"{line}, locked {version}"


def test_every_package_comes_in_the_version_of_the_lock() -> None:
    installing = [rest for name, rest in instructions() if name == "RUN" and "pip install" in rest]
    assert len(installing) == 3
    for line in installing:
        assert re.search(
            r"pip install --constraint (/opt/sparkdl/)?requirements(-dev)?\.lock ", line
        )


def test_python_is_one_that_the_package_supports() -> None:
    image = arguments()["PYTHON_IMAGE"]
    found = re.fullmatch(r"python:(\d\.\d+)-slim-bookworm", image)
    assert found is not None
    assert SpecifierSet(str(setup_py("python_requires"))).contains(found[1])
    classifiers = setup_py("classifiers")
    assert isinstance(classifiers, list)
    assert f"Programming Language :: Python :: {found[1]}" in classifiers


def test_java_is_one_that_spark_takes() -> None:
    (version,) = re.findall(r"openjdk-(\d+)-jre", DOCKERFILE.read_text())
    assert int(version) >= 17


def test_stages_build_on_each_other() -> None:
    found = stages()
    assert set(found) == {"runtime", "cpu", "gpu", "notebook"}
    for base in found.values():
        assert base in found or base == "${PYTHON_IMAGE}"


@pytest.mark.parametrize("stage", ["runtime", "notebook"])
def test_containers_do_not_run_as_root(stage: str) -> None:
    users: dict[str, str] = {}
    current = ""
    for name, rest in instructions():
        if name == "FROM":
            current = rest.split()[2]
        if name == "USER":
            users[current] = rest
    assert users[stage] == "185"


def test_shell_scripts_are_sound() -> None:
    scripts = [ROOT / "docker/entrypoint.sh", *ROOT.glob("conf/clusters/*.sh")]
    assert len(scripts) == 3
    for script in scripts:
        assert script.stat().st_mode & 0o111, f"{script} cannot be run"
        shell = shutil.which("bash")
        assert shell is not None
        done = subprocess.run([shell, "-n", script], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [TOOLS / "shellcheck", *scripts], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout

"""The wheel works where nothing else is, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sparkdl
from tests.packaging.archives import run

pytestmark = pytest.mark.timeout(900)

MOST_MODULES = 40
"""That ``import sparkdl`` may bring into a bare Python. Each costs time on every worker."""


def python(clean: Path, code: str) -> str:
    return run([str(clean / "python"), "-c", code]).stdout


def test_pip_finds_all_that_the_wheel_asks_for(clean: Path) -> None:
    assert "No broken requirements" in run([str(clean / "python"), "-m", "pip", "check"]).stdout


def test_neither_torch_nor_pyspark_come_along(clean: Path) -> None:
    listed = run([str(clean / "python"), "-m", "pip", "list", "--format", "json"]).stdout
    names = {entry["name"].lower() for entry in json.loads(listed)}
    assert "sparkdl-torch" in names
    assert not names & {"torch", "pyspark", "pandas"}
    assert len(names) <= 15


def test_the_package_is_the_installed_one(clean: Path) -> None:
    where = python(clean, "import sparkdl; print(sparkdl.__file__)").strip()
    assert Path(where).is_relative_to(clean.parent)


def test_importing_it_brings_few_modules(clean: Path) -> None:
    code = (
        "import json, sys; before = set(sys.modules); import sparkdl\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    modules = json.loads(python(clean, code))
    assert len(modules) <= MOST_MODULES, modules
    assert [name for name in modules if name.startswith("sparkdl")] == [
        "sparkdl",
        "sparkdl.errors",
        "sparkdl.familiar_names",
        "sparkdl.runtime",
        "sparkdl.runtime.installation",
        "sparkdl.runtime.public_names",
    ]


def test_the_command_knows_its_version(clean: Path) -> None:
    done = run([str(clean / "sparkdl"), "--version"])
    assert done.stdout == f"sparkdl {sparkdl.__version__}\n"


def test_the_doctor_says_what_is_missing(clean: Path) -> None:
    done = run([str(clean / "sparkdl"), "doctor"], status=1)
    for package in ("pyspark", "torch"):
        remedy = f'pip install "{package}'
        assert f"  wrong    {package:<14} is not installed; {remedy}" in done.stdout
    assert "  left out session        Spark cannot be asked without pyspark\n" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["evaluate", "--set", "model.path=m", "--set", "data.path=d"], "pyspark"),
        (["export", "m", "m.onnx"], "torch"),
    ],
)
def test_a_command_that_cannot_work_names_the_extra(
    clean: Path, arguments: list[str], package: str, tmp_path: Path
) -> None:
    (tmp_path / "m" / "metadata").mkdir(parents=True)  # files are looked for before
    (tmp_path / "d").mkdir()
    arguments = [word.replace("path=", f"path={tmp_path}/") for word in arguments]
    done = run([str(clean / "sparkdl"), *arguments], status=1)
    assert done.stderr.startswith(f"error: this needs {package}, which is not installed")
    assert done.stderr.count("\n") == 1


def test_starters_and_the_templates_of_pages_come_along(clean: Path) -> None:
    code = "from sparkdl.report import run_server as s; print(s.document('t', s.run_list([])))"
    assert "<style>" in python(clean, code)
    assert "[data]" in run([str(clean / "sparkdl"), "train", "--starter"]).stdout


def test_the_foreign_package_beside_it_is_reported(clean: Path) -> None:
    where = python(clean, "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    foreign = Path(where) / "sparkdl-0.2.2.dist-info"
    foreign.mkdir()
    try:
        done = run([str(clean / "sparkdl"), "--version"], status=1)
    finally:
        foreign.rmdir()
    assert "another package named 'sparkdl' (sparkdl-0.2.2.dist-info) is installed" in done.stderr
    assert "pip uninstall -y sparkdl sparkdl-torch" in done.stderr

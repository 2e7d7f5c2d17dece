"""In the wheel and in the sdist is what must be, and nothing else."""

from __future__ import annotations

import ast
import re
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser

import pytest

from tests.packaging.archives import ROOT, Built

pytestmark = pytest.mark.timeout(600)


def package_files() -> set[str]:
    """Every file of the package in the source tree, whatever its kind."""
    found = (path for path in (ROOT / "sparkdl").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def in_wheel(built: Built) -> set[str]:
    with zipfile.ZipFile(built.wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def metadata(built: Built) -> Message:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_is_the_package_and_its_metadata(built: Built) -> None:
    names = in_wheel(built)
    info = {name for name in names if ".dist-info/" in name}
    assert names - info == package_files()
    assert "sparkdl/py.typed" in names
    assert {name.partition("/")[2] for name in info} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt",
    }  # fmt: skip


def test_the_wheel_is_for_any_machine(built: Built) -> None:
    assert re.fullmatch(r"sparkdl_torch-[\w.]+-py3-none-any\.whl", built.wheel.name)


def test_the_sdist_is_what_a_wheel_is_built_from(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        files = (member for member in archive.getmembers() if member.isfile())
        names = {member.name.partition("/")[2] for member in files}
    own = {name for name in names if not name.startswith("sparkdl_torch.egg-info/")}
    assert own == package_files() | {
        "CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml",
        "setup.cfg", "setup.py",
    }  # fmt: skip


def test_the_core_asks_for_little(built: Built) -> None:
    asked = [str(line) for line in metadata(built).get_all("Requires-Dist") or []]
    core = {re.split(r"[<>=;\s]", line)[0] for line in asked if "extra ==" not in line}
    assert core == {
        "click", "cloudpickle", "cryptography", "fsspec", "jinja2", "markupsafe", "numpy",
        "pyarrow", "safetensors", "tqdm",
    }  # fmt: skip


def test_extras_can_be_installed_together(built: Built) -> None:
    extras = set(metadata(built).get_all("Provides-Extra") or [])
    assert extras >= {"spark", "connect", "torch", "onnx", "tune", "images", "all"}
    # It needs an environment of its own, so pip must not be asked to solve it with the others.
    assert "petastorm" not in extras


def test_everybody_is_told_name_version_and_licence(built: Built) -> None:
    found = metadata(built)
    tree = ast.parse((ROOT / "sparkdl" / "__init__.py").read_text(encoding="utf-8"))
    versions = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert [found["Name"], found["Version"]] == ["sparkdl-torch", *versions]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", changes, re.MULTILINE)
    assert dated[:1] == versions
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"

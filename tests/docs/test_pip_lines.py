"""The pages tell readers to install what setup.py allows, and their table of versions is true.

``make versions`` runs each of the lines in an environment of its own.
"""

from __future__ import annotations

import re
import shlex

import pytest
from packaging.requirements import Requirement

from sparkdl.runtime.versions import TESTED
from tests.docs.blocks import DOCS, ROOT
from tests.docs.commands import pip_lines, problem
from tests.test_install import declared

APART = {"py-spy", "petastorm"}
"""Packages of pages that sparkdl does not depend on."""
ROW = re.compile(r"^\| [^|]*?`?([\w-]+)`?\)? \| ([<>=.,\d]+) \| ([\d.]+) \| ([\d.]+) \|$", re.M)


def ends(lines: list[str]) -> dict[str, str]:
    """Package -> the range that requirements of setup.py give it."""
    found = [Requirement(line) for line in lines]
    return {one.name: str(one.specifier) for one in found}


def unwanted(line: str) -> str | None:
    """What is wrong with a line: a reader could get versions that setup.py does not allow."""
    words = shlex.split(line)
    if (wrong := problem(words)) is not None:
        return wrong
    known = ends([text for texts in declared().values() for text in texts])
    for word in words[2:]:
        if word.startswith("."):
            if "requirements.lock" not in words:
                return f"{word} without -c requirements.lock"
            if "-e" not in words:  # else it replaces what `make train` has installed
                return f"{word} without -e, so changes of the clone are not seen"
        elif not word.startswith("-") and not word.endswith((".lock", ".txt")):
            name = Requirement(word).name
            if name not in APART and ("<" in known.get(name, "<")):
                return f"{name} may come in a version that setup.py does not allow: name its extra"
    return None


def test_lines_are_found_in_text_blocks_and_notebooks() -> None:
    lines = pip_lines()
    assert "pip install -c requirements.lock -e '.[spark,torch]'" in lines
    assert "pip install -c requirements.lock -e '.[spark,torch,plot,demo]'" in lines
    assert "pip install --no-deps petastorm==0.13.1" in lines
    assert "pip install pillow" in lines
    assert all("`" not in line and "#" not in line for line in lines)


@pytest.mark.parametrize("line", pip_lines())
def test_a_line_installs_what_setup_py_allows(line: str) -> None:
    assert unwanted(line) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pip install '.[spark,torch]'", "without -c"),
        ("pip install -c requirements.lock -e '.[sparks]'", "no extras"),
        ("pip install -c requirements.lock '.[spark]'", "without -e"),
        ("pip install optuna", "may come in a version"),
        ("pip install no-such", "may come in a version"),
        ("pip install -r requirements.txt", "there is no"),
    ],
)
def test_a_wrong_line_is_found(line: str, expected: str) -> None:
    assert expected in (unwanted(line) or "")


def test_the_table_of_versions_is_that_of_setup_py_and_of_the_tests() -> None:
    page = (DOCS / "installation.md").read_text(encoding="utf-8")
    rows = {name.lower(): rest for name, *rest in ROW.findall(page)}
    allowed = ends([*declared()["core"], *declared()["spark"], *declared()["torch"]])
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    allowed["python"] = re.findall(r'python_requires="(.*)"', setup)[0]
    assert rows.pop("java")[0] == ">=17"
    assert set(rows) == set(TESTED)
    for name, (ranges, *tested) in rows.items():
        assert set(ranges.split(",")) == set(allowed[name].split(",")), name
        assert tuple(tested) == TESTED[name], name

"""The notebooks are whole, show what they do, and stand in the order in which they name each other.

``make record-notebooks`` runs them and keeps their outputs.
"""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def sources(path: Path, kind: str) -> list[str]:
    return [cell.source for cell in read(path).cells if cell.cell_type == kind]


def test_all_eight_are_there() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == [f"0{number}" for number in range(1, 9)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_shows_what_it_does_and_not_where_it_ran(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.get("execution_count") is None
        assert cell.metadata == {}
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [output.get("data", {}) for output in outputs]
    assert any("image/png" in one for one in data)
    text = "\n".join(
        [output.get("text", "") for output in outputs]
        + [value for one in data for kind, value in one.items() if kind.startswith("text/")]
    )
    assert "trained" in text or "ended" in text
    assert re.findall(r"(?<![\w~.])/(?:home|root|work|var|opt|usr|tmp/tmp)\b[^\s]*", text) == []
    assert set(re.findall(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", text)) <= {"127.0.0.1"}
    assert "Using incubator modules" not in text
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_begins_with_a_title_and_stops_its_session(path: Path) -> None:
    assert sources(path, "markdown")[0].startswith("# ")
    code = sources(path, "code")
    assert "spark.stop()" in code[-1]
    for cell in code:
        ast.parse(cell)
        assert all(len(line) <= 100 for line in cell.splitlines())


@pytest.mark.parametrize(("path", "following"), list(pairwise(NOTEBOOKS)))
def test_it_names_the_one_that_follows(path: Path, following: Path) -> None:
    assert f"({following.name})" in sources(path, "markdown")[-1]

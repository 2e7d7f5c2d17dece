"""The notebooks are kept without outputs, whole, and in the order in which they name each other."""

from __future__ import annotations

import ast
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
def test_there_are_no_outputs_and_no_traces_of_a_run(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        assert cell.metadata == {}
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

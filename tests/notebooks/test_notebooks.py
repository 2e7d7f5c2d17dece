"""Every notebook runs from top to bottom in a real kernel, shows what it promises, cleans up."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

RESTARTED = "07_a_failure_and_its_recovery"
FAILING = "06_your_own_training_loop"
"""Shows what becomes of a worker's error: the driver's words, then its traceback."""
"""Those whose workers have something to say."""


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    # Else ipykernel would not show what Spark prints.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(tempfile, "tempdir", None)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = outputs_of(notebook)
    data = [output.data for output in outputs if "data" in output]
    assert any("image/png" in one for one in data)
    assert any("<progress" in one.get("text/html", "") for one in data) or "06" in path.stem
    printed = "\n".join(output.text for output in outputs if output.output_type == "stream")
    # What the notebooks themselves do may not warn; what Spark says when it begins is its own.
    assert "Warning" not in printed.replace("WARNING: Using incubator modules", "")
    assert printed.count("Traceback") == (2 if path.stem == FAILING else 0)
    if path.stem == RESTARTED:
        assert "restarts: 1, weights are equal: True" in printed
        assert any("restart 1" in one.get("text/plain", "") for one in data)
        assert "[rank 0]" in printed
    assert list(temporary.glob("sparkdl-*")) == []

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparkdl.storage.hadoop_storage import open_parent, open_place
from sparkdl.storage.storage import FsspecStorage, LocalStorage

ROOT = Path(__file__).parents[2]


def test_paths_and_urls(tmp_path: Path) -> None:
    assert str(open_place(tmp_path)) == str(open_place(f"file://{tmp_path}")) == str(tmp_path)
    assert isinstance(open_place(tmp_path), LocalStorage)
    assert isinstance(open_place("memory://here"), FsspecStorage)


@pytest.mark.parametrize(
    ("place", "folder", "name"),
    [
        ("/a/b.onnx", "/a", "b.onnx"),
        ("/b.onnx", "/", "b.onnx"),
        ("memory://a/b/c", "memory://a/b/", "c"),
        ("memory://a/b/", "memory://a/b/", ""),
    ],
)
def test_a_file_has_a_folder_and_a_name(place: str, folder: str, name: str) -> None:
    storage, found = open_parent(place)
    assert (str(storage), found) == (folder, name)


def test_a_name_alone_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage, name = open_parent("b.onnx")
    assert (str(storage), name) == (str(tmp_path), "b.onnx")


@pytest.mark.parametrize("statement", ["", "import pyspark.sql"])
def test_no_session_is_needed_or_started(statement: str) -> None:
    code = (
        f"import sys\n{statement}\n"
        "from sparkdl.storage.hadoop_storage import open_place\n"
        "print(type(open_place('memory://x')).__name__, 'pyspark' in sys.modules)\n"
        "if 'pyspark' in sys.modules:\n"
        "    assert sys.modules['pyspark'].SparkContext._active_spark_context is None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["FsspecStorage", str(bool(statement))], done.stderr

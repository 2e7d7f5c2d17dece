from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from sparkdl.cli.images.image_labels import by_folder, by_table
from sparkdl.errors import DataError

FILES = pa.table({"path": ["cat/1.png", "cat/deep/2.png", "dog/1.png"], "length": [1, 2, 3]})
ROOTS = ("file:/data/pets", "pets", "/data/pets")


def table(path: list[Any], label: list[Any]) -> pa.Table:
    return pa.table({"path": path, "label": label})


def test_the_first_folder_is_the_class_and_classes_are_sorted() -> None:
    found = by_folder(FILES, ())
    assert found.names == ("cat", "dog")
    assert found.files == FILES.append_column("label", [[0, 0, 1]])


def test_given_names_keep_their_numbers() -> None:
    found = by_folder(FILES, ("dog", "bird", "cat"))
    assert found.files["label"].to_pylist() == [2, 2, 0]
    assert found.names == ("dog", "bird", "cat")
    with pytest.raises(DataError, match=r"1 classes are not in labels.names: cat; name them"):
        by_folder(FILES, ("dog",))


def test_files_outside_of_folders_have_no_class() -> None:
    with pytest.raises(DataError, match=r"2 files lie directly in data.path .*first: a\.png"):
        by_folder(pa.table({"path": ["b.png", "a.png", "cat/1.png"]}), ())


def test_a_table_names_files_in_several_ways_and_leaves_some_out() -> None:
    rows = table(["/data/pets/dog/1.png", "./cat/1.png"], ["dog", "cat"])
    found = by_table(FILES, rows, (), ROOTS)
    assert found.files == FILES.take([0, 2]).append_column("label", [[0, 1]])
    assert found.absent == ()
    full = table(["file:/data/pets/cat/deep/2.png", "cat/none.png"], ["x", "y"])
    found = by_table(FILES, full, (), ROOTS)
    assert found.files["path"].to_pylist() == ["cat/deep/2.png"]
    assert (found.absent, found.names) == (("cat/none.png",), ("x",))


def test_numbers_stay_numbers() -> None:
    for value, kind in ((7, "int64"), (0.5, "double")):
        found = by_table(FILES, table(["dog/1.png"], [value]), (), ROOTS)
        assert (found.files["label"].to_pylist(), found.names) == ([value], ())
        assert str(found.files["label"].type) == kind


@pytest.mark.parametrize(
    ("rows", "names", "message"),
    [
        (table(["cat/1.png", None], ["x", "y"]), (), "has 1 rows without path or label"),
        (table(["cat/1.png", "pets/cat/1.png"], ["x", "y"]), (), r"1 files several times"),
        (table(["cat/1.png"], [1]), ("x",), "for labels that are strings; the table has int64"),
        (table(["cat/1.png"], [True]), (), "labels are bool; they must be strings or numbers"),
    ],
)
def test_wrong_tables_are_refused(rows: pa.Table, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        by_table(FILES, rows, names, ROOTS)

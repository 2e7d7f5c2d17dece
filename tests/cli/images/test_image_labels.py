from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from sparkdl.cli.images.image_labels import by_folder, by_table
from sparkdl.errors import DataError

PATHS = ["cat/1.png", "cat/deep/2.png", "dog/1.png"]
ROOTS = ("file:/data/pets", "pets", "/data/pets")


def table(path: list[Any], label: list[Any]) -> pa.Table:
    return pa.table({"path": path, "label": label})


def test_the_first_folder_is_the_class_and_classes_are_sorted() -> None:
    found = by_folder(["dog/1.png", *PATHS], ())
    assert found.names == ("cat", "dog")
    assert found.labels is not None
    assert found.labels.tolist() == [1, 0, 0, 1]
    assert found.rows.tolist() == [0, 1, 2, 3]


def test_given_names_keep_their_numbers() -> None:
    found = by_folder(PATHS, ("dog", "bird", "cat"))
    assert found.labels is not None
    assert found.labels.tolist() == [2, 2, 0]
    assert found.names == ("dog", "bird", "cat")
    with pytest.raises(DataError, match=r"1 classes are not in labels.names: cat; name them"):
        by_folder(PATHS, ("dog",))


def test_files_outside_of_folders_have_no_class() -> None:
    with pytest.raises(DataError, match=r"2 files lie directly in data.path .*first: a\.png"):
        by_folder(["b.png", "a.png", "cat/1.png"], ())


def test_a_table_names_files_in_several_ways_and_leaves_some_out() -> None:
    rows = table(["/data/pets/dog/1.png", "./cat/1.png"], ["dog", "cat"])
    found = by_table(PATHS, rows, (), ROOTS)
    assert found.rows.tolist() == [0, 2]
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1]
    assert found.absent == ()
    full = table(["file:/data/pets/cat/deep/2.png", "cat/none.png"], ["x", "y"])
    found = by_table(PATHS, full, (), ROOTS)
    assert (found.rows.tolist(), found.absent, found.names) == ([1], ("cat/none.png",), ("x",))


def test_numbers_stay_numbers() -> None:
    whole = by_table(PATHS, table(["dog/1.png"], [7]), (), ROOTS)
    assert whole.labels is not None
    assert (whole.labels.tolist(), str(whole.labels.dtype), whole.names) == ([7], "int64", ())
    real = by_table(PATHS, table(["dog/1.png"], [0.5]), (), ROOTS)
    assert real.labels is not None
    assert (real.labels.tolist(), str(real.labels.dtype)) == ([0.5], "float64")


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
        by_table(PATHS, rows, names, ROOTS)

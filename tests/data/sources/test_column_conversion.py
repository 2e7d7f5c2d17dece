"""Do columns that workers read by themselves become the rows that the plan has, or are refused?"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as pillow

from sparkdl.data.kinds import Rows
from sparkdl.data.plan import Column, SpoolColumn, make_plan
from sparkdl.data.source import Wanted, open_shards
from sparkdl.data.sources.column_conversion import as_spark, checked_rows, column_at
from sparkdl.data.sources.parquet import ParquetSource
from sparkdl.errors import DataError
from sparkdl.inputs import Image, Specification

WANTED = SpoolColumn(name="x", role="feature", dtype="float32")


def png(height: int, width: int) -> bytes:
    file = io.BytesIO()
    pillow.fromarray(np.zeros((height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def checked(
    rows: list[Any], known: tuple[int, ...], *, shape: tuple[int, ...] | None = None,
    specification: Specification | None = None,
) -> Rows:  # fmt: skip
    """Rows of a column that the source has found in one shape and the plan has in another."""
    wanted = replace(WANTED, shape=known, specification=specification)
    column = Column(
        name="x", role="feature", dtype="float32", shape=shape or known,
        specification=specification,
    )  # fmt: skip
    return checked_rows([pa.array(rows)], wanted, column, where=" of a file", first_row=5)


@pytest.mark.parametrize(
    ("rows", "known", "specification"),
    [
        ([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]], (2, 3), None),
        ([[1.0] * 6], (2, 3), None),
        ([png(3, 2)], (3, 2, 3), Image("x")),
        ([png(3, 2)], (3, 2, 3), Image("x", decode="batch")),
    ],
)
def test_rows_of_another_shape_are_refused_though_they_have_as_many_values(
    rows: list[Any], known: tuple[int, ...], specification: Specification | None
) -> None:
    message = r'"x" is ragged: 1 rows have shape .* \(first: row 5 of a file\), others \(\d, \d'
    with pytest.raises(DataError, match=message):
        checked(rows, known, specification=specification)


def test_rows_take_the_shape_that_was_asked_for() -> None:
    found = checked([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]], (2, 3), shape=(3, 2, 1))
    assert isinstance(found, np.ndarray) and found.shape == (1, 3, 2, 1)
    assert found.ravel().tolist() == [1, 2, 3, 4, 5, 6]


def test_a_source_tells_its_workers_the_shape_that_it_has_found(tmp_path: Path) -> None:
    def read() -> list[Any]:
        wanted = Wanted(columns=(WANTED,), validation=None, num_shards=1)
        contents = ParquetSource(tmp_path).contents(wanted)
        column = replace(contents.columns[0], shape=(6,))
        plan = make_plan(
            columns=[column], shards=contents.shards, world_size=1, batch_size=1, epochs=1
        )
        (rows,) = open_shards(contents.reader, plan, 0, "train")
        return [batch[column.key].tolist() for batch in rows.in_order(1)]

    pq.write_table(pa.table({"x": [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]}), tmp_path / "a.parquet")
    assert read() == [[[1, 2, 3, 4, 5, 6]]]
    pq.write_table(pa.table({"x": [[[1.0, 2.0]] * 3]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"shape \(3, 2\) .* of b.parquet\), others \(2, 3\)"):
        read()


def test_a_column_may_be_larger_than_one_array_of_its_type() -> None:
    """No memory is needed for nulls, of which an array of lists holds fewer than 2**31."""
    part = pa.ListArray.from_arrays(pa.array([0, 2**30], pa.int32()), pa.nulls(2**30))
    table = pa.table({"x": pa.chunked_array([part] * 3)})
    array = column_at(table, ("x",))
    assert len(array) == 3 and array.offsets[3].as_py() == 3 * 2**30


@pytest.mark.parametrize("layout", ["fixed", "binary", "binary_view"])
def test_binary_of_every_layout(layout: str) -> None:
    if layout == "binary_view" and not hasattr(pa, layout):
        pytest.skip("this pyarrow has no views")
    kind = pa.binary(2) if layout == "fixed" else getattr(pa, layout)()
    assert as_spark(pa.list_(kind)) == pa.list_(pa.binary())
    column = Column(name="x", role="feature", dtype="uint8", shape=(2,))
    array = pa.array([b"ab", b"cd"], kind)
    found = checked_rows([array], replace(WANTED, dtype="uint8"), column)
    assert np.asarray(found).tolist() == [[97, 98], [99, 100]]

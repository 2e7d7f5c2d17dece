"""Bad rows of a spool are reported together, with column, count and an example."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Column, SpoolColumn
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.errors import DataError
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.shard_table import SpooledRows

NAN = math.nan
INF = float("inf")
WHERE = r"\(first: row \d+ of partition [01]\); drop or fill them"
GOOD = [([float(i), -float(i)], float(i % 3), 1.0) for i in range(20)]


def columns(folder: Path, rows: list[Any], *, as_classes: bool = True) -> tuple[Column, ...]:
    """The columns of a shard with these rows."""
    dtype = "int64" if as_classes else "float32"
    prepared = (
        SpoolColumn(name="x", role="feature", dtype="float32"),
        SpoolColumn(name="y", role="label", dtype=dtype, as_classes=as_classes),
        SpoolColumn(name="w", role="weight", dtype="float32"),
    )
    x, y, w = zip(*rows, strict=True)
    label = pa.float64() if as_classes else pa.float32()
    arrays = [
        pa.array(x, pa.list_(pa.float32())),
        pa.array(y, label),
        pa.array(w, pa.float32()),
        pa.array(range(len(rows)), pa.int64()),
    ]
    place = " of partition 0"
    with SpoolWriter(folder, prepared, has_validation=False, where=place) as writer:
        writer.write(pa.record_batch(arrays, names=["c0", "c1", "c2", "hash"]))
    shard = SpooledShard.from_dict(writer.summary().to_dict())
    return SpooledRows(TableSpec(columns=prepared, num_shards=1)).columns([shard])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(None, 1.0, 1.0)], rf'"x" has 1 null row {WHERE}'),
        ([([1.0, None], 1.0, 1.0)] * 2, rf'"x" has 2 rows with a null, in 2 of .* {WHERE}'),
        ([([1.0, 2.0], None, 1.0)], rf'"y" has 1 null row {WHERE}'),
        ([([1.0, 2.0], 1.0, None)], rf'"w" has 1 null row {WHERE}'),
        (
            [([1.0], 1.0, 1.0)],
            r'"x" is ragged: most rows have shape \(2,\), but 1 do not '
            r"\(first: row \d+ of partition [01], of shape \(1,\)\); pad or drop them",
        ),
        (
            [([1.0, 2.0], NAN, 1.0)] * 3,
            r'"y" must hold whole, non-negative class indices \(StringIndexer makes them of '
            r"other labels, TorchRegressor learns numbers\), but 3 rows do not \(first: nan in row "
            r"\d+ of partition [01]\); drop or mend them",
        ),
        ([([1.0, 2.0], 1.5, 1.0)], r'"y" .* but 1 row does not \(first: 1.5 in row \d+ of'),
        (
            [([1.0, 2.0], -1.0, 1.0)],
            r'"y" .* but 1 row .*\(first: -1.0 in .*\(label \+ 1\) / 2.*=-1\)$',
        ),
        (
            [([1.0, 2.0], 1.0, -0.5)],
            r'"w" must hold finite numbers that are not negative, but 1 row does not '
            r"\(first: -0.5 in row",
        ),
        ([([1.0, 2.0], 1.0, NAN)], r'"w" must hold finite .* \(first: nan in row'),
        (
            [(None, INF, INF)],
            r'"x" has 1 null row .*; column "y" must .* \(first: inf in .*; column "w" must .* '
            r"does not \(first: inf in row",
        ),
    ],
)
def test_bad_rows_are_counted_with_an_example(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(DataError, match=f"column {message}"):
        columns(tmp_path / "spool", [*GOOD, *rows])


def test_a_label_that_is_no_class_may_be_any_finite_number(tmp_path: Path) -> None:
    fine = columns(tmp_path / "fine", [([1.0, 2.0], -1.5, 1.0)], as_classes=False)
    assert fine[1].dtype == "float32"
    with pytest.raises(DataError, match='"y" must hold finite numbers, but 1 row'):
        columns(tmp_path / "bad", [([1.0, 2.0], NAN, 1.0)], as_classes=False)

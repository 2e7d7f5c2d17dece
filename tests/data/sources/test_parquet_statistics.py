from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparkdl.data.plan import SpoolColumn
from sparkdl.data.source import Contents, open_shards
from sparkdl.data.sources.parquet import ParquetSource
from sparkdl.data.sources.streamed import StreamedRows
from sparkdl.inputs import Sequence
from tests.data.sources.test_parquet import FEATURES, epoch_of, joined, plan_of, wanted
from tests.data.sources.test_parquet_files import write_all


def test_empty_sequences_do_not_decide(tmp_path: Path) -> None:
    pairs = pa.list_(pa.list_(pa.float32()))
    empty = pa.table({"x": pa.array([[]] * 300, pairs)})
    full = pa.table({"x": pa.array([[], [[1.0, 2.0]]], pairs)})
    folder = write_all(tmp_path / "data", [empty, full])
    column = replace(FEATURES, specification=Sequence("x"))
    contents = ParquetSource(folder).contents(wanted(column, num_shards=1))
    assert contents.columns[0].shape == (2,)
    rows = joined(batch.inputs[0].tolist() for batch in epoch_of(contents, plan_of(contents), 0))
    assert [row for row in joined(rows) if row != [0, 0]] == [[1, 2]]

    def halves(batch: pa.RecordBatch) -> list[list[float]]:
        return [[0.5] * len(row) for row in batch[0].to_pylist()]

    made = Sequence("x", transform=halves)
    contents = ParquetSource(folder).contents(wanted(replace(FEATURES, specification=made)))
    assert contents.columns[0].dtype == "float32"


def held_bytes(contents: Contents) -> list[int]:
    """Memory of the rows of each window."""
    plan = plan_of(contents)
    (rows,) = open_shards(contents.reader, plan, 0, "train")
    assert isinstance(rows, StreamedRows)
    epoch = rows.epoch(0, 0)
    found = []
    for number in range(epoch.order.num_windows):
        pieces = epoch._load_window(number).pieces
        found.append(sum(rows.num_bytes for p in pieces for rows in p.values()))
    epoch.close()
    return found


def test_memory_is_bounded_also_where_later_rows_are_longer(tmp_path: Path) -> None:
    def lists(count: int, length: int) -> pa.Table:
        return pa.table({"x": pa.array([np.arange(length) % 9] * count, pa.list_(pa.int32()))})

    folder = write_all(tmp_path / "data", [lists(2000, 1), *[lists(20, 2000)] * 20])
    column = SpoolColumn(name="x", role="feature", dtype="int64", specification=Sequence("x"))
    window = 4 * 20 * 2000 * 8  # four of the long row groups, as int64
    source = ParquetSource(folder, buffer_bytes=2 * window + 10_000)
    held = held_bytes(source.contents(wanted(column, num_shards=1)))
    assert max(held) == window

"""Which rows a spool task writes into which shard, and what it leaves when it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data.plan import Shard, SpoolColumn
from sparkdl.data.spool.local_disk import DiskFull
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.spark.frames import spool_task
from sparkdl.spark.frames.spool_task import FindTask, SpoolTask

COLUMN = SpoolColumn(name="x", role="feature", dtype="float64", shape=())


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the task, which has the partition 1."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(spool_task, "place_here", lambda: (1, "far"))
    return tmp_path


def batch(values: Sequence[float], **first: Sequence[int]) -> pa.RecordBatch:
    columns = {name: pa.array(numbers, pa.int32()) for name, numbers in first.items()}
    hashes = pa.array(range(len(values)), pa.int64())
    return pa.RecordBatch.from_pydict(
        {**columns, "c0": pa.array(values, pa.float64()), "hash": hashes}
    )


def spooled(task: SpoolTask, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    (row,) = task(batches)
    assert next(batches, None) is None  # Spark does not use a worker again that leaves some
    assert row.column(0).to_pylist() == [1]
    payload: dict[str, Any] = json.loads(row.column(1)[0].as_py())
    return payload


def rows(payload: dict[str, Any]) -> dict[int, list[float]]:
    """The values of each shard."""
    shards = [Shard(**values["shard"]) for values in payload["shards"]]
    assert {shard.host for shard in shards} <= {"far"}
    return {
        shard.shard_id: np.fromfile(
            next(path for path in Path(shard.path).iterdir()), np.float64
        ).tolist()
        for shard in shards
    }


@pytest.mark.parametrize("cuts", [[200], [70, 130], [1, 0, 64, 135]])
def test_rows_of_a_partition_are_dealt_however_they_are_cut(cuts: list[int]) -> None:
    task = SpoolTask(run_id="r", sets=((COLUMN,),), pieces=2)
    ends = np.cumsum(cuts).tolist()
    pieces = [batch(range(end - size, end)) for size, end in zip(cuts, ends, strict=True)]
    found = rows(spooled(task, iter(pieces)))
    assert found == {2: [*range(64), *range(128, 192)], 3: [*range(64, 128), *range(192, 200)]}


def test_rows_that_come_with_their_shard_go_there() -> None:
    task = SpoolTask(run_id="r", sets=((COLUMN,),), shards_by_place=((7,), (2, 3, 5)))
    pieces = [batch([1, 2], shard=[2, 2]), batch([3, 4, 5], shard=[2, 5, 5])]
    assert rows(spooled(task, iter(pieces))) == {2: [1, 2, 3], 3: [], 5: [4, 5]}
    alone = SpoolTask(run_id="r", sets=((COLUMN,),))
    assert rows(spooled(alone, iter([batch([1]), batch([2, 3])]))) == {1: [1, 2, 3]}


def test_rows_of_several_data_sets_go_apart() -> None:
    both = pa.RecordBatch.from_pydict(
        {
            "set": pa.array([0, 0, 1], pa.int32()),
            "set0": pa.array([{"c0": 1.0}, {"c0": 2.0}, None]),
            "set1": pa.array([None, None, {"c0": 3.0}]),
            "hash": pa.array([1, 2, 3], pa.int64()),
        }
    )
    task = SpoolTask(run_id="r", sets=((COLUMN,), (COLUMN,)))
    payload = spooled(task, iter([both]))
    counted = [(one["shard"]["shard_id"], one["shard"]["num_rows"]) for one in payload["shards"]]
    assert counted == [(1, 2), (1, 1)]


@pytest.mark.parametrize("pieces", [1, 2])
def test_several_own_partitions_in_one_task_are_those_of_tasks_of_their_own(
    disk: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    values = {0: list(range(150)), 3: list(range(90))}
    alone = {}
    for number, rows in values.items():
        monkeypatch.setattr(spool_task, "place_here", lambda number=number: (number, "far"))
        own = SpoolTask(run_id="alone", sets=((COLUMN,),), pieces=pieces)
        (row,) = own(iter([batch(rows)]))
        for one in json.loads(row.column(1)[0].as_py())["shards"]:
            alone[one["shard"]["shard_id"]] = one["shard"]["fingerprint"]
    monkeypatch.setattr(spool_task, "place_here", lambda: (1, "far"))
    task = SpoolTask(run_id="r", sets=((COLUMN,),), pieces=pieces, is_numbered=True)
    both = pa.concat_batches(
        [batch(rows, number=[number] * len(rows)) for number, rows in values.items()]
    )
    parts = [both.slice(0, 100), both.slice(100, 70), both.slice(170)]
    found = spooled(task, iter(parts))["shards"]
    assert {one["shard"]["shard_id"]: one["shard"]["fingerprint"] for one in found} == alone
    assert len({one["shard"]["path"] for one in found}) == len(alone) == 2 * pieces


def test_a_full_disk_tells_how_much_was_needed(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, rows = SpoolWriter.write, 1 << 17

    def fill(self: SpoolWriter, batch: pa.RecordBatch) -> None:
        if self.num_rows >= rows:
            raise DiskFull("full")
        write(self, batch)

    monkeypatch.setattr(SpoolWriter, "write", fill)
    task = SpoolTask(run_id="r", sets=((COLUMN,),), shards_by_place=((), (1, 2)))
    pieces = (batch(np.zeros(rows).tolist(), shard=[1] * rows) for _ in range(5))
    payload = spooled(task, pieces)
    assert payload["error"] == "StorageError"
    assert "takes about 4.0 MiB" in payload["message"]  # the one that failed is not counted here
    assert not list(disk.glob("*/*"))


def test_a_failure_of_ours_travels_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/nowhere")
    payload = spooled(SpoolTask(run_id="r", sets=((COLUMN,),)), iter([batch([1]), batch([2])]))
    assert payload["error"] == "StorageError" and "/nowhere" in payload["message"]


def test_a_failure_leaves_no_file(disk: Path) -> None:
    def fails() -> Iterator[pa.RecordBatch]:
        yield batch([1, 2], shard=[1, 2])
        raise RuntimeError("of Spark")

    task = SpoolTask(run_id="r", sets=((COLUMN,),), shards_by_place=((), (1, 2)))
    with pytest.raises(RuntimeError, match="of Spark"):
        list(task(fails()))
    assert not list(disk.glob("*/*"))


def test_what_an_executor_has_is_found(disk: Path) -> None:
    (disk / "here").mkdir()
    shards = tuple(
        Shard(shard_id=number, path=str(disk / name), num_rows=1, num_validation_rows=0,
              fingerprint="f")
        for number, name in ((5, "gone"), (7, "here"))
    )  # fmt: skip
    (found,) = FindTask(run_id="r", shards=shards)(iter([batch([1])]))
    assert found.to_pydict() == {"place": [1]}

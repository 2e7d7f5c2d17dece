"""What is asked of many files is asked by executors, and gives the same as on the driver."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pyarrow as pa
import pytest
from pyspark.sql import Row

from sparkdl.data.source import Wanted
from sparkdl.data.sources.parquet import ParquetSource
from sparkdl.errors import DataError
from sparkdl.spark.frames import executor_calls
from sparkdl.spark.frames.executor_calls import ExecutorCalls
from sparkdl.spark.frames.row_table import SourceTable, TableSpec
from tests.data.sources.test_parquet import FEATURES, LABEL, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_footers_of_many_files(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both splits, and in several jobs; an error is that of the call."""
    monkeypatch.setattr(executor_calls, "_FEW", 20)
    monkeypatch.setattr(executor_calls, "_FIRST", 30)
    folder = write(tmp_path / "data", [4] * 50)
    columns = (FEATURES, LABEL)
    spec = TableSpec(columns=columns, num_shards=3, validation_col="held")
    found = [part.shard for part in SourceTable(spark, ParquetSource(folder), spec).collect()]
    wanted = Wanted(columns=columns, validation="held", num_shards=3)
    assert found == list(ParquetSource(folder).contents(wanted).shards)
    calls = ExecutorCalls(spark, None, 60.0)
    here = os.getpid()
    processes = calls(lambda _: os.getpid(), range(21))
    assert here not in processes and set(calls(lambda _: os.getpid(), range(20))) == {here}
    (folder / "part-47.parquet").write_text("no Parquet")
    with pytest.raises(DataError, match=r"part-47.parquet is no Parquet file") as error:
        SourceTable(spark, ParquetSource(folder), spec).collect()
    assert "Traceback" not in str(error.value)


class Session:
    """Runs the tasks of a job here; the last answers come first."""

    def __init__(self) -> None:
        self.jobs: list[tuple[int, int]] = []
        """Items and tasks of each."""

    def range(self, start: int, stop: int, step: int, num_tasks: int) -> Any:
        self.jobs.append((stop, num_tasks))
        self.stop = stop
        return self

    def mapInArrow(self, task: Any, schema: str, profile: Any) -> Any:
        self.task = task
        return self

    def collect(self) -> list[Any]:
        batch = pa.record_batch([pa.array(range(self.stop))], names=["id"])
        (found,) = self.task(iter([batch]))
        return [Row(**values) for values in reversed(found.to_pylist())]


class Job:
    def __init__(self, spark: Any, call: Callable[[], Any], **_: Any) -> None:
        self.watched = lambda *_, **__: call()


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(executor_calls, "BackgroundJob", Job)
    monkeypatch.setattr(executor_calls, "num_slots", lambda *_: 0)  # not known
    for name, value in (("_FEW", 4), ("_FIRST", 6), ("_ITEMS_PER_TASK", 5)):
        monkeypatch.setattr(executor_calls, name, value)
    return Session()


def test_answers_come_in_order_from_jobs_of_limited_size(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = len(zlib.compress(cloudpickle.dumps("a"), 1))
    monkeypatch.setattr(executor_calls, "_JOB_BYTES", 12 * answer)
    spark: Any = session
    calls = ExecutorCalls(spark, None, 60.0)
    assert calls(lambda number: chr(97 + number), range(25)) == [chr(97 + n) for n in range(25)]
    assert session.jobs == [(6, 2), (12, 3), (7, 2)]
    assert calls(lambda number: number, range(4)) == [0, 1, 2, 3]
    assert len(session.jobs) == 3  # few are asked here


def test_the_first_error_of_ours_is_raised(session: Session) -> None:
    def read(number: int) -> int:
        if number > 2:
            raise DataError(f"row {number} is bad")
        return number

    spark: Any = session
    with pytest.raises(DataError, match="row 3 is bad"):
        ExecutorCalls(spark, None, 60.0)(read, range(9))

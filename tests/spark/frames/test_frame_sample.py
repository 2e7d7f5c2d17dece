"""A few rows and a count: as little as is needed is read, in time, and types stay as they are."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from sparkdl.data.plan import SpoolColumn
from sparkdl.errors import DataError
from sparkdl.spark.frames import frame_sample as module
from sparkdl.spark.frames.frame_sample import Sample, bounded, count_rows, take_sample
from sparkdl.spark.session.background_job import TaskProgress, end_job
from sparkdl.spark.session.interrupts import interruptible

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def sample_of(df: DataFrame, seconds: float = 60.0) -> Sample:
    from pyspark.sql import functions as F

    prepared = [
        SpoolColumn(name=name, role="feature", expression=F.col(name), dtype="")
        for name in df.columns
    ]  # fmt: skip
    return take_sample(df, prepared, None, seconds)


def marking(folder: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Leaves a file for each time that a partition is read."""

    def mark(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        (folder / os.urandom(8).hex()).touch()
        yield from batches

    return mark


def test_few_partitions_are_read(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(0, 400_000, 1, 40).mapInArrow(marking(tmp_path), "id long")
    found = sample_of(df)
    assert (found.num_rows, found.is_all) == (4096, False)
    assert len(list(tmp_path.iterdir())) <= 3  # the first one, by each look


def test_rows_of_many_partitions_are_all_found(spark: SparkSession) -> None:
    found = sample_of(spark.range(0, 100, 1, 12).where("id % 2 = 0"))
    assert (found.num_rows, found.is_all) == (50, True)
    assert sorted(row[0] for row in found.df.collect()) == list(range(0, 100, 2))


def test_large_rows_are_few(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    numbers = F.array_repeat(F.col("id").cast("float"), 500_000)
    found = sample_of(spark.range(0, 100, 1, 2).select(numbers.alias("numbers")))
    assert found.num_rows * found.row_bytes <= 8 << 20
    assert found.num_rows == 4
    assert not found.is_all


def test_types_and_values_stay(spark: SparkSession) -> None:
    df = spark.range(100).selectExpr(
        "cast(id as tinyint) tiny", "cast(id / 3 as float) single", "cast('NaN' as double) nan",
        "cast(id as decimal(12, 3)) exact", "cast(cast(id as string) as binary) bytes",
        "timestamp'2026-10-25 02:30:00' + make_interval(0, 0, 0, 0, id) at", "date'2026-01-01' day",
        "named_struct('a', array(id, 7), 'b', cast(null as int)) nested",
        "array(cast(id as float), null) holes",
    )  # fmt: skip
    found = sample_of(df)
    assert found.df.dtypes == [(f"c{i}", kind) for i, (_, kind) in enumerate(df.dtypes)]
    assert found.num_rows == 100
    assert found.df.exceptAll(df).isEmpty()


def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        time.sleep(30)
        yield batch


def test_counting_ends_in_time(spark: SparkSession) -> None:
    began = time.monotonic()
    told = r"say how many there are by explain\(df, num_rows=\.\.\.\), or --set explain\.num_rows="
    with pytest.raises(DataError, match=told):
        count_rows(spark.range(10).mapInArrow(slow, "id long"), None, 1.0)
    assert time.monotonic() - began < 15


def test_looking_at_rows_ends_in_time(spark: SparkSession) -> None:
    began = time.monotonic()
    with pytest.raises(DataError, match=r"not found the first row within 1 s; .*count_seconds"):
        sample_of(spark.range(10).mapInArrow(slow, "id long"), 1.0)
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_what_was_found_in_time_is_the_sample(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []

    def once(_: SparkSession, work: Callable[[], Any], seconds: float, name: str) -> Any:
        answers.append(None if len(answers) == 1 else work())
        return answers[-1]

    monkeypatch.setattr(module, "bounded", once)
    found = sample_of(spark.range(0, 40, 1, 2))
    assert (found.num_rows, found.is_all, len(answers)) == (1, False, 3)


def test_what_fails_in_time_is_raised(spark: SparkSession) -> None:
    def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        bounded(spark, fail, 5.0, "fail")
    assert bounded(spark, lambda: 3, 5.0, "three") == 3


def threads() -> list[threading.Thread]:
    named = [one for one in threading.enumerate() if one.name.startswith("sparkdl-bounded")]
    for one in named:  # it may be about to end
        one.join(1.0)
    return [one for one in named if one.is_alive()]


def test_an_interrupt_cancels_it(spark: SparkSession) -> None:
    def press() -> None:
        while not spark.sparkContext.statusTracker().getActiveStageIds():
            time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    user = threading.Thread(target=press)
    user.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="jobs were cancelled"), interruptible(spark):
        count_rows(spark.range(10).mapInArrow(slow, "id long"), None, 60.0)
    user.join()
    assert threads() == []
    assert time.monotonic() - began < 15


def test_jobs_are_cancelled_until_there_are_none(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    is_over = threading.Event()

    def cancel(_: SparkSession, tag: str) -> None:
        calls.append(tag)
        if len(calls) == 3:
            is_over.set()

    monkeypatch.setattr("sparkdl.spark.session.compat.cancel_jobs", cancel)
    end_job(
        TaskProgress(spark, "of-a-job"), is_over
    )  # `bounded` calls it, if the work has begun by then
    assert calls == ["of-a-job"] * 3
    assert not any(thread.name == "sparkdl-cancel" for thread in threading.enumerate())

"""What is asked of many files is asked by executors, and gives the same as on the driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkdl.data.source import Wanted
from sparkdl.data.sources.parquet import ParquetSource
from sparkdl.errors import SparkDLError, StorageError
from sparkdl.spark.frames import executor_calls
from sparkdl.spark.frames.executor_calls import ExecutorCalls
from sparkdl.spark.frames.row_table import SourceTable, TableSpec
from tests.data.sources.test_parquet import FEATURES, LABEL, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]


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
    with pytest.raises(StorageError, match=r"cannot read .*Parquet magic") as error:
        SourceTable(spark, ParquetSource(folder), spec).collect()
    assert isinstance(error.value, SparkDLError) and "Traceback" not in str(error.value)

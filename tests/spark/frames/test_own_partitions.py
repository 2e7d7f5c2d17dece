"""The DataFrame's own partitions as shards: when, and what comes of it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F
from torch import nn

from sparkdl import ParameterAveraging, TorchRegressor
from sparkdl.data.spool.spool_source import open_spool
from sparkdl.errors import ConfigError, DataError
from sparkdl.spark.frames.own_partitions import FrameFacts, choose_shards, frame_facts
from sparkdl.spark.frames.prepare_columns import prepare
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.shard_table import ShardTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.data.column_stats import SpooledShard

ROWS = [700, 300, 2000]
LARGE = FrameFacts(unstable=None, num_bytes=2 << 30, num_partitions=20)


def chosen(asked: str = "auto", facts: FrameFacts = LARGE, **changes: int) -> Any:
    known = {"num_parts": 4, "num_executors": 2, "num_workers": 4, "num_files": 2}
    return choose_shards(asked, facts, **{**known, **changes})


@pytest.mark.parametrize(
    ("choice", "num_places", "pieces", "reason"),
    [
        (chosen(), 20, 1, "2,048 MiB of files in 20 partitions, stay"),
        (chosen(facts=replace(LARGE, num_partitions=100)), 32, 1, "packed to 32"),
        (chosen(facts=replace(LARGE, num_partitions=3)), 3, 6, "each cut into 6"),
        (chosen(num_files=300, facts=replace(LARGE, num_partitions=3)), 3, 1, "partitions, stay"),
        (chosen("partitions", replace(LARGE, num_bytes=9)), 20, 1, "0 MiB"),
        (chosen(facts=replace(LARGE, num_bytes=9)), 0, None, "quickly dealt"),
        (chosen("partitions", FrameFacts(unstable="of a Join")), 0, None, "since of a Join"),
        (chosen("partitions", num_executors=5), 0, None, "5 executors may spool, and only 4"),
    ],
)
def test_the_choice(choice: Any, num_places: int, pieces: int | None, reason: str) -> None:
    assert (choice.num_places, choice.pieces) == (num_places, pieces)
    assert reason in choice.reason
    assert str(choice).startswith("rows: " if pieces is None else "partitions: ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet file for each number of rows."""
    folder = tmp_path_factory.mktemp("parquet")
    first = 0
    for number, rows in enumerate(ROWS):
        y = np.arange(first, first + rows, dtype=np.float64)
        x = list(np.stack([y, -y], 1) / sum(ROWS))
        table = pa.table({"x": pa.array(x), "y": pa.array(y / sum(ROWS))})
        pq.write_table(table, folder / f"{number}.parquet")
        first += rows
    return folder


@pytest.fixture(scope="module")
def files(spark: SparkSession, folder: Path) -> Iterator[DataFrame]:
    """A partition for each file."""
    spark.conf.set("spark.sql.files.openCostInBytes", str(1 << 30))
    yield spark.read.parquet(str(folder))
    spark.conf.unset("spark.sql.files.openCostInBytes")


UNSTABLE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "join": (lambda df, _: df.join(df.groupBy().count()), "made by a Join"),
    "sort": (lambda df, _: df.orderBy("y"), "made by a Sort"),
    "repartition": (lambda df, _: df.repartition(4), "made by a Repartition"),
    "sample": (lambda df, _: df.sample(0.5, seed=1), "made by a Sample"),
    "limit": (lambda df, _: df.limit(5), "made by a GlobalLimit"),
    "random": (lambda df, _: df.withColumn("r", F.rand(1)), "such as rand"),
    "subquery": (lambda df, _: df.where("y > (select 0)"), "depend on a subquery"),
    "memory": (lambda _, spark: spark.createDataFrame([(1,)], "a int"), "and not from files"),
    "range": (lambda _, spark: spark.range(5), "come from a Range and not"),
}


@pytest.mark.parametrize("name", UNSTABLE)
def test_what_may_come_otherwise_is_no_shard(
    spark: SparkSession, files: DataFrame, name: str
) -> None:
    make, reason = UNSTABLE[name]
    assert reason in str(frame_facts(make(files, spark)).unstable)


@pytest.mark.slow
def test_files_read_row_by_row_are_stable(spark: SparkSession, files: DataFrame) -> None:
    files.createOrReplaceTempView("own_partitions")
    mapped = spark.sql("select y * 2 as z, x from own_partitions where y > 0")
    facts = frame_facts(mapped)
    assert facts.unstable is None and facts.num_bytes > 10_000
    assert facts.num_partitions == len(ROWS)
    both = frame_facts(files.union(files))
    assert both.unstable is None and both.num_bytes == 2 * facts.num_bytes


class Tables:
    """Makes tables of own partitions and closes them."""

    def __init__(self) -> None:
        self.open: list[ShardTable] = []

    def __call__(self, df: DataFrame, num_places: int = 3, pieces: int = 1) -> ShardTable:
        columns = tuple(
            prepare(df.schema, name, role, float_dtype="float64")
            for name, role in (("x", "feature"), ("y", "label"))
        )
        spec = TableSpec(
            columns=columns, num_shards=num_places * pieces, num_places=num_places,
            pieces=pieces, at_once=False,
        )  # fmt: skip
        self.open.append(ShardTable(df, spec, run_id=uuid.uuid4().hex[:12]))
        return self.open[-1]


@pytest.fixture
def tables() -> Iterator[Tables]:
    tables = Tables()
    yield tables
    for table in tables.open:
        table.close()


def labels(table: ShardTable, spooled: tuple[SpooledShard, ...]) -> list[list[int]]:
    """The numbers of the rows of each shard, in their order."""
    columns, found = table.columns(spooled), []
    for part in spooled:
        shard = part.shard
        opened = open_spool(Path(shard.path), columns, num_rows=shard.num_rows, split="train")
        values: Any = opened.columns["label y"]
        found.append((values * sum(ROWS)).round().int().tolist())
    return found


@pytest.mark.slow
def test_partitions_become_shards_without_a_shuffle(files: DataFrame, tables: Tables) -> None:
    table = tables(files)
    plan = table.df._jdf.queryExecution().executedPlan().toString()
    assert "FileScan" in plan and "Exchange" not in plan and "Sort" not in plan
    spooled = table.collect()
    assert sorted(part.shard.num_rows for part in spooled) == sorted(ROWS)
    rows = labels(table, spooled)
    assert all(own == list(range(own[0], own[0] + len(own))) for own in rows)  # as in the file
    assert sorted(number for own in rows for number in own) == list(range(sum(ROWS)))
    again = tables(files).collect()
    assert [p.shard.fingerprint for p in again] == [p.shard.fingerprint for p in spooled]


@pytest.mark.slow
def test_partitions_are_cut_and_packed(files: DataFrame, tables: Tables) -> None:
    table = tables(files, pieces=3)
    spooled = table.collect()
    assert [part.shard.shard_id for part in spooled] == list(range(9))
    rows = labels(table, spooled)
    assert sorted(number for own in rows for number in own) == list(range(sum(ROWS)))
    sizes = [[len(own) for own in rows[place : place + 3]] for place in (0, 3, 6)]
    assert sorted(map(sum, sizes)) == sorted(ROWS)
    assert all(max(own) - min(own) <= 64 for own in sizes)  # a block
    packed = tables(files, num_places=2)
    both = packed.collect()
    assert len(both) == 2
    assert sorted(n for own in labels(packed, both) for n in own) == list(range(sum(ROWS)))


@pytest.mark.slow
def test_what_is_lost_is_written_anew_and_no_more(files: DataFrame, tables: Tables) -> None:
    table = tables(files, pieces=2)
    before = table.collect()
    table.remake([1])  # no worker could read it, although its executor is there
    now = table.known
    changed = [a.shard.path != b.shard.path for a, b in zip(before, now, strict=True)]
    assert changed == [False, True, False, False, False, False]
    assert table.collect() == now
    assert labels(table, now) == labels(table, before)
    table.df.unpersist()  # Spark has lost its rows with the executor
    table.remake([1, 3])
    assert [part.shard.fingerprint for part in table.known] == [
        part.shard.fingerprint for part in before
    ]
    assert all(Path(part.shard.path).is_dir() for part in table.known)


@pytest.mark.slow
def test_bad_rows_are_named(files: DataFrame, tables: Tables) -> None:
    value = F.when(F.round(F.col("y") * sum(ROWS)) == 52, None).otherwise(F.col("y"))
    table = tables(files.withColumn("y", value), pieces=2)
    told = r'column "y" has 1 null row \(such as row 52 of file:.*0\.parquet\)'
    with pytest.raises(DataError, match=told):
        table.columns(table.collect())


def make_net() -> nn.Module:
    return nn.Linear(2, 1).double()


def regressor(**changes: Any) -> TorchRegressor:
    params = {
        "module": make_net, "featuresCol": "x", "labelCol": "y", "epochs": 2,
        "batchSize": 50, "learningRate": 0.1, "verbose": 0, "numWorkers": 2, "seed": 3,
        "validationFraction": 0.2, "shards": "partitions",
    }  # fmt: skip
    return TorchRegressor(**{**params, **changes})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fit_on_own_partitions(files: DataFrame, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sparkdl")
    summary = regressor().fit(files).summary
    assert "shards are made of partitions: 0 MiB of files in 3 partitions" in caplog.text
    assert summary.rows + summary.validation_rows == sum(ROWS)
    assert 0.1 < summary.validation_rows / sum(ROWS) < 0.3
    assert "in 9 shard(s)" in caplog.text  # which share the steps of two
    assert summary.steps == 2 * -(-summary.rows // 100)
    alone = regressor(numWorkers=1, numShards=2).fit(files).summary
    for one, two in zip(alone.history, summary.history, strict=True):
        for name in ("loss", "val_loss", "gradient_norm"):
            assert one[name] == pytest.approx(two[name], rel=1e-9)
    dealt = regressor(shards="rows", epochs=1).fit(files).summary
    assert (dealt.rows, dealt.validation_rows) == (summary.rows, summary.validation_rows)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_join_is_dealt_by_rows(files: DataFrame, caplog: pytest.LogCaptureFixture) -> None:
    joined = files.join(files.groupBy().count())
    summary = regressor(epochs=1).fit(joined).summary
    assert summary.rows + summary.validation_rows == sum(ROWS)
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    told = "shards are made of rows: the partitions may change, since they are made by a Join"
    assert told in warned


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": "files"}, "must be one of"),
        ({"syncStrategy": ParameterAveraging()}, "in rounds each shard trains a replica"),
        ({"syncStrategy": "local_sgd"}, "learns depends on which worker has which rows"),
    ],
)
def test_what_cannot_be_is_refused(files: DataFrame, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        regressor(**changes).fit(files)

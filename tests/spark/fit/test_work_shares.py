"""Shards of unequal size, as the user asked for."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.config import TrainConfig
from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.spool.spool_source import open_spool
from sparkdl.errors import ConfigError
from sparkdl.spark.fit import fit as module
from sparkdl.spark.fit.fit import fit
from sparkdl.spark.frames.prepare_columns import prepare
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.shard_table import ShardTable
from sparkdl.spark.run.resume import run_key
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.gradients.allreduce import AllReduce

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from torch import nn

ROWS = 3000


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    features = [(F.sin(F.col("id") * k)).cast("float") for k in (1, 2, 3)]
    return spark.range(0, ROWS, 1, 3).select(
        F.array(*features).alias("features"), F.sin(F.col("id") * 5).cast("float").alias("label")
    )


class Tables:
    def __init__(self) -> None:
        self.open: list[ShardTable] = []

    def __call__(self, df: DataFrame, shares: Sequence[float]) -> list[SpooledShard]:
        columns = (
            prepare(df.schema, "features", "feature", float_dtype="float32"),
            prepare(df.schema, "label", "label", float_dtype="float32"),
        )
        spec = TableSpec(
            columns=columns,
            num_shards=len(shares),
            is_gang=len(shares) <= 2,  # there are two slots
            shares=tuple(shares),
        )
        table = ShardTable(df, spec, run_id=uuid.uuid4().hex[:12])
        self.open.append(table)
        return list(table.collect())


@pytest.fixture
def tables() -> Iterator[Tables]:
    tables = Tables()
    yield tables
    for table in tables.open:
        table.close()


def labels(table: ShardTable, spooled: Sequence[SpooledShard]) -> list[list[float]]:
    columns = table.columns(spooled)
    return [
        open_spool(
            Path(part.shard.path), columns, num_rows=part.shard.num_rows, split="train"
        ).columns["label label"].tolist()
        for part in spooled
    ]  # fmt: skip


@pytest.mark.spark
@pytest.mark.parametrize("shares", [(2 / 3, 1 / 3), (0.05, 0.95), (0.5, 0.2, 0.3), (1.0,)])
def test_rows_follow_the_shares(df: DataFrame, tables: Tables, shares: Sequence[float]) -> None:
    spooled = tables(df, shares)
    assert [part.shard.shard_id for part in spooled] == list(range(len(shares)))
    for part, share in zip(spooled, shares, strict=True):
        assert part.shard.num_rows == pytest.approx(share * ROWS, abs=0.03 * ROWS)
    rows = sorted(label for shard in labels(tables.open[0], spooled) for label in shard)
    assert rows == pytest.approx(sorted(row["label"] for row in df.select("label").collect()))


@pytest.mark.slow
@pytest.mark.spark
def test_equal_data_gives_equal_shards_in_equal_order(df: DataFrame, tables: Tables) -> None:
    shares = (2 / 3, 1 / 3)
    one, two = tables(df, shares), tables(df.orderBy("label").repartition(5), shares)
    assert [part.shard.fingerprint for part in one] == [part.shard.fingerprint for part in two]
    assert labels(tables.open[0], one) == labels(tables.open[1], two)


def make_net() -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def request(num_workers: int, **changes: Any) -> FitRequest:
    values: dict[str, Any] = {
        "task": "regression", "loss": "mse", "optimizer": "sgd", "learning_rate": 0.1,
        "epochs": 5, "batch_size": ROWS, "seed": 7,
    }  # fmt: skip
    return FitRequest(
        module=make_net,
        config=TrainConfig(**{**values, **changes}),
        feature_cols=("features",),
        input_shapes=(None,),
        label_col="label",
        weight_col=None,
        validation_col=None,
        num_workers=num_workers,
        max_restarts=0,
        verbose=0,
        cpus_per_worker=None,
        gpus_per_worker=None,
    )


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.gang
def test_a_fit_with_shares_equals_one_worker(
    df: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch holds a worker's whole shard, so both train on all rows in every step."""
    import torch

    shared = AllReduce(work_shares=(4, 1))
    with caplog.at_level(logging.WARNING, "sparkdl"):
        result = fit(df, request(2, sync_strategy=shared))
    expected = fit(df, request(1))
    assert result.summary.steps == expected.summary.steps == 5
    assert "stay together" not in caplog.text
    for name, value in expected.module.state_dict().items():
        torch.testing.assert_close(result.module.state_dict()[name], value, rtol=0, atol=1e-5)


@pytest.mark.spark
def test_as_many_shares_as_workers(df: DataFrame) -> None:
    with pytest.raises(ConfigError, match="received 3 for 2 worker"):
        fit(df, request(2, sync_strategy=AllReduce(work_shares=(1, 2, 3))))


def plan(*rows: int) -> TrainPlan:
    shards = [
        Shard(
            shard_id=i, host="h", path="p", num_rows=n, num_validation_rows=0, fingerprint="f",
            num_bytes=0,
        )
        for i, n in enumerate(rows)
    ]  # fmt: skip
    columns = [Column(name="x", role="feature", dtype="float32", shape=(2,))]
    return make_plan(columns=columns, shards=shards, world_size=len(rows), batch_size=10, epochs=1)


def test_the_batch_size_is_that_of_the_largest_share() -> None:
    made = plan(600, 300)
    assert made.steps_per_epoch == 60
    assert made.rows_by_rank(0) == [10, 5]


@pytest.mark.parametrize(
    ("rows", "shares", "is_told"),
    [
        ((600, 300), None, False),
        ((900, 100), None, True),
        ((900, 100), (0.9, 0.1), False),
        ((500, 500), (0.9, 0.1), True),
        ((10, 0), (0.1, 0.9), False),  # one step; nobody waits for long
    ],
)
def test_only_unwanted_skew_is_told(
    rows: tuple[int, ...],
    shares: tuple[float, ...] | None,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots: Any = SimpleNamespace(threads=1)
    with caplog.at_level(logging.WARNING, "sparkdl"):
        module._log_plan(plan(*rows), slots, shares)
    assert ("stay together" in caplog.text) == is_told


def test_other_shares_are_another_run() -> None:
    config = TrainConfig(sync_strategy=AllReduce(work_shares=(2, 1)))
    other = replace(config, sync_strategy=AllReduce(work_shares=(1, 2)))
    keys = {run_key(make_net(), plan(9, 9).columns, one, "content") for one in (config, other)}
    assert len(keys) == 2


def test_options() -> None:
    strategy = AllReduce(work_shares=[2, 1, 1])  # type: ignore[arg-type]  # as files give them
    assert strategy.work_shares == (2, 1, 1)
    assert strategy.row_shares(3) == (0.5, 0.25, 0.25)
    assert AllReduce().row_shares(3) is None
    for wrong in ((1, 0), (1, -1), (1, float("nan"))):
        with pytest.raises(ConfigError, match="work_shares"):
            AllReduce(work_shares=wrong)

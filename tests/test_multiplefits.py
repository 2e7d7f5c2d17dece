"""Several fits on the same rows: one spool, models as one after the other, nothing left."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl import Callback, ParquetSource, Tensor, TorchRegressor
from sparkdl.errors import WorkerError
from sparkdl.spark.frames.shard_table import ShardTable
from sparkdl.spark.session.compat import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang]


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    x = F.array(*[((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)])
    return spark.range(0, 90, 1, 3).select(x.alias("features"), (x[0] - x[2]).alias("label"))


def persisted(spark: SparkSession) -> set[int]:
    """Numbers of the RDDs that Spark keeps."""
    if is_connect(spark):
        return set()
    return set(spark.sparkContext._jsc.getPersistentRDDs())  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def nothing_is_left(spark: SparkSession) -> Iterator[None]:
    before = persisted(spark)  # other modules hold DataFrames of their own
    yield
    assert persisted(spark) <= before


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[ShardTable]:
    """The tables that are made."""
    made: list[ShardTable] = []
    first = ShardTable.__init__

    def noted(self: ShardTable, *args: Any, **kwargs: Any) -> None:
        first(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(ShardTable, "__init__", noted)
    return made


def make_net() -> nn.Module:
    return nn.Linear(3, 1)


def regressor(**params: Any) -> TorchRegressor:
    options: dict[str, Any] = {"epochs": 2, "batchSize": 16, "seed": 3, "numWorkers": 1}
    return TorchRegressor(module=make_net, verbose=0, **{**options, **params})


def weights(model: Any) -> list[float]:
    flat: list[float] = torch.cat([p.flatten() for p in model.module.parameters()]).tolist()
    return flat


@pytest.mark.slow
def test_threads_train_at_the_same_time(df: DataFrame, tables: list[ShardTable]) -> None:
    estimator = regressor()
    maps = [{estimator.learningRate: rate} for rate in (0.001, 0.01, 0.1)]
    fits = estimator.fitMultiple(df, maps)
    with ThreadPoolExecutor(2) as pool:
        found = dict(pool.map(lambda _: next(fits), maps))
    assert len(tables) == 1
    assert sorted(found) == [0, 1, 2]
    assert weights(found[1]) == weights(estimator.fit(df, maps[1]))
    assert len({tuple(weights(model)) for model in found.values()}) == 3
    with pytest.raises(StopIteration):
        next(fits)


class Pause(Callback):
    """Longer than the patience below."""

    def on_train_begin(self, state: Any) -> None:
        time.sleep(6)


@pytest.mark.slow
def test_fits_that_need_all_slots_wait_for_each_other_as_long_as_it_takes(
    spark: SparkSession, df: DataFrame
) -> None:
    estimator = regressor(numWorkers=2, callbacks=[Pause()])
    # On a busy machine a task takes more than a second to start, whoever holds the slots.
    spark.conf.set("spark.sparkdl.queueTimeout", "5")
    try:
        fits = estimator.fitMultiple(df, [{}, {estimator.learningRate: 0.1}])
        with ThreadPoolExecutor(2) as pool:
            found = dict(pool.map(lambda _: next(fits), range(2)))
    finally:
        spark.conf.unset("spark.sparkdl.queueTimeout")
    waits = sorted(model.summary.phase_seconds["fit: wait"] for model in found.values())
    assert waits[0] < 5
    assert waits[1] > 6


@pytest.mark.slow
def test_a_source_trains_in_threads(spark: SparkSession, df: DataFrame, tmp_path: Path) -> None:
    df.write.parquet(str(tmp_path / "rows"))
    estimator, source = regressor(), ParquetSource(str(tmp_path / "rows"))
    fits = estimator.fitMultiple(source, [{}, {estimator.learningRate: 0.1}])
    with ThreadPoolExecutor(2) as pool:
        found = dict(pool.map(lambda _: next(fits), range(2)))
    assert weights(found[0]) == weights(estimator.fit(source))


def plus(batch: Any, number: float) -> Any:
    return np.stack(batch.column(0).to_numpy(zero_copy_only=False)) + np.float32(number)


@pytest.mark.slow
def test_inputs_that_mean_the_same_share_a_spool(df: DataFrame, tables: list[ShardTable]) -> None:
    estimator = regressor()

    def named(number: float) -> Any:  # anew each time, as a job file's objects are
        return {"input": Tensor("features", transform=partial(plus, number=number))}

    maps: list[Any] = [{estimator.inputs: named(n)} for n in (1.0, 1.0, 2.0)]
    dict(estimator.fitMultiple(df, maps))
    assert len(tables) == 2


@pytest.mark.slow
def test_other_columns_get_a_spool_of_their_own(df: DataFrame, tables: list[ShardTable]) -> None:
    other = df.selectExpr("*", "2 * label as twice")
    estimator = regressor()
    maps: list[Any] = [{}, {estimator.labelCol: "twice"}, {estimator.seed: 5}]
    found = dict(estimator.fitMultiple(other, maps))
    assert len(tables) == 2
    assert weights(found[1]) == weights(estimator.fit(other, maps[1]))


def fails(output: Any, target: Any) -> Any:
    raise ArithmeticError("of one map")


@pytest.mark.slow
def test_an_error_in_one_leaves_the_others_and_nothing_behind(df: DataFrame) -> None:
    estimator = regressor()
    fits = estimator.fitMultiple(df, [{}, {estimator.loss: fails}, {}])
    assert next(fits)[0] == 0
    with pytest.raises(WorkerError, match="of one map"):
        next(fits)
    assert next(fits)[0] == 2


@pytest.mark.slow
def test_what_is_not_asked_for_leaves_nothing_behind(df: DataFrame) -> None:
    estimator = regressor()
    fits = estimator.fitMultiple(df, [{}, {}])
    next(fits)
    del fits
    gc.collect()

"""Workers read Parquet on HDFS by themselves, where there is no libhdfs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch import nn

from sparkdl import ParquetSource, TorchRegressor
from sparkdl.errors import StorageError
from tests.hdfs.daemons import Hdfs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def regressor() -> TorchRegressor:
    return TorchRegressor(
        module=nn.Linear(2, 1), featuresCol="x", labelCol="y", epochs=2, numWorkers=2, verbose=0
    )


def test_workers_read_hdfs_over_http(spark: SparkSession, hdfs: Hdfs, url: str) -> None:
    df = spark.range(60).selectExpr("array(double(id % 7), 1D) AS x", "double(id % 5) AS y")
    df.repartition(3).write.parquet(f"{url}/rows")
    over_http = f"{url}/rows".replace(hdfs.url, hdfs.webhdfs_url)
    model = regressor().fit(ParquetSource(over_http))
    assert model.summary.rows == 60
    assert model.transform(spark.read.parquet(f"{url}/rows")).count() == 60


def test_without_libhdfs_the_remedy_is_named(spark: SparkSession, url: str) -> None:
    with pytest.raises(StorageError, match="webhdfs"):
        regressor().fit(ParquetSource(f"{url}/rows"))

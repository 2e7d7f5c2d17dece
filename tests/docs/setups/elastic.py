"""What do the blocks of docs/elastic.md find?"""

from __future__ import annotations

from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def prepare(spark: SparkSession) -> dict[str, Any]:
    rows = [([float(i % 5), 1.0], i % 2) for i in range(400)]
    df = spark.createDataFrame(rows, "features array<float>, label int")
    return {"make_net": make_net, "df": df, "slots": spark.sparkContext.defaultParallelism}


def check(names: dict[str, Any]) -> None:
    spark = names["spark"]
    estimator = names["estimator"].setParams(numWorkers=8, minWorkers=1, verbose=0, batchSize=10)
    spark.conf.set("spark.sparkdl.elasticWait", "0.1")
    try:
        summary = estimator.fit(names["df"]).summary
    finally:
        spark.conf.unset("spark.sparkdl.elasticWait")
    assert names["slots"] < 8  # of which it wants eight
    assert summary.gang_sizes == [[0, names["slots"]]]
    assert summary.world_size == names["slots"]
    assert len(summary.record.facts["rows_by_rank"]) == names["slots"]

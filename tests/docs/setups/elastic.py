"""What the estimators of docs/elastic.md must do where fewer slots are free than they want."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    spark = names["spark"]
    slots = spark.sparkContext.defaultParallelism
    rows = [([float(i % 5), 1.0], i % 2) for i in range(400)]
    df = spark.createDataFrame(rows, "features array<float>, label int")
    estimator = names["estimator"].setParams(numWorkers=8, minWorkers=1, verbose=0, batchSize=10)
    spark.conf.set("spark.sparkdl.elasticWait", "0.1")
    try:
        summary = estimator.fit(df).summary
    finally:
        spark.conf.unset("spark.sparkdl.elasticWait")
    assert slots < 8  # of which it wants eight
    assert summary.gang_sizes == [[0, slots]]
    assert summary.world_size == slots
    assert len(summary.record.facts["rows_by_rank"]) == slots

"""What do the blocks of docs/callbacks.md find?"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession
from torch import nn


def make_net() -> nn.Module:
    return nn.Linear(2, 2)


def prepare(spark: SparkSession) -> dict[str, Any]:
    rows = [([float(i), 1.0], i % 2) for i in range(8)]
    df = spark.createDataFrame(rows, "features array<float>, label int")
    return {"make_net": make_net, "df": df}


def check(names: dict[str, Any]) -> None:
    summary = names["model"].summary
    assert len(summary.history) < 30
    assert summary.history[-1]["learning_rate"] < 0.1

"""What does the block of docs/explain.md find?"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession
from torch import nn

from sparkdl import TorchClassifier


def make_net() -> nn.Module:
    return nn.Linear(2, 2)


def prepare(spark: SparkSession) -> dict[str, Any]:
    rows = [([float(i), 1.0], i % 2) for i in range(256)]
    df = spark.createDataFrame(rows, "features array<float>, label int")
    return {"TorchClassifier": TorchClassifier, "make_net": make_net, "df": df}


def check(names: dict[str, Any]) -> None:
    found = names["explanation"].to_dict()
    assert (found["plan"]["num_workers"], found["plan"]["rows"]) == (2, 256)
    chosen = names["model"].summary.chosen
    assert set(chosen) == {"numWorkers", "syncStrategy", "batchSize", "learningRate"}

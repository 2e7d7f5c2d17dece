"""What the blocks of docs/extending.md find."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from sparkdl import TorchClassifier
from tests.docs.setups.explain import make_net


def prepare(spark: SparkSession) -> dict[str, Any]:
    rows = [([float(i % 7), 1.0], i % 2) for i in range(256)]
    df = spark.createDataFrame(rows, "features array<float>, label int")
    return {"TorchClassifier": TorchClassifier, "make_net": make_net, "df": df}


def check(names: dict[str, Any]) -> None:
    assert len(names["model"].summary.history) == 2

"""What do the blocks of docs/debugging.md find?"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession
from torch import nn

import sparkdl
from sparkdl import TorchClassifier


def make_net() -> nn.Module:
    return nn.Linear(2, 2)


def train() -> int:
    return len(sparkdl.context().loader(batch_size=4))


def prepare(spark: SparkSession) -> dict[str, Any]:
    rows = [([float(i), 1.0], i % 2) for i in range(8)]
    df = spark.createDataFrame(rows, "features array<float>, label int")
    names = {"TorchClassifier": TorchClassifier, "make_net": make_net, "train": train}
    return {**names, "df": df}


def check(names: dict[str, Any]) -> None:
    classifier = names["classifier"].setParams(numWorkers=1, verbose=0)
    assert classifier.fit(names["df"]).summary.steps == 1

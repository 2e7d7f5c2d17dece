"""What do the blocks of docs/training_functions.md find?"""

from __future__ import annotations

from typing import Any

import torch
from pyspark.sql import SparkSession


def prepare(spark: SparkSession) -> dict[str, Any]:
    points = torch.rand(200, 3, generator=torch.Generator().manual_seed(0))
    rows = [(x.tolist(), float(x.sum())) for x in points]
    return {"df": spark.createDataFrame(rows, "x array<float>, y float")}


def check(names: dict[str, Any]) -> None:
    assert set(names["weights"]) == {"weight", "bias"}
    assert names["size"] in (1, 2)
    assert names["divided"]["0.weight"].shape == (64, 3)

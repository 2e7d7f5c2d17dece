"""What do the blocks of docs/streaming.md find?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from torch import nn

from sparkdl import TorchClassifierModel
from tests.docs.digits import saved_model

make_net = partial(nn.Linear, 4, 3)


def prepare(spark: SparkSession) -> dict[str, Any]:
    schema = "features array<float>, label int"
    rows = [([float(i % 7), 1.0, float(i % 3), 0.0], i % 3) for i in range(60)]
    incoming = str(Path("incoming").absolute())
    spark.createDataFrame(rows, schema).coalesce(1).write.parquet(incoming)
    model = saved_model(make_net(), "features", (4,), factory=make_net, num_classes=3)
    return {"make_net": make_net, "spark": spark, "model": model}


def check(names: dict[str, Any]) -> None:
    assert names["spark"].read.parquet("scores").count() == 60
    model = TorchClassifierModel.load("models/batch-00000000")
    assert model.trainingState is not None and model.trainingState.epoch == 2
    names["learn"](names["spark"].read.parquet("incoming"), 0)  # it is there already
    names["learn"](names["spark"].read.parquet("incoming"), 7)
    later = TorchClassifierModel.load("models/batch-00000007")
    assert later.trainingState is not None and later.trainingState.epoch == 4
    assert sorted(path.name for path in Path("models").iterdir()) == [
        "batch-00000000",
        "batch-00000007",
    ]

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
    lake = str(Path("lake").absolute())
    spark.createDataFrame(rows, schema).coalesce(1).write.parquet(f"{lake}/incoming")
    model = saved_model(make_net(), "features", (4,), factory=make_net, num_classes=3)
    return {"make_net": make_net, "spark": spark, "model": model, "lake": lake}


def check(names: dict[str, Any]) -> None:
    read, models = names["spark"].read, Path(names["lake"], "models")
    assert read.parquet(f"{names['lake']}/scores").count() == 60
    for batch_id, expected in ((0, 2), (7, 4)):
        names["learn"](read.parquet(f"{names['lake']}/incoming"), batch_id)
        model = TorchClassifierModel.load(str(models / f"batch-{batch_id:08d}"))
        assert model.trainingState is not None and model.trainingState.epoch == expected
    assert len(list(models.iterdir())) == 2

"""What do the blocks of docs/tuning.md find?"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from sparkdl import TorchClassifier, TorchClassifierModel
from sparkdl.models import MLP


class Net(MLP):
    def __init__(self) -> None:
        super().__init__(sizes=(64, 16), num_outputs=10)

    def forward(self, features: Any) -> Any:
        return super().forward(features.float() / 16)


def prepare(spark: SparkSession) -> dict[str, Any]:
    train = spark.read.parquet("data/digits/train").limit(200).cache()
    return {"TorchClassifier": TorchClassifier, "Net": Net, "train": train}


def check(names: dict[str, Any]) -> None:
    assert isinstance(names["best"], TorchClassifierModel)
    assert names["found"].best_value == names["table"]["val_loss"].min()
    assert len(names["table"]) == 5
    assert names["predictions"].count() == 178
    assert 1 <= len(names["choices"]) <= 2

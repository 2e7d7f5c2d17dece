"""What do the blocks of docs/persistence.md find?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.models.demo import DigitsNet
from tests.docs.digits import saved_model
from tests.s3 import make_bucket


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def prepare(spark: SparkSession) -> dict[str, Any]:
    make_bucket("models")
    model = saved_model(DigitsNet(), "image", (1, 8, 8))
    model.write().overwrite().save("s3://models/digits")
    cnn = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 26 * 26, 2))
    return {"model": model, "cnn": cnn, "mlp": Named()}


def check(names: dict[str, Any]) -> None:
    assert names["logits"].shape == (8, 10)
    assert all(Path(f"{name}.onnx").is_file() for name in ("digits", "cnn", "mlp"))

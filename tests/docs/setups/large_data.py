"""What do the blocks of docs/large_data.md find?"""

from __future__ import annotations

import io
from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, photos: torch.Tensor) -> torch.Tensor:
        return self.head(photos.float().mean((2, 3)) / 255)


def _photo(number: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (70, 70), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


def prepare(spark: SparkSession) -> dict[str, Any]:
    rows = [(bytearray(_photo(i)), i % 2) for i in range(40)]
    df = spark.createDataFrame(rows, "photo binary, label int")
    df.repartition(10).write.parquet("photos")
    return {"df": df, "make_net": Net}


def check(names: dict[str, Any]) -> None:
    assert names["model"].summary.validation_rows > 0

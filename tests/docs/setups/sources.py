"""What do the blocks of docs/sources.md find?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.sql import SparkSession
from torch import nn

from sparkdl import DatasetSource
from sparkdl.storage.storage import open_storage
from tests.s3 import make_bucket

_SHAPE = (3, 64, 64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.float().mean((2, 3)))


class ImageFolder:
    """Stands in for torchvision's."""

    def __init__(self, root: str, transform: Callable[[np.ndarray], torch.Tensor]) -> None:
        self._transform = transform

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return self._transform(np.full(_SHAPE, number, np.uint8)), number % 2


def to_tensor(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image) / 255


def make_validation() -> ImageFolder:
    return ImageFolder("/mnt/held_out", transform=to_tensor)


def prepare(spark: SparkSession) -> dict[str, Any]:
    make_bucket("bucket")
    images = [np.full(_SHAPE, i, np.uint8).tobytes() for i in range(40)]
    table = pa.table({"image": images, "label": [i % 2 for i in range(40)]})
    pq.write_table(table, "images.parquet")
    file = pa.BufferOutputStream()
    pq.write_table(table, file, row_group_size=2)
    open_storage("s3://bucket/train").write("part-0.parquet", file.getvalue().to_pybytes())
    test = spark.createDataFrame([(bytearray(image),) for image in images[:3]], "image binary")
    return {
        "make_net": Net,
        "test": test,
        "DatasetSource": DatasetSource,
        "ImageFolder": ImageFolder,
        "to_tensor": to_tensor,
        "make_validation": make_validation,
    }


def check(names: dict[str, Any]) -> None:
    assert names["predictions"].count() == 3
    assert names["model"].summary.history[0]["val_loss"] > 0

"""What do the blocks of docs/data.md find?"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from pyspark.sql import Row, SparkSession
from torch import nn


class Described(nn.Module):
    """Takes what the page's first estimator describes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2)
        self.words = nn.Embedding(100, 1)

    def forward(
        self, *, photo: torch.Tensor, words: torch.Tensor, is_word: torch.Tensor, age: torch.Tensor
    ) -> torch.Tensor:
        assert photo.shape[1:] == (3, 128, 128)
        colours = photo.float().mean((2, 3)) / 255
        said = (self.words(words).squeeze(2) * is_word).sum(1)
        return self.head(torch.cat([colours, said[:, None], age.float()[:, None]], 1))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.price = nn.Linear(4, 10), nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"kind": self.kind(features), "price": self.price(features)}


def make_accuracy() -> Any:
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(10)


def tokenizer(texts: list[str]) -> dict[str, list[list[int]]]:
    return {"input_ids": [[len(word) for word in text.split()] for text in texts]}


def tokenize(batch: Any) -> list[list[int]]:
    return tokenizer(batch.column("text").to_pylist())["input_ids"]


def to_grid(batch: Any) -> Any:
    return np.stack([column.to_numpy() for column in batch.columns], axis=1)


def _photo(number: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (140, 130), (number, 0, 0)).save(file, "JPEG")
    return file.getvalue()


def prepare(spark: SparkSession) -> dict[str, Any]:
    rows = [
        Row(
            jpeg=_photo(20 * i), text="so " * (i + 1), user=Row(age=i), label=i % 2,
            features=[float(i)] * 4, kind=i, price=float(i),
            held_out=i % 4 == 0,
        )
        for i in range(8)
    ]  # fmt: skip
    return {
        "df": spark.createDataFrame(rows),
        "make_net": Described,
        "make_heads": Heads,
        "make_accuracy": make_accuracy,
        "tokenizer": tokenizer,
        "tokenize": tokenize,
        "to_grid": to_grid,
    }


def check(names: dict[str, Any]) -> None:
    options = {"numWorkers": 1, "verbose": 0}
    assert names["classifier"].setParams(**options).fit(names["df"]).summary.history
    estimator = names["estimator"].setParams(**options, validationIndicatorCol="held_out")
    assert "loss_kind" in estimator.fit(names["df"]).summary.history[0]

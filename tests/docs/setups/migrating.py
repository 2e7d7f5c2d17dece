"""What do the blocks of docs/migrating.md find?"""

from __future__ import annotations

from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn

import sparkdl
from sparkdl import TorchRunner


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([a, b], 1))


def train(epochs: int) -> int:
    return epochs * len(sparkdl.context().loader(batch_size=4, shuffle=False))


def prepare(spark: SparkSession) -> dict[str, Any]:
    torch.save(Net().state_dict(), "weights.pt")
    rows = [([float(i)] * 3, float(i), i % 2) for i in range(8)]
    df = spark.createDataFrame(rows, "a array<float>, b float, label int")
    return {"torch": torch, "TorchRunner": TorchRunner, "make_net": Net, "train": train, "df": df}


def check(names: dict[str, Any]) -> None:
    assert names["weights"] >= 5
    fitted = names["classifier"].setParams(verbose=0, epochs=1).fit(names["df"])
    assert fitted.summary.world_size == 2
    assert names["model"].summary.rows == 8

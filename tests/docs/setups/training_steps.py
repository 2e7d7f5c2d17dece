"""What do the blocks of docs/training_steps.md find?"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn
from torch.nn.functional import softplus

from sparkdl import Sequence, TorchClassifier, TorchEstimator
from sparkdl.models import GAN


class MyLightningModule(nn.Module):
    """Has what is looked for in a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        inputs, target = batch
        return nn.functional.cross_entropy(self(inputs), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def prepare(spark: SparkSession) -> dict[str, Any]:
    points = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    return {
        "torch": torch,
        "softplus": softplus,
        "partial": partial,
        "TorchEstimator": TorchEstimator,
        "TorchClassifier": TorchClassifier,
        "Sequence": Sequence,
        "GAN": GAN,
        "MyLightningModule": MyLightningModule,
        "df": spark.createDataFrame([(p.tolist(),) for p in points], "features array<float>"),
    }


def check(names: dict[str, Any]) -> None:
    assert names["rows"].shape == (1000, 2)

"""What do the blocks of docs/training_steps.md find?"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torchmetrics
from pyspark.sql import SparkSession
from torch import nn
from torch.nn.functional import softplus

from sparkdl import EarlyStopping, Sequence, TorchClassifier, TorchEstimator
from sparkdl.models import GAN


class LightningModule(nn.Module):
    """Lightning's takes long to import; sparkdl asks for methods only."""

    log: Any


def prepare(spark: SparkSession) -> dict[str, Any]:
    points = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    rows = [(p.tolist(), int(p[0] > 0), i % 4 == 0) for i, p in enumerate(points)]
    return {
        "torch": torch,
        "softplus": softplus,
        "partial": partial,
        "TorchEstimator": TorchEstimator,
        "TorchClassifier": TorchClassifier,
        "Sequence": Sequence,
        "GAN": GAN,
        "LightningModule": LightningModule,
        "Accuracy": torchmetrics.Accuracy,
        "EarlyStopping": EarlyStopping,
        "cross_entropy": nn.functional.cross_entropy,
        "nn": nn,
        "df": spark.createDataFrame(rows, "features array<float>, label int, held_out boolean"),
    }


def check(names: dict[str, Any]) -> None:
    assert names["rows"].shape == (1000, 2)
    record = names["model"].summary.history[-1]
    assert 0 < record["train_accuracy"] <= 1
    assert record["val_loss"] > 0

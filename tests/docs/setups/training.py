"""What do the blocks of docs/training.md find?"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))


def prepare(spark: SparkSession) -> dict[str, Any]:
    points = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    rows = [(p.tolist(), int((p[0] > 0) + (p[1] > 0))) for p in points]
    folder = tempfile.TemporaryDirectory()
    return {
        "df": spark.createDataFrame(rows, "features array<float>, label int")
        .repartition(2)
        .cache(),
        "make_net": make_net,
        "folder": folder,
        "checkpoints": folder.name,
    }


def check(names: dict[str, Any]) -> None:
    names["folder"].cleanup()
    history = names["model"].summary.history
    assert history[-1]["val_f1"] > 0.7
    assert all(record["gradient_norm"] > 0 for record in history)
    curve = names["curve"]
    assert (curve["epoch"] % 1 > 0).any()
    assert list(curve["epoch"]) == sorted(curve["epoch"])
    assert names["longer"].summary.history[-1]["epoch"] == 3
    assert names["longer"].summary.steps == 3 * names["longer"].summary.history[0]["steps"]

"""What do the blocks of docs/reports.md find?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from torch import nn

import sparkdl
from sparkdl import TorchClassifier, TorchRunner


def make_net() -> nn.Module:
    return nn.Linear(2, 2)


def train() -> int:
    return sparkdl.context().rank


def prepare(spark: SparkSession) -> dict[str, Any]:
    rows = [([float(i), 1.0], i % 2) for i in range(64)]
    df = spark.createDataFrame(rows, "features array<float>, label int")
    names = {"TorchClassifier": TorchClassifier, "TorchRunner": TorchRunner}
    return {**names, "make_net": make_net, "train": train, "df": df}


def check(names: dict[str, Any]) -> None:
    path = Path(names["model"].summary.report_path)
    assert path.parent.parent.resolve() == Path("runs").resolve()
    assert path.is_file() and Path("report.html").is_file()
    assert len(list(Path("runs").iterdir())) == 3
    assert list(Path("tb").rglob("events*"))

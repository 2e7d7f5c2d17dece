"""The bucket of docs/persistence.md's reader, and what its blocks must reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.s3 import make_bucket


def prepare(spark: SparkSession) -> None:
    make_bucket("models")


def check(names: dict[str, Any]) -> None:
    assert names["logits"].shape == (8, 10)
    assert all(Path(f"{name}.onnx").is_file() for name in ("digits", "cnn", "mlp"))

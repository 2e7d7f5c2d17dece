"""What do the blocks of docs/gpus.md find?"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from sparkdl.models import ResNet20


def prepare(spark: SparkSession) -> dict[str, Any]:
    return {"make_net": ResNet20}


def check(names: dict[str, Any]) -> None:
    assert names["classifier"].getGpusPerWorker() == 1.0

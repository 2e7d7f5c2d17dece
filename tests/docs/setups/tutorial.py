"""What do the blocks of docs/tutorial.md find, and do they reach what the page says?"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession


def prepare(spark: SparkSession) -> dict[str, Any]:
    return {}  # the page makes everything itself


def check(names: dict[str, Any]) -> None:
    assert names["result"]["accuracy"] > 0.9
    assert names["logits"].shape == (1, 2)

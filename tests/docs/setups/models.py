"""What do the blocks of docs/models.md find?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparkdl.models.demo import DigitsNet
from tests.docs.digits import saved_model


def prepare(spark: SparkSession) -> dict[str, Any]:
    test = spark.read.parquet("data/digits/test").limit(100).withColumn("id", F.expr("uuid()"))
    return {"model": saved_model(DigitsNet(), "image", (1, 8, 8)), "test": test.cache(), "F": F}


def check(names: dict[str, Any]) -> None:
    assert Path("curves.png").is_file()
    assert names["worst"].columns == ["id", "loss"]
    assert names["worst"].count() == 20

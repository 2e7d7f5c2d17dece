"""The files of docs/sources.md's reader, and what its blocks must reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from sparkdl.storage.storage import open_storage
from tests.s3 import make_bucket


def prepare(spark: SparkSession) -> None:
    make_bucket("bucket")
    images = [np.full((3, 64, 64), i, np.uint8).tobytes() for i in range(40)]
    table = pa.table({"image": images, "label": [i % 2 for i in range(40)]})
    pq.write_table(table, "images.parquet")
    file = pa.BufferOutputStream()
    pq.write_table(table, file, row_group_size=2)
    open_storage("s3://bucket/train").write("part-0.parquet", file.getvalue().to_pybytes())


def check(names: dict[str, Any]) -> None:
    assert names["predictions"].count() == 40
    assert names["model"].summary.history[0]["val_loss"] > 0
    assert names["by_partitions"].summary.history

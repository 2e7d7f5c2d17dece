"""A driver program for `test_prepare.py`: prepares a folder of images.

Usage: prepare_files.py DATA OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from sparkdl.cli.images.prepare import prepare
from tests.cli.images.trees import job

OPTIONS = {"output_rows_per_file": 10, "split": {"test": 0.2}, "image": {"encoding": "png"}}


def main(data: str, output: str) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    prepare(spark, job(Path(data), Path(output), **OPTIONS))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

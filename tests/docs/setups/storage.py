"""The bucket of docs/storage.md's reader."""

from __future__ import annotations

from pyspark.sql import SparkSession

from tests.s3 import make_bucket


def prepare(spark: SparkSession) -> None:
    make_bucket("bucket")

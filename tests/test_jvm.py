"""A JVM that cannot use the archive of classes does not say so, and all tests would be slower."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.classic
def test_sessions_begin_with_the_archive(spark: SparkSession) -> None:
    if not jvm.ARCHIVE.exists():
        pytest.skip("there is no archive: `make archive` makes it")
    gateway: Any = spark.sparkContext._gateway
    assert str(jvm.ARCHIVE) in Path(f"/proc/{gateway.proc.pid}/maps").read_text()

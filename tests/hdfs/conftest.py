"""A real HDFS of two data nodes, and a Spark that uses it.

Python has no libhdfs here, as on most clusters; a test sees to that.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import jvm
from tests.hdfs.daemons import Hdfs
from tests.hdfs.jars import cached_jars, skip_if_told

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """Every block lies on both data nodes."""
    skip_if_told()
    with Hdfs(tmp_path_factory.mktemp("hdfs"), cached_jars(), num_data_nodes=2) as running:
        yield running


@pytest.fixture(scope="session")
def spark(hdfs: Hdfs) -> Iterator[SparkSession]:
    """Two slots, which find HDFS by URL; Spark runs a lost task again, up to three times."""
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master("local[2,4]")
        .appName("sparkdl HDFS tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config(map=jvm.ENTRIES)
    )
    for key, value in hdfs.client_conf.items():
        builder = builder.config(f"spark.hadoop.{key}", value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    with jvm.killing_soon():
        yield session
    session.stop()


@pytest.fixture
def url(hdfs: Hdfs) -> str:
    """A folder of HDFS that no other test uses."""
    return f"{hdfs.url}/{uuid.uuid4().hex}"

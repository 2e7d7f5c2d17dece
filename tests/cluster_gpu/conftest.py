"""A cluster whose executors have GPUs that do not exist: Spark believes a script's word.

It needs a session of its own, hence a pytest run of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DISCOVER = """#!/bin/sh
echo '{"name": "gpu", "addresses": ["0", "1"]}'
"""


@pytest.fixture(scope="session")
def gpu_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """`local-cluster[2,2,1024]`: two executors with two cores and two GPUs each."""
    from pyspark.sql import SparkSession

    script = tmp_path_factory.mktemp("gpus") / "discover.sh"
    script.write_text(DISCOVER)
    script.chmod(0o755)
    builder = SparkSession.builder.master("local-cluster[2,2,1024]").appName("sparkdl GPU tests")
    for owner in ("worker", "executor"):
        builder = builder.config(f"spark.{owner}.resource.gpu.amount", "2")
        builder = builder.config(f"spark.{owner}.resource.gpu.discoveryScript", str(script))
    session = (
        builder.config("spark.task.resource.gpu.amount", "1")
        .config("spark.ui.enabled", "false")
        .config("spark.executor.extraJavaOptions", os.environ["SPARK_SUBMIT_OPTS"])
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executorEnv.SPARK_LOCAL_IP", "127.0.0.1")
        .config("spark.executorEnv.OMP_NUM_THREADS", "1")
        .config("spark.locality.wait", "0")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()

"""A cluster of two executors with one slot each, as processes of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import jvm
from tests.cluster.daemon import FOLDER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def local_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the executors keep their files."""
    return tmp_path_factory.mktemp("spark-local")


@pytest.fixture(scope="session")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests ask for losses at moments; see `daemon`."""
    return tmp_path_factory.mktemp("moments")


@pytest.fixture(scope="session")
def cluster(local_dir: Path, moments: Path) -> Iterator[SparkSession]:
    """`local-cluster[2,1,1024]`; executors that die are replaced, as on a real cluster."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .appName("sparkdl cluster tests")
        .config("spark.ui.enabled", "false")
        .config("spark.executor.extraJavaOptions", os.environ["SPARK_SUBMIT_OPTS"])
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executorEnv.SPARK_LOCAL_IP", "127.0.0.1")
        .config(map=jvm.ENTRIES)
        .config("spark.python.daemon.module", "tests.cluster.daemon")
        .config(f"spark.executorEnv.{FOLDER}", str(moments))
        .config("spark.sparkdl.heartbeatTimeout", "5")
        .config("spark.local.dir", str(local_dir))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    with jvm.killing_soon():
        yield session
    session.stop()


@pytest.fixture(scope="session")
def undisturbed(cluster: SparkSession) -> str:
    """The bits of the fit that most tests disturb, without a fault."""
    from sparkdl.spark.fit.fit import fit
    from tests.cluster.test_recovery import digest, request, training_rows

    result = fit(training_rows(cluster), request())
    assert result.summary.restarts == 0
    return digest(result)

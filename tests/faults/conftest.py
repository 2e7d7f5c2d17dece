"""Three hosts on this machine, a Spark on them, and what must hold after every test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.faults.cluster import PATIENCE, Cluster, session, started_cluster
from tests.faults.faults import Faults
from tests.faults.hosts import network_of, started_hosts, what_is_missing
from tests.faults.oracle import Outcome, fit_request, left_behind, listening, trained, training_data

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAMES = ("driver", "worker-1", "worker-2")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Master and driver on the first host, and a worker on each of the two others."""
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(f"the fault suite needs hosts of its own, and lacks {missing}")
    folder = tmp_path_factory.mktemp("faults")
    with (
        started_hosts(folder, NAMES) as hosts,
        network_of(hosts[0]),
        started_cluster(folder, hosts) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def spark(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[SparkSession]:
    """A session of two executors, with the module's entries; other slots replace what is lost."""
    entries = getattr(request.module, "ENTRIES", {})
    session_ = session(cluster.url, cluster.driver.address, cluster.folder, **entries)
    yield session_
    session_.stop()


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return training_data(spark)


@pytest.fixture
def faults(cluster: Cluster) -> Faults:
    """To be told when to strike."""
    return Faults(cluster.fault_folder, cluster.hosts)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, df: DataFrame) -> Outcome:
    """The fit without a fault."""
    outcome = trained("undisturbed", df, fit_request(), Faults(cluster.fault_folder, cluster.hosts))
    assert outcome.restarts == 0
    return outcome


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test on the cluster begins with all hosts, and leaves nothing on any of them."""
    if "spark" not in request.fixturenames:
        yield
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    spark: SparkSession = request.getfixturevalue("spark")
    cluster.repair()
    ports = listening([os.getpid()])
    yield
    deadline = time.monotonic() + 90 * PATIENCE  # a clean-up may wait for another executor
    while (left := left_behind(spark, cluster.workers, ports)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []

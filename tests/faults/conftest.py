"""Three hosts on this machine, a Spark on them, and what must hold after every test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import jvm
from tests.faults.cluster import PATIENCE, Cluster, Sessions, started_cluster
from tests.faults.faults import Faults
from tests.faults.hosts import network_of, started_hosts, what_is_missing
from tests.faults.oracle import Outcome, fit_request, left_behind, listening, trained, training_data

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAMES = ("driver", "worker-1", "worker-2")


def entries_of(module: object) -> dict[str, str]:
    """Entries of the session that a module of tests needs."""
    entries: dict[str, str] = getattr(module, "ENTRIES", {})
    return entries


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put modules that need the same session behind each other: each session starts once."""
    groups: list[dict[str, str]] = []

    def group(item: pytest.Item) -> int:
        if item.path.parent != Path(__file__).parent:
            return -1
        entries = entries_of(getattr(item, "module", None))
        if entries not in groups:
            groups.append(entries)
        return groups.index(entries)

    items.sort(key=group)


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
        jvm.killing_soon(),
    ):
        yield cluster


@pytest.fixture(scope="session")
def sessions(cluster: Cluster) -> Iterator[Sessions]:
    """The session of this process, one at a time."""
    kept = Sessions(cluster)
    yield kept
    kept.stop()


@pytest.fixture(scope="module")
def spark(request: pytest.FixtureRequest, sessions: Sessions) -> SparkSession:
    """A session of two executors, with the module's entries; other slots replace what is lost.

    It is that of the module before, if that had the same entries.
    """
    return sessions.get(entries_of(request.module))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return training_data(spark)


@pytest.fixture
def faults(cluster: Cluster) -> Faults:
    """To be told when to strike."""
    return Faults(cluster.fault_folder, cluster.hosts)


_undisturbed: dict[str, Outcome] = {}
"""By the session's application: the first fit of each has its workers import what they need."""


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, df: DataFrame) -> Outcome:
    """The fit without a fault, once in each session."""
    application = df.sparkSession.sparkContext.applicationId
    if application not in _undisturbed:
        nothing = Faults(cluster.fault_folder, cluster.hosts)
        _undisturbed[application] = trained("undisturbed", df, fit_request(), nothing)
    outcome = _undisturbed[application]
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
    deadline = time.monotonic() + 150 * PATIENCE  # a clean-up may wait for another executor
    while (left := left_behind(spark, cluster.workers, ports)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []

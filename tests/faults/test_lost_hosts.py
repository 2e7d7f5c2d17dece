"""A host that is lost, or away for long, while the other one has slots for the whole gang.

Each executor has two slots, so that the gang goes on without another one: a test that waits for
Spark to replace an executor waits until its master gives up the host, or finds it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from sparkdl.spark.session.compat import num_slots
from tests.cluster.processes import parent_of
from tests.cluster.test_recovery import digest
from tests.faults.cluster import PATIENCE, SPARK_GIVES_UP_SECONDS, TWO_SLOTS, Cluster, marks
from tests.faults.faults import Fault, Faults, Victim, cut_cable, end_all
from tests.faults.hosts import Host, wait_until
from tests.faults.oracle import Outcome, fit_request, trained

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = marks(300)
ENTRIES = TWO_SLOTS
_SECONDS = 60 * PATIENCE


def spools(host: Host) -> list[str]:
    return [path for path in host.files("sparkdl-*") if "/blockmgr-" in path]


@pytest.fixture(autouse=True)
def both_hosts_have_an_executor(df: DataFrame) -> None:
    wait_until(lambda: num_slots(df.sparkSession) == 4, "two executors", _SECONDS)


def test_the_next_fit_removes_the_spools_of_a_host_that_is_back(
    df: DataFrame, undisturbed: Outcome, cluster: Cluster, faults: Faults,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """What a lost host has on its disk is removed by the next fit that meets it."""
    from sparkdl.spark.fit.fit import fit

    lost: list[Host] = []

    @contextmanager
    def lose_host(victim: Victim) -> Iterator[None]:
        lost.append(victim.host)
        end_all([parent_of(victim.executor), *victim.host.pids()])  # so none is started anew
        yield

    with faults.at("train", 1, lose_host):
        assert digest(fit(df, fit_request())) == undisturbed.digest
    (host,) = lost
    assert spools(host)
    assert "until a later fit of this session meets one" in caplog.text
    cluster.repair()
    wait_until(lambda: num_slots(df.sparkSession) == 4, "two executors", _SECONDS)
    caplog.clear()
    assert digest(fit(df, fit_request())) == undisturbed.digest
    assert not spools(host)


def cut_until(is_over: threading.Event) -> Fault:
    """The cable is cut until then."""

    @contextmanager
    def cut(victim: Victim) -> Iterator[None]:
        with cut_cable(victim):
            yield
            is_over.wait(4 * SPARK_GIVES_UP_SECONDS)

    return cut


def test_a_host_that_is_away_for_long_is_replaced(
    df: DataFrame, undisturbed: Outcome, faults: Faults
) -> None:
    """It comes back when the others train; what its workers do then, nobody hears any more.

    The last test of this session: Spark ends executors on a host that comes back, at any time.
    """
    is_replaced, is_over = threading.Event(), threading.Event()

    @contextmanager
    def see(_: Victim) -> Iterator[None]:
        is_replaced.set()
        is_over.set()
        time.sleep(2)  # the host is back meanwhile
        yield

    faults.at("train", 1, cut_until(is_over), seconds=0.0)
    attempts = range(1, 5)  # sparkdl may notice it before Spark, and try that host again
    for attempt in attempts:
        faults.at("train", 0, see, attempt=attempt)
    wanted = fit_request(max_restarts=len(attempts))
    try:
        outcome = trained("a cut until the gang trains elsewhere", df, wanted, faults)
    finally:
        is_over.set()
    assert is_replaced.is_set()
    assert outcome.digest == undisturbed.digest
    assert 1 <= outcome.restarts <= len(attempts), outcome.reasons
    assert outcome.seconds < 4 * SPARK_GIVES_UP_SECONDS + _SECONDS

"""Executors that go and come: drained, late, or gone for good; and caches that are evicted.

Each executor fills its host, so that a host that is lost leaves nothing that could replace it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.errors import ClusterError
from sparkdl.spark.fit import check_rows
from sparkdl.spark.frames.first_rows import FirstRows
from tests.cluster.processes import parent_of, state_of
from tests.faults.cluster import PATIENCE, Cluster, marks
from tests.faults.faults import Fault, Faults, Victim, end_all, kill_worker, send
from tests.faults.hosts import wait_until
from tests.faults.oracle import Outcome, fit_request, trained

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitRequest

pytestmark = marks(300)
ENTRIES = {
    "spark.executor.cores": "2",
    "spark.task.cpus": "2",
    "spark.cores.max": "4",
    "spark.decommission.enabled": "true",
}
"""Two executors of two cores, with a slot each."""

START_SECONDS = 20 * PATIENCE
LATE_SECONDS = START_SECONDS + 5
"""A host that comes back after more than startTimeout: it has ended the fit."""
QUEUE_SECONDS = 8


def decommission(drained: list[int]) -> Fault:
    """The executor gets no more tasks, and ends when its own have; as Kubernetes drains a node.

    Its process is added to ``drained``.
    """

    @contextmanager
    def drain(victim: Victim) -> Iterator[None]:
        drained.append(victim.executor)
        send(victim.executor, signal.SIGPWR)
        yield

    return drain


def lose_host_of(cluster: Cluster) -> Fault:
    """All that runs on the victim's host ends; when it comes back, its disk is empty."""

    @contextmanager
    def lose(victim: Victim) -> Iterator[None]:
        end_all([parent_of(victim.executor), *victim.host.pids()])  # so none is started anew
        disk = victim.host.disk
        victim.host.run("sh", "-c", f"rm -rf {disk}/spark/* {disk}/tmp/* /dev/shm/*")
        yield
        cluster.repair()

    return lose


def evict(spark: SparkSession) -> None:
    """Take all persisted rows from the executors, as Spark does when it needs the memory."""
    context: Any = spark.sparkContext
    for number in dict(context._jsc.getPersistentRDDs()):
        context._jsc.sc().unpersistRDD(number, True)  # the RDD keeps its storage level


@contextmanager
def setting(spark: SparkSession, name: str, seconds: float) -> Iterator[None]:
    """An entry of sparkdl's for the block."""
    entry = f"spark.sparkdl.{name}"
    before = spark.conf.get(entry)
    spark.conf.set(entry, f"{seconds:g}")
    try:
        yield
    finally:
        spark.conf.set(entry, before)


def test_an_executor_that_is_drained_ends_its_training_first(
    df: DataFrame, undisturbed: Outcome, faults: Faults
) -> None:
    drained: list[int] = []
    faults.at("train", 1, decommission(drained))
    outcome = trained("decommission in train", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0
    (executor,) = drained
    wait_until(lambda: state_of(executor) in "XZ", "the executor's end", 60 * PATIENCE)


def test_caches_that_are_evicted(
    spark: SparkSession,
    df: DataFrame,
    undisturbed: Outcome,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the spool and training, and again when a worker is lost."""
    check = check_rows.check_rows

    def checked(request: Any, table: Any, *given: Any, **named: Any) -> Any:
        if not isinstance(table, FirstRows):
            evict(spark)
        return check(request, table, *given, **named)

    @contextmanager
    def evict_and_kill(victim: Victim) -> Iterator[None]:
        evict(spark)
        with kill_worker(victim):
            yield

    monkeypatch.setattr(check_rows, "check_rows", checked)
    faults.at("checkpoint", 1, evict_and_kill)
    outcome = trained("evicted cache, kill_worker in checkpoint", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    # Where Spark makes the rows again on the other host, the gang looks in vain for its shards.
    assert 1 <= outcome.restarts <= 2


def test_a_host_that_comes_back_late(
    cluster: Cluster, spark: SparkSession, df: DataFrame, undisturbed: Outcome, faults: Faults
) -> None:
    faults.at("train", 1, lose_host_of(cluster), seconds=LATE_SECONDS)
    with setting(spark, "startTimeout", START_SECONDS):
        outcome = trained("host lost in train, back late", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 1
    assert outcome.relaunch is not None and outcome.relaunch > START_SECONDS


def test_a_host_that_does_not_come_back(
    cluster: Cluster, spark: SparkSession, df: DataFrame, faults: Faults
) -> None:
    from sparkdl.spark.fit.fit import fit

    faults.at("train", 1, lose_host_of(cluster))
    told = f"only 1 of the 2 slots that numWorkers=2 needs came up within {QUEUE_SECONDS} s of a lo"
    told = rf"{told}.*or raise spark.sparkdl.queueTimeout"
    queue = setting(spark, "queueTimeout", QUEUE_SECONDS)
    with queue, pytest.raises(ClusterError, match=told), faults:
        fit(df, fit_request())


def in_rounds() -> FitRequest:
    """More shards than the two slots, in five rounds."""
    wanted = fit_request(num_workers=3)
    strategy = sparkdl.ParameterAveraging(averaging_period=2)
    return replace(wanted, config=replace(wanted.config, sync_strategy=strategy, epochs=1))


def test_rounds_go_on_with_the_host_that_is_left(
    cluster: Cluster, spark: SparkSession, df: DataFrame, faults: Faults
) -> None:
    """Also where the rows are evicted, and an executor is drained before."""
    calm = Faults(cluster.fault_folder, cluster.hosts)
    undisturbed = trained("undisturbed rounds", df, in_rounds(), calm)

    @contextmanager
    def evicted(victim: Victim) -> Iterator[None]:
        evict(spark)
        yield

    faults.at("train", 0, evicted, attempt=1).at("train", 1, decommission([]), attempt=2)
    faults.at("train", 2, lose_host_of(cluster), attempt=4)
    outcome = trained("rounds: evicted, decommission, host lost", df, in_rounds(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0
    assert [struck.moment for struck in faults.struck] == ["train-0-1", "train-1-2", "train-2-4"]

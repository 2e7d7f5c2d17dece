"""Networks that are cut and healed, or slow, change no bit and cause no needless restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.faults.cluster import PATIENCE, SPARK_GIVES_UP_SECONDS, Cluster
from tests.faults.faults import Faults, Victim, cut_cable, deafen, slow_link
from tests.faults.oracle import Outcome, fit_request, trained

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(1500)]

_HEARTBEAT = "spark.sparkdl.heartbeatTimeout"


@pytest.fixture
def patient(spark: SparkSession) -> Iterator[None]:
    """No worker counts as hung before Spark itself gives it up."""
    before = spark.conf.get(_HEARTBEAT)
    spark.conf.set(_HEARTBEAT, str(2 * SPARK_GIVES_UP_SECONDS))
    yield
    assert before is not None
    spark.conf.set(_HEARTBEAT, before)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("phase", "seconds"), [("spool", 8), ("train", 3), ("train", 15), ("checkpoint", 8)]
)
def test_a_short_outage_costs_its_time_only(
    df: DataFrame, undisturbed: Outcome, faults: Faults, phase: str, seconds: float
) -> None:
    faults.at(phase, 1, cut_cable, seconds=seconds)
    outcome = trained(f"cut of {seconds} s in {phase}", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0
    assert outcome.seconds > seconds


@pytest.mark.usefixtures("patient")
def test_an_outage_one_way(
    df: DataFrame, undisturbed: Outcome, cluster: Cluster, faults: Faults
) -> None:
    faults.at("train", 1, deafen(cluster.hosts), seconds=8)
    outcome = trained("one-way cut of 8 s in train", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0


@pytest.mark.parametrize("phase", ["spool", "train"])
def test_a_host_that_is_away_for_long_is_replaced(
    df: DataFrame, undisturbed: Outcome, faults: Faults, phase: str
) -> None:
    faults.at(phase, 1, cut_cable, seconds=40)
    outcome = trained(f"cut of 40 s in {phase}", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts <= 2
    assert outcome.seconds < 40 + 100 * PATIENCE


@pytest.mark.usefixtures("patient")
def test_a_slow_link(df: DataFrame, undisturbed: Outcome, cluster: Cluster, faults: Faults) -> None:
    try:
        with slow_link(Victim(cluster.workers[0], 0)):
            pass
    except RuntimeError as error:
        pytest.skip(f"this kernel limits no link: {error}")
    faults.at("setup", 1, slow_link)
    outcome = trained("2 Mbit/s", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0

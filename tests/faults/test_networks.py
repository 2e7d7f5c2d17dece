"""Networks that are cut and healed, slow or lossy, change no bit and cause no needless restart.

Spark and sparkdl wait here as long as they do by default. TCP waits twice as long after each packet
that was lost, so the silence is up to twice as long as the cut.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import sparkdl
from tests.faults.cluster import DEFAULT_PATIENCE, PATIENCE, Cluster, session
from tests.faults.faults import (
    Faults,
    Victim,
    cut_cable,
    deafen,
    lossy_link,
    mute,
    slow_link,
)
from tests.faults.oracle import Outcome, fit_request, trained
from tests.faults.test_killed import GANG, TASKS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.gang,
    pytest.mark.slow,
    pytest.mark.timeout(400 * PATIENCE),
]
_SECONDS = 60 * PATIENCE
"""Longest time of a fit, besides that of its cuts and of TCP's waiting after them."""


@pytest.fixture(scope="module")
def spark(cluster: Cluster) -> Iterator[SparkSession]:
    session_ = session(cluster.url, cluster.driver.address, cluster.folder, **DEFAULT_PATIENCE)
    yield session_
    session_.stop()


def test_a_short_cut_in_each_phase(df: DataFrame, undisturbed: Outcome, faults: Faults) -> None:
    phases = [*TASKS[:2], *GANG, *TASKS[2:]]
    for number, phase in enumerate(phases):
        faults.at(phase, number % 2, cut_cable, seconds=3)
    outcome = trained("cuts of 3 s in each phase", df, fit_request(), faults)
    assert len(faults.struck) == len(phases)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0
    assert outcome.seconds < 2 * 3 * len(phases) + _SECONDS


def test_longer_cuts(
    df: DataFrame,
    undisturbed: Outcome,
    cluster: Cluster,
    faults: Faults,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults.at("preflight", 0, cut_cable, seconds=8)
    faults.at("spool", 1, mute(cluster.hosts), seconds=15)
    faults.at("train", 1, cut_cable, seconds=40)
    with caplog.at_level(logging.WARNING, "sparkdl"):
        outcome = trained("cuts of 8, 15, 40 s", df, fit_request(), faults)
    assert caplog.text == ""  # a channel that executors do not reach is told so
    assert len(faults.struck) == 3
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0
    assert outcome.seconds < 2 * 63 + _SECONDS


STRATEGIES = {
    "compressed gradients": sparkdl.AllReduce(compression="threshold"),
    "a parameter server": sparkdl.AsyncSGD(staleness_bound=2),
    "rounds": sparkdl.OneShotAveraging(),
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_cuts_of_one_way(df: DataFrame, cluster: Cluster, kind: str) -> None:
    wanted = fit_request(execution_mode="rounds" if kind == "rounds" else "gang")
    wanted = replace(wanted, config=replace(wanted.config, sync_strategy=STRATEGIES[kind]))
    faults = Faults(cluster.fault_folder, cluster.hosts)
    faults.at("train", 1, mute(cluster.hosts), seconds=8)
    later = 1 if kind == "rounds" else 0  # there each job is an attempt
    faults.at("evaluate", 0, deafen(cluster.hosts), seconds=3, attempt=later)
    outcome = trained(f"one-way cuts of 8, 3 s: {kind}", df, wanted, faults)
    assert len(faults.struck) == 2
    assert outcome.restarts == 0
    assert outcome.seconds < 2 * 11 + _SECONDS
    assert outcome.losses[-1] < outcome.losses[0] < math.inf
    if STRATEGIES[kind].deterministic:
        nothing = Faults(cluster.fault_folder, cluster.hosts)
        undisturbed = trained(f"undisturbed: {kind}", df, wanted, nothing)
        assert outcome.digest == undisturbed.digest


def test_a_host_that_is_away_for_long_is_replaced(
    df: DataFrame, undisturbed: Outcome, faults: Faults
) -> None:
    """What its workers do when it comes back, nobody hears any more."""
    faults.at("train", 1, cut_cable, seconds=150)
    outcome = trained("cut of 150 s", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 1
    assert outcome.seconds < 150 + 3 * _SECONDS


def test_a_slow_and_lossy_link(
    df: DataFrame, undisturbed: Outcome, cluster: Cluster, faults: Faults
) -> None:
    for link, program in ((slow_link, "tc"), (lossy_link, "nft")):
        if shutil.which(program) is None:
            pytest.skip(f"{link.__name__} needs {program}: install iproute2 and nftables")
        try:
            with link(Victim(cluster.workers[0], 0)):
                pass
        except RuntimeError as error:
            pytest.skip(f"this kernel has no {link.__name__}: {error}")
    faults.at("setup", 0, lossy_link).at("setup", 1, slow_link)
    outcome = trained("128 kbit/s, a twentieth lost", df, fit_request(), faults)
    assert len(faults.struck) == 2
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0
    assert outcome.seconds < 2 * _SECONDS

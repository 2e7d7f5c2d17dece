"""Networks that are cut and healed, slow or lossy, change no bit and cause no needless restart.

Spark and sparkdl wait here as long as they do by default. TCP waits twice as long after each packet
that was lost: it tries again 3.0, 6.2, 12.6, 25.4, ... seconds after the first. So training stands
still for up to twice as long as the cut, and these cuts end just before such a moment.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import sparkdl
from tests.faults.cluster import DEFAULT_PATIENCE, PATIENCE, Cluster, marks
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
    from pyspark.sql import DataFrame

pytestmark = marks(400)
ENTRIES = DEFAULT_PATIENCE
_SECONDS = 60 * PATIENCE
"""Longest time of a fit, besides that of its cuts and of TCP's waiting after them."""


SHORT = 2.5
CUTS = {"preflight": 6, "train": 24}
"""Seconds of cuts that are not short. The longest is longer than the silence after which a worker
makes its connection to the driver anew."""


def test_a_cut_in_each_phase(df: DataFrame, undisturbed: Outcome, faults: Faults) -> None:
    seconds = {phase: CUTS.get(phase, SHORT) for phase in (*TASKS[:2], *GANG, *TASKS[2:])}
    for number, phase in enumerate(seconds):
        faults.at(phase, number % 2, cut_cable, seconds=seconds[phase])
    outcome = trained("cuts of 2.5, 6 or 24 s in each phase", df, fit_request(), faults)
    assert len(faults.struck) == len(seconds)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0
    assert outcome.seconds < 2 * sum(seconds.values()) + _SECONDS


STRATEGIES = {
    "a parameter server": sparkdl.AsyncSGD(staleness_bound=2),
    "rounds": sparkdl.OneShotAveraging(),
}


# Gangs that synchronize: `test_a_cut_in_each_phase`.
@pytest.mark.parametrize(("kind", "seconds"), [("a parameter server", 6), ("rounds", SHORT)])
def test_cuts_of_one_way(df: DataFrame, cluster: Cluster, kind: str, seconds: float) -> None:
    wanted = fit_request(execution_mode="rounds" if kind == "rounds" else "gang")
    wanted = replace(wanted, config=replace(wanted.config, sync_strategy=STRATEGIES[kind]))
    faults = Faults(cluster.fault_folder, cluster.hosts)
    faults.at("train", 1, mute(cluster.hosts), seconds=seconds)
    later = 1 if kind == "rounds" else 0  # there each job is an attempt
    faults.at("evaluate", 0, deafen(cluster.hosts), seconds=SHORT, attempt=later)
    outcome = trained(f"one-way cuts of {seconds}, {SHORT} s: {kind}", df, wanted, faults)
    assert len(faults.struck) == 2
    assert outcome.restarts == 0
    assert outcome.seconds < 2 * (seconds + SHORT) + _SECONDS
    assert outcome.losses[-1] < outcome.losses[0] < math.inf
    if STRATEGIES[kind].deterministic:
        nothing = Faults(cluster.fault_folder, cluster.hosts)
        undisturbed = trained(f"undisturbed: {kind}", df, wanted, nothing)
        assert outcome.digest == undisturbed.digest


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
    outcome = trained("256 kbit/s, a twentieth lost", df, fit_request(), faults)
    assert len(faults.struck) == 2
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0
    assert outcome.seconds < 2 * _SECONDS

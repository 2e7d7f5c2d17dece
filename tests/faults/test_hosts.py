"""Hosts that are slow but alive, or full, or stand still."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sparkdl.errors import SparkDLError
from tests.faults.faults import (
    Fault,
    Faults,
    control_group,
    fill_disk,
    freeze,
    stop_worker,
    throttle,
)
from tests.faults.oracle import Outcome, fit_request, trained

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(1500)]


def skip_without_groups(controller: str) -> None:
    try:
        with control_group(controller, []):
            pass
    except OSError as error:
        pytest.skip(f"this machine lets nobody make a control group: {error}")


@pytest.mark.parametrize("what", [stop_worker, freeze])
def test_a_pause_is_no_loss(
    df: DataFrame, undisturbed: Outcome, faults: Faults, what: Fault
) -> None:
    if what is freeze:
        skip_without_groups("cgroup2")
    faults.at("train", 1, what, seconds=5)
    outcome = trained(f"{what.__name__} for 5 s", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0


def test_a_worker_that_stands_still_is_replaced(
    df: DataFrame, undisturbed: Outcome, faults: Faults
) -> None:
    faults.at("train", 1, stop_worker)
    outcome = trained("stop_worker in train", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 1
    assert "rank 1 has not been heard" in outcome.reasons[0]


@pytest.mark.xfail(reason="defect 8: nobody watches the jobs before training", strict=False)
@pytest.mark.parametrize("phase", ["preflight", "spool"])
def test_a_task_that_stands_still_is_run_again(
    df: DataFrame, undisturbed: Outcome, faults: Faults, phase: str
) -> None:
    faults.at(phase, 1, stop_worker, seconds=45)
    outcome = trained(f"stop_worker in {phase}", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.seconds < 45


def test_a_tenth_of_a_processor(df: DataFrame, undisturbed: Outcome, faults: Faults) -> None:
    skip_without_groups("cpu")
    faults.at("train", 1, throttle, seconds=20)
    outcome = trained("a tenth of a processor for 20 s", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0


def test_a_full_disk_is_told(df: DataFrame, undisturbed: Outcome, faults: Faults) -> None:
    faults.at("spool", 1, fill_disk)
    with pytest.raises(SparkDLError, match=r"(?s)disk.* is full.*spark\.local\.dir"):
        trained("a full disk in spool", df, fit_request(), faults)

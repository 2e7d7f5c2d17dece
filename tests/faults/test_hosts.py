"""Hosts that are slow but alive, stand still for a while, lack memory, or whose disk is full."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkdl.config import CheckpointConfig
from sparkdl.errors import StorageError, TrainingFailed
from tests.control_groups import skip_without
from tests.faults.cluster import DEFAULT_PATIENCE, PATIENCE, Cluster, marks
from tests.faults.faults import (
    EatMemory,
    Fault,
    Faults,
    fill_disk,
    fill_disk_of,
    freeze,
    little_memory,
    stop_worker,
    throttle,
)
from tests.faults.oracle import Outcome, fit_request, trained

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = marks(300)
ENTRIES = DEFAULT_PATIENCE
_SECONDS = 60 * PATIENCE
# After ten seconds of a worker's silence, a sixth of heartbeatTimeout, its watcher speaks for it.


def test_who_stands_still_for_a_while_is_not_lost(
    df: DataFrame, undisturbed: Outcome, faults: Faults
) -> None:
    faults.at("setup", 1, stop_worker, seconds=3).at("train", 0, stop_worker, seconds=11)
    outcome = trained("stopped for 3, 11 s", df, fit_request(), faults)
    assert len(faults.struck) == 2
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0
    assert 14 < outcome.seconds < 14 + _SECONDS


@pytest.mark.parametrize(("what", "seconds"), [(freeze, 11), (throttle, 10)])
def test_a_host_that_hardly_computes_is_not_lost(
    df: DataFrame, undisturbed: Outcome, faults: Faults, what: Fault, seconds: float
) -> None:
    skip_without("freezer" if what is freeze else "cpu")
    faults.at("train", 1, what, seconds=seconds)
    outcome = trained(f"{what.__name__} for {seconds} s", df, fit_request(), faults)
    assert len(faults.struck) == 1
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0
    shortest = seconds if what is freeze else 0  # a slow host may end a small fit all the same
    assert shortest < outcome.seconds < seconds + _SECONDS


def test_too_little_memory_is_told(df: DataFrame, faults: Faults, tmp_path: Path) -> None:
    skip_without("memory")
    eat = EatMemory(marker=str(tmp_path / "eaten"), rank=1, step=3)
    faults.at("train", 1, little_memory)
    with pytest.raises(TrainingFailed, match=r"memory.*spark\.executor\.memoryOverhead"):
        trained("too little memory", df, fit_request(eat, max_restarts=0), faults)
    assert (tmp_path / "eaten").exists()


def test_a_full_disk_of_an_executor_is_told(
    df: DataFrame, cluster: Cluster, faults: Faults
) -> None:
    faults.at("spool", 1, fill_disk)
    with pytest.raises(StorageError, match=r"(?s)disk.* is full.*spark\.local\.dir"):
        trained("a full disk in spool", df, fit_request(), faults)
    assert faults.struck


def test_full_disks_while_training_cost_checkpoints_and_the_report_only(
    df: DataFrame,
    undisturbed: Outcome,
    cluster: Cluster,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The executor's, which holds spools already, and the driver's, down to the last weights."""
    folder = cluster.driver.seen_from_here / "tmp"
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    faults.at("setup", 1, fill_disk).at("checkpoint", 0, fill_disk_of(cluster.driver))
    wanted = fit_request(
        report_dir=str(folder / "report"), checkpoint=CheckpointConfig(interval=15)
    )
    with caplog.at_level(logging.WARNING, "sparkdl"):
        outcome = trained("full disks in training", df, wanted, faults)
    shutil.rmtree(folder / "report")
    assert len(faults.struck) == 2
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0
    for told in ("TMPDIR", "there is no checkpoint", "the run leaves no report"):
        assert told in caplog.text
    assert list(folder.glob("sparkdl-*")) == []

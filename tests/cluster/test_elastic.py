"""Rounds need no fixed set of executors: these may come and go, and tasks may run twice."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.standalone import standalone
from tests.cluster.test_recovery import digest, training_rows
from tests.cluster.train_in_rounds import in_rounds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent.parent
DYNAMIC = [
    "spark.dynamicAllocation.enabled=true",
    "spark.dynamicAllocation.shuffleTracking.enabled=true",
    "spark.dynamicAllocation.initialExecutors=1",
    "spark.dynamicAllocation.minExecutors=1",
    "spark.dynamicAllocation.maxExecutors=2",
    "spark.dynamicAllocation.schedulerBacklogTimeout=1s",
]
SPECULATION = [
    "spark.speculation=true",
    "spark.speculation.interval=200ms",
    "spark.speculation.quantile=0.5",
    "spark.speculation.multiplier=2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("standalone")


@pytest.fixture(scope="module")
def master(folder: Path) -> Iterator[str]:
    """Spark runs no copy of a task on the same host, so the workers have different addresses."""
    with standalone(folder, ["127.0.0.1", "127.0.0.2"]) as url:
        yield url


def train(master: str, marker: Path, *settings: str) -> str:
    command = [sys.executable, "-m", "tests.cluster.train_in_rounds", master, str(marker)]
    done = subprocess.run(
        [*command, *settings], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "restarts 0" in done.stdout
    return done.stdout.split("digest ")[1].strip()


def second_copies(folder: Path) -> list[str]:
    """What the executors say of tasks that they ran although another copy was under way."""
    logs = [path.read_text() for path in folder.glob("work-*/app-*/*/stderr")]
    return [line for log in logs for line in re.findall(r"Running task \d+\.1 in stage .*", log)]


def test_dynamic_allocation_and_speculation_change_no_bit(
    cluster: SparkSession, master: str, folder: Path, tmp_path: Path
) -> None:
    from sparkdl.spark.fit.fit import fit

    expected = digest(fit(training_rows(cluster), in_rounds()))
    marker = tmp_path / "struck"
    assert train(master, marker, *DYNAMIC, *SPECULATION) == expected
    assert marker.exists()
    assert second_copies(folder)

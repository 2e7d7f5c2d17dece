"""Executors may come and go; rounds need no fixed set of them, and gangs need not either."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.standalone import standalone
from tests.cluster.test_recovery import digest, training_rows
from tests.cluster.train_on_changing import in_rounds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

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


def train(mode: str, master: str, directory: Path, *settings: str) -> str:
    """What the program prints."""
    module = "tests.cluster.train_on_changing"
    command = [sys.executable, "-m", module, mode, master, str(directory)]
    done = subprocess.run(
        [*command, *settings], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def second_copies(folder: Path) -> list[str]:
    """What the executors say of tasks that they ran although another copy was under way."""
    logs = [path.read_text() for path in folder.glob("work-*/app-*/*/stderr")]
    return [line for log in logs for line in re.findall(r"Running task \d+\.1 in stage .*", log)]


def test_dynamic_allocation_and_speculation_change_no_bit(
    cluster: SparkSession, master: str, folder: Path, tmp_path: Path
) -> None:
    from sparkdl.spark.fit.fit import fit

    expected = digest(fit(training_rows(cluster), in_rounds()))
    said = train("rounds", master, tmp_path, *DYNAMIC, *SPECULATION)
    assert said.split("digest ")[1].strip() == expected
    assert "restarts 0" in said
    assert (tmp_path / "rounds").exists()
    assert second_copies(folder)


@pytest.fixture(scope="module")
def gangs(master: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is printed of two fits in one session, of which the second loses a worker.

    For the first, the second executor is of another kind until the gang trains, and is gone after
    five seconds.
    """
    settings = [*DYNAMIC, "spark.dynamicAllocation.executorIdleTimeout=5s"]
    settings += ["spark.dynamicAllocation.minExecutors=0", "spark.sparkdl.elasticWait=2"]
    return train("gangs", master, tmp_path_factory.mktemp("gangs"), *settings)


def test_a_gang_takes_the_workers_that_come(gangs: str) -> None:
    """Of three that it wants: one, then a second, for which it asks; the third never comes."""
    said = gangs.split("gang:")[0]
    assert re.search(r"sizes \[\[0, 1\], .*\[\d+, 2\]\]", said), said


def test_a_gang_under_dynamic_allocation_has_the_same_bits(undisturbed: str, gangs: str) -> None:
    """It is a plain stage; the task that Spark runs again has the gang begin again."""
    said = gangs.split("gang:")[1]
    assert said.split("digest ")[1].strip() == undisturbed
    assert re.search(r"restarts 1\nsizes \[\[0, 2\], \[1[05], 2\]\]", said)


def test_gangs_of_two_applications_that_start_together_both_train(
    undisturbed: str, master: str, tmp_path: Path
) -> None:
    """Each has one of two slots, until one of them gives its own back; no restart is counted."""
    settings = [*DYNAMIC, "spark.dynamicAllocation.minExecutors=0", "spark.sparkdl.startTimeout=30"]
    with ThreadPoolExecutor(2) as pool:
        begun = [
            pool.submit(train, "competing", master, tmp_path / name, *settings)
            for name in ("one", "other")
        ]
        said = [future.result() for future in begun]
    for text in said:
        assert "restarts 0" in text
        assert text.split("digest ")[1].strip() == undisturbed

"""Who is silent because the cluster has too little for it is not hung, and no job starts again."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster import faults
from tests.cluster.processes import descendants, parent_of
from tests.cluster.test_recovery import digest, nothing_is_left, request, training_rows
from tests.cluster.test_rounds_recovery import in_rounds
from tests.control_groups import limited, skip_without

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitRequest

pytestmark = [
    pytest.mark.spark,
    pytest.mark.gang,
    pytest.mark.slow,
    # Beside many other programs the session alone takes minutes to start, which is no hang.
    pytest.mark.timeout(300, func_only=True),
]

__all__ = ["nothing_is_left"]  # a fixture for every test here


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> DataFrame:
    return training_rows(cluster)


def executors() -> set[int]:
    """The executors' JVMs.

    A child that an executor makes, such as Python's daemon, shows the executor's own command line
    for some milliseconds, until it begins its own program.
    """
    found = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[pid] = parent_of(pid)
    return {pid for pid, parent in found.items() if parent not in found}


@contextlib.contextmanager
def entries(session: SparkSession, **seconds: int) -> Iterator[None]:
    """Time-outs of the session, which are as before after the block."""
    keys = {f"spark.sparkdl.{name}": value for name, value in seconds.items()}
    before = {key: session.conf.get(key, None) for key in keys}
    try:
        for key, value in keys.items():
            session.conf.set(key, str(value))
        yield
    finally:
        for key, old in before.items():
            if old is None:
                session.conf.unset(key)
            else:
                session.conf.set(key, old)


@contextlib.contextmanager
def beside(action: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do something in another thread, which is told when the block has ended."""
    is_over = threading.Event()
    thread = threading.Thread(target=action, args=(is_over,))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def one_epoch(*callbacks: faults.Fault) -> FitRequest:
    wanted = in_rounds(*callbacks)
    return replace(wanted, num_workers=2, config=replace(wanted.config, epochs=1))


@pytest.fixture
def epoch(df: DataFrame) -> str:
    """The bits of one epoch in rounds, without a fault."""
    from sparkdl.spark.fit.fit import fit

    return digest(fit(df, one_epoch()))


def test_executors_that_take_long_to_come(
    cluster: SparkSession, df: DataFrame, epoch: str, tmp_path: Path
) -> None:
    """Both are lost in a round, and the new ones stand still for 8 s before they are there."""
    from sparkdl.spark.fit.fit import fit

    markers = [tmp_path / "0", tmp_path / "1"]
    first, held, waiting = executors(), list[int](), dict[int, float]()

    def hold_new_ones(is_over: threading.Event) -> None:
        while not is_over.wait(0.2):
            for pid in executors().difference(first, held):
                os.kill(pid, signal.SIGSTOP)
                held.append(pid)
                waiting[pid] = time.monotonic() + 8
            for pid in [pid for pid, until in waiting.items() if time.monotonic() > until]:
                del waiting[pid]
                os.kill(pid, signal.SIGCONT)
        for pid in waiting:  # one that the fit has not needed; the next test does
            os.kill(pid, signal.SIGCONT)

    kills = [faults.KillExecutor(str(one), rank, 7) for rank, one in enumerate(markers)]
    began = time.monotonic()
    # Python takes long to start beside other programs.
    with entries(cluster, startTimeout=240, heartbeatTimeout=5), beside(hold_new_ones):
        result = fit(df, one_epoch(*kills))
    assert all(one.exists() for one in markers)
    assert len(held) == 2 and time.monotonic() - began > 8
    assert result.summary.restarts == 0
    assert digest(result) == epoch


def test_a_worker_that_gets_a_fiftieth_of_a_processor(
    cluster: SparkSession, df: DataFrame, undisturbed: str, tmp_path: Path
) -> None:
    """It shares that with the processes that look after it, and computes in C."""
    from sparkdl.spark.fit.fit import fit

    skip_without("cpu")
    marker = tmp_path / "struck"
    limits: list[Sequence[int]] = []

    def limit(is_over: threading.Event) -> None:
        while not (marker.exists() and marker.read_text()):
            if is_over.wait(0.02):
                return
        worker = int(marker.read_text())
        limits.append([worker, *descendants(worker)])
        with limited("cpu", limits[0]):
            is_over.wait(30)

    # The first word of the watcher takes up to 9 s there, however long the time-out is.
    with entries(cluster, heartbeatTimeout=20), beside(limit):
        # It has lived for some seconds before, in which the watcher has imported what it needs.
        slow = faults.Slow(0.5, last_step=12)
        result = fit(df, request(slow, faults.ComputeInC(str(marker), 1, 12, seconds=32.0)))
    assert [len(pids) > 1 for pids in limits] == [True]
    assert result.summary.restarts == 0
    assert digest(result) == undisturbed

"""A job is cancelled until it has ended, however late Spark learns of it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.spark.session import background_job
from sparkdl.spark.session.background_job import TaskProgress, end_job


class FakeSpark:
    """Is its own context, in Java too; a job ends when it is cancelled often enough.

    It has one task, launched ``age_seconds`` ago.
    """

    def __init__(self, times: int, age_seconds: float = 10.0) -> None:
        self.sparkContext = self._jsc = self
        self.sc = self.statusTracker = self.statusStore = lambda: self
        self.times = times
        self.is_over = threading.Event()
        self.cancelled_at = list[float]()
        launched = SimpleNamespace(getTime=lambda: 1000 * (self.began - age_seconds))
        self.began = time.time()
        task = SimpleNamespace(status=lambda: "RUNNING", launchTime=lambda: launched)
        stage = SimpleNamespace(stageId=lambda: 3, currentAttemptId=lambda: 0)
        job = SimpleNamespace(stageIds=lambda: [3])
        self.getJobIdsForTag = {"t": [7]}.__getitem__
        self.getJobInfo = {7: SimpleNamespace(isDefined=lambda: True, get=lambda: job)}.__getitem__
        self.getStageInfo = {3: SimpleNamespace(isDefined=lambda: True, get=lambda: stage)}.get
        self.taskList = lambda *_: SimpleNamespace(size=lambda: 1, apply=[task].__getitem__)

    def cancelJobsWithTag(self, tag: str) -> None:
        assert tag == "t"
        self.cancelled_at.append(time.time() - self.began)
        self.times -= 1
        if self.times <= 0:
            self.is_over.set()
        if self.times < 0:
            raise ConnectionRefusedError("Spark is gone")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_job, "_AGAIN_SECONDS", 0.01)


def test_it_is_cancelled_until_it_ends() -> None:
    spark: Any = FakeSpark(3)
    end_job(TaskProgress(spark, "t"), spark.is_over)
    assert (spark.times, spark.is_over.is_set()) == (0, True)


@pytest.mark.parametrize("age_seconds", [0.0, 0.3, 5.0])
def test_a_task_that_may_wait_for_its_python_worker_is_not_interrupted(
    age_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would end the Python workers of others, too."""
    monkeypatch.setattr(background_job, "_BEGINS_SECONDS", 0.5)
    spark: Any = FakeSpark(1, age_seconds)
    end_job(TaskProgress(spark, "t"), spark.is_over)
    (at,) = spark.cancelled_at
    assert at + age_seconds >= 0.5


def test_a_spark_that_is_gone_is_no_error() -> None:
    spark: Any = FakeSpark(0)
    end_job(TaskProgress(spark, "t"), spark.is_over)


@pytest.mark.parametrize("reason", ["time", "hurry"])
def test_what_does_not_end_is_told_and_cancelled_later(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if reason == "time":
        monkeypatch.setattr(background_job, "_WAIT_SECONDS", 0.05)
    else:
        monkeypatch.setattr(background_job, "is_hurried", lambda: True)
    spark: Any = FakeSpark(100)
    began = time.monotonic()
    end_job(TaskProgress(spark, "t"), spark.is_over)
    assert time.monotonic() - began < 20
    assert "could not be cancelled yet" in caplog.text
    assert spark.is_over.wait(10)

"""A job is cancelled until it has ended, however late Spark learns of it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from sparkdl.spark.session import background_job
from sparkdl.spark.session.background_job import end_job


class FakeSpark:
    """Is its own context; a job ends when it is cancelled often enough."""

    def __init__(self, times: int) -> None:
        self.sparkContext = self
        self.times = times
        self.is_over = threading.Event()

    def cancelJobsWithTag(self, tag: str) -> None:
        assert tag == "t"
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
    end_job(spark, "t", spark.is_over)
    assert (spark.times, spark.is_over.is_set()) == (0, True)


def test_a_spark_that_is_gone_is_no_error() -> None:
    spark: Any = FakeSpark(0)
    end_job(spark, "t", spark.is_over)


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
    end_job(spark, "t", spark.is_over)
    assert time.monotonic() - began < 20
    assert "could not be cancelled yet" in caplog.text
    assert spark.is_over.wait(10)

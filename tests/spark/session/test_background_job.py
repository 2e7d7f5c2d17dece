"""A job in the background is watched, by what classic Spark or Spark Connect says of its tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.errors import ClusterError
from sparkdl.spark.session import background_job
from sparkdl.spark.session.background_job import BackgroundJob


class FakeConnect:
    """A Spark Connect client that tells of tasks what it is told to; cancelling ends its jobs."""

    def __init__(self) -> None:
        self.handlers: list[Callable[..., None]] = []
        self.registerProgressHandler = self.handlers.append
        self.removeProgressHandler = self.handlers.remove
        self.cancelled: list[str] = []
        self.ended = threading.Event()

    def getTags(self) -> set[str]:
        return set()

    def addTag(self, tag: str) -> None:
        return

    removeTag = addTag

    def interruptTag(self, tag: str) -> None:
        self.cancelled.append(tag)
        self.ended.set()

    def tell(self, running: int, ended: int) -> None:
        for handler in self.handlers:
            stages = [SimpleNamespace(num_completed_tasks=ended)]
            handler(stages=stages, inflight_tasks=running, operation_id=None, done=False)


FakeConnect.__module__ = "pyspark.sql.connect.session"


def job(spark: Any, work: Callable[[], int]) -> BackgroundJob[int]:
    return BackgroundJob(spark, work, tag="sparkdl-t", name="test")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_job, "_ASK_SECONDS", 0.05)


def test_on_spark_connect_too_a_task_that_hangs_is_noticed() -> None:
    spark = FakeConnect()

    def hang() -> int:
        spark.tell(running=2, ended=0)
        spark.tell(running=1, ended=1)
        spark.ended.wait(20)
        return 0

    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"an executor has not answered within 0.3 s .*startTi"):
        job(spark, hang).watched(0.3)
    assert time.monotonic() - began < 10
    assert set(spark.cancelled) == {"sparkdl-t"}
    assert spark.handlers == []


def test_slots_are_waited_for_and_tasks_of_others_do_not_count() -> None:
    spark = FakeConnect()

    def wait() -> int:
        spark.tell(running=0, ended=0)
        others = threading.Thread(target=spark.tell, args=(1, 0))
        others.start()
        others.join()
        time.sleep(0.6)
        return 3

    assert job(spark, wait).watched(0.2) == 3
    assert spark.cancelled == []


def test_each_task_that_ends_gives_the_others_more_time() -> None:
    spark = FakeConnect()

    def slow() -> int:
        for ended in range(6):
            spark.tell(running=1, ended=ended)
            time.sleep(0.2)
        return 6

    assert job(spark, slow).watched(0.5) == 6


def test_what_was_ended_before_it_began_never_begins() -> None:
    spark = FakeConnect()
    begun: list[int] = []
    one = job(spark, lambda: begun.append(1) or 1)
    one.end()
    one.begin()
    assert one.is_over.wait(10)
    assert (begun, one.values, spark.cancelled) == ([], [], [])

"""A job in the background is watched, by what classic Spark or Spark Connect says of its tasks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import TaskContext

from sparkdl.comm.worker_environment import SparkTask
from sparkdl.errors import ClusterError, DataError
from sparkdl.runtime.activity import shown_by
from sparkdl.spark.cluster.gang import task_of
from sparkdl.spark.session import background_job
from sparkdl.spark.session.background_job import BackgroundJob, Fate, TaskProgress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class FakeConnect:
    """A Spark Connect client that tells of tasks what it is told to; cancelling ends its jobs."""

    def __init__(self) -> None:
        self.handlers: list[Callable[..., None]] = []
        self.registerProgressHandler = self.handlers.append
        self.removeProgressHandler = self.handlers.remove
        self.cancelled: list[str] = []
        self.ended = threading.Event()
        self._of_thread = threading.local()

    def getTags(self) -> set[str]:
        """Those of the thread."""
        if not hasattr(self._of_thread, "tags"):
            self._of_thread.tags = set()
        tags: set[str] = self._of_thread.tags
        return tags

    def addTag(self, tag: str) -> None:
        self.getTags().add(tag)

    def removeTag(self, tag: str) -> None:
        self.getTags().discard(tag)

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


def test_slots_are_not_waited_for_without_end_nor_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background_job, "_SAY_SECONDS", 0.2)
    spark = FakeConnect()

    def wait() -> int:
        spark.tell(running=0, ended=0)
        return int(spark.ended.wait(20))

    told = r"no task started within 0.5 s: other jobs hold the slots.*spark\.sparkdl\.queueTimeout"
    with pytest.raises(ClusterError, match=told):
        job(spark, wait).watched(5, queue_seconds=0.5)
    assert spark.cancelled and "no task of the job 'test' has started yet" in caplog.text

    def begin() -> int:
        spark.tell(running=1, ended=0)
        time.sleep(0.8)
        return 4

    caplog.clear()
    assert job(spark, begin).watched(5, queue_seconds=0.5) == 4
    assert caplog.text == ""


def test_each_task_that_ends_gives_the_others_more_time() -> None:
    spark = FakeConnect()

    def slow() -> int:
        for ended in range(6):
            spark.tell(running=1, ended=ended)
            time.sleep(0.2)
        return 6

    assert job(spark, slow).watched(0.5) == 6


def test_its_caller_works_beside_it_once_spark_has_it() -> None:
    spark, seen = FakeConnect(), list[str]()

    def work() -> int:
        spark.tell(running=1, ended=0)
        seen.append("task")
        spark.ended.wait(20 if len(seen) == 1 else 0)
        return 5

    def fail() -> None:
        seen.append("beside it")
        raise DataError("the rows are of no use")

    with pytest.raises(DataError):
        job(spark, work).watched(5, once_submitted=fail)
    assert seen == ["task", "beside it"] and spark.cancelled == ["sparkdl-t"]
    # One that has ended before anybody could see it has been submitted, too.
    assert job(FakeConnect(), lambda: 6).watched(5, once_submitted=lambda: seen.append("6")) == 6
    assert seen[2:] == ["6"]
    with pytest.raises(ZeroDivisionError):
        job(spark, lambda: 1 // 0).watched(5, once_submitted=fail)
    # Nor is it waited for longer than for its slots.
    waiting = FakeConnect()
    with pytest.raises(ClusterError, match="no task started within 0"):
        job(waiting, lambda: int(waiting.ended.wait(20))).watched(
            5, queue_seconds=0.2, once_submitted=lambda: None
        )


def test_that_a_job_is_being_stopped_is_shown() -> None:
    spark, said = FakeConnect(), list[str]()
    going = job(spark, lambda: int(spark.ended.wait(30)))
    with shown_by(lambda what, detail: said.append(what)):
        going.begin()
        going.end()
    assert said == ["stopping"]


def test_what_was_ended_before_it_began_never_begins() -> None:
    spark = FakeConnect()
    begun: list[int] = []
    one = job(spark, lambda: begun.append(1) or 1)
    one.end()
    one.begin()
    assert one.is_over.wait(10)
    assert (begun, one.values, spark.cancelled) == ([], [], [])


def test_on_spark_connect_jobs_have_the_tags_of_the_thread_that_begins_them() -> None:
    spark = FakeConnect()
    for tag in ("mine", "sparkdl-of-the-fit"):
        spark.addTag(tag)
    seen: list[set[str]] = []
    job(spark, lambda: seen.append(set(spark.getTags())) or 0).watched(5)
    assert seen == [{"mine", "sparkdl-t", "test"}]


@pytest.mark.spark
def test_jobs_belong_to_the_group_of_the_thread_that_begins_them(spark: SparkSession) -> None:
    """So that ``cancelJobGroup`` ends them, too; but not what cleans up after that."""
    context = spark.sparkContext
    keys = ("spark.jobGroup.id", "spark.scheduler.pool")

    def work() -> tuple[set[str], list[str | None]]:
        return set(context.getJobTags()), [context.getLocalProperty(key) for key in keys]

    context.setJobGroup("group", "theirs")
    context.setLocalProperty("spark.scheduler.pool", "pool")
    for tag in ("mine", "sparkdl-of-the-fit"):
        context.addJobTag(tag)
    try:
        found = BackgroundJob(spark, work, tag="sparkdl-t", name="test").watched(5)
        assert found == ({"mine", "sparkdl-t"}, ["group", "pool"])
        found = BackgroundJob(spark, work, tag="sparkdl-t", name="x", cleans_up=True).watched(5)
        assert found == ({"sparkdl-t"}, [None, None])
        assert set(context.getJobTags()) == {"mine", "sparkdl-of-the-fit"}
    finally:
        context.clearJobTags()
        for key in (*keys, "spark.job.description", "spark.job.interruptOnCancel"):
            context.setLocalProperty(key, None)  # type: ignore[arg-type]


def says_its_task(folder: Path, number: int) -> int:
    """Runs in a task: the first one ends, and the second waits for a file."""
    context = TaskContext.get()
    assert context is not None
    told = folder / f"{number}.json"
    told.with_suffix(".new").write_text(json.dumps(asdict(task_of(context))))
    told.with_suffix(".new").rename(told)
    while number and not (folder / "end").exists():
        time.sleep(0.05)
    return number


@pytest.mark.spark
def test_spark_says_what_has_become_of_a_task(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.sparkContext.parallelize([0, 1], 2)
    going = BackgroundJob(
        spark, lambda: rows.map(partial(says_its_task, tmp_path)).collect(),
        tag="sparkdl-t", name="test",
    )  # fmt: skip
    told = [tmp_path / "0.json", tmp_path / "1.json"]
    began = time.monotonic()

    def fates() -> list[Fate]:
        found = going.progress.fates([tasks[0].stage_id])
        assert found is not None and set(found) == set(tasks)
        return [found[task] for task in tasks]

    try:
        going.begin()
        while not all(one.exists() for one in told):
            assert not going.wait(0.05) and time.monotonic() < began + 60
        tasks = [SparkTask(**json.loads(one.read_text())) for one in told]
        assert [task.partition for task in tasks] == [0, 1]
        while not fates()[0].has_succeeded:  # Spark's list is a moment late
            assert not going.wait(0.05) and time.monotonic() < began + 60
        first, second = fates()
        assert first == Fate(has_succeeded=True)
        assert not second.has_succeeded and second.runs_for is not None
        assert 0 <= second.runs_for < time.monotonic() - began
        assert going.progress.fates([2**30]) == {}, "an unknown stage has no tasks"
    finally:
        (tmp_path / "end").touch()
        going.end()


def test_spark_connect_does_not_say_what_has_become_of_a_task() -> None:
    spark: Any = FakeConnect()
    assert TaskProgress(spark, "sparkdl-t").fates([0]) is None


def left_behind(spark: FakeConnect) -> tuple[BackgroundJob[int], list[str]]:
    """A job that ends when it is cancelled, left in the background, and who gave it up."""

    def wait() -> int:
        spark.ended.wait(20)
        return 0

    told: list[str] = []
    left = job(spark, wait)
    left.begin()
    left.leave(600, lambda: told.append("given up"))
    return left, told


def test_what_goes_on_in_the_background_ends_before_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_job, "_LAST_SECONDS", 0.2)
    spark, order = FakeConnect(), list[str]()
    left, told = left_behind(spark)
    context = SimpleNamespace(stop=lambda: order.append(f"stopped, {told}"))

    class Context:
        def stop(self) -> None:
            context.stop()

    classic: Any = SimpleNamespace(sparkContext=Context())
    for _ in range(2):  # a second job of the session
        background_job._end_left_before_stop(classic)
    classic.sparkContext.stop()
    assert order == ["stopped, ['given up']"]
    assert left.is_over.is_set()
    assert set(spark.cancelled) == {"sparkdl-t"}
    background_job.end_left()  # there is nothing left
    assert told == ["given up"]


def test_what_ends_in_time_is_not_cancelled() -> None:
    spark = FakeConnect()
    left, told = left_behind(spark)
    threading.Timer(0.2, spark.ended.set).start()
    background_job.end_left()
    assert left.is_over.is_set()
    assert (spark.cancelled, told) == ([], [])

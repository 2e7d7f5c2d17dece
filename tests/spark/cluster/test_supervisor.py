"""What follows from what happens to a gang, with jobs and a session made up for the test."""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from pyspark.errors import (
    ArithmeticException,
    PySparkException,
    PySparkPicklingError,
    PythonException,
)

from sparkdl.comm.channel import Event, Hub
from sparkdl.comm.file_chunks import JobResults
from sparkdl.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    ShardLost,
    TrainingFailed,
    WorkerError,
)
from sparkdl.report.live.progress import Progress, View
from sparkdl.spark.cluster import supervisor as module
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.cluster.launch import Launch
from sparkdl.spark.cluster.slots import Slots
from sparkdl.spark.cluster.supervisor import GangResult, persistently, supervise
from sparkdl.spark.session import background_job
from sparkdl.spark.session.settings import Settings
from sparkdl.worker.lifecycle import GangOrder

Job = Callable[[], JobResults]


class FakeContext:
    """Remembers tags; cancelling ends every job that waits for it.

    It says of each job that ``num_running`` of its tasks run, and none has ended; of single tasks
    what is in ``tasks``.
    """

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.cancelled: list[str] = []
        self.ended = threading.Event()
        self.properties: dict[str, str | None] = {}
        self.num_running = 0
        self.tasks: list[Any] = []

    def task(self, number: int, *, partition: int, status: str = "RUNNING", age: float = 0) -> None:
        """Begin a task on an executor that lives."""
        launched = SimpleNamespace(getTime=lambda: 1000 * (time.time() - age))
        self.tasks.append(
            SimpleNamespace(
                taskId=lambda: number,
                partitionId=lambda: partition,
                status=lambda: status,
                executorId=lambda: "7",
                launchTime=lambda: launched,
            )
        )

    @property
    def _jsc(self) -> Any:
        stage = MagicMock()
        stage.numActiveTasks.return_value = self.num_running
        stage.numCompletedTasks.return_value = stage.numFailedTasks.return_value = 0
        context = MagicMock()
        tracker = context.sc.return_value.statusTracker.return_value
        tracker.getJobIdsForTag.return_value = [0]
        tracker.getJobInfo.return_value.get.return_value.stageIds.return_value = [0]
        tracker.getStageInfo.return_value.get.return_value = stage
        stage.currentAttemptId.return_value = 0
        store = context.sc.return_value.statusStore.return_value
        store.executorList.return_value = seq([SimpleNamespace(id=lambda: "7")])
        store.taskList.return_value = seq(self.tasks)
        return context

    def getLocalProperty(self, key: str) -> str | None:
        return self.properties.get(key)

    def setLocalProperty(self, key: str, value: str | None) -> None:
        self.properties[key] = value

    def addJobTag(self, tag: str) -> None:
        self.tags.append(tag)
        self.ended.clear()

    def cancelJobsWithTag(self, tag: str) -> None:
        self.cancelled.append(tag)
        self.ended.set()


def seq(values: list[Any]) -> Any:
    """A Scala sequence."""
    return SimpleNamespace(size=lambda: len(values), apply=lambda index: values[index])


class FakeSpark:
    def __init__(self) -> None:
        self.sparkContext = FakeContext()


class FakeView(View):
    """Remembers what it was shown; ``on_heartbeat`` is called with every heartbeat."""

    def __init__(self) -> None:
        self.shown: list[tuple[Any, ...]] = []
        self.on_heartbeat: Callable[[], None] = lambda: None

    def attempt(self, number: int, start_step: int, workers: int | None = None) -> None:
        raise AssertionError("the one who submits says where an attempt starts")

    def progress(self, rank: int, progress: Progress) -> None:
        self.shown.append(("heartbeat", rank))
        self.on_heartbeat()

    def epoch(self, record: Mapping[str, float]) -> None:
        self.shown.append(("epoch", record))

    def log(self, rank: int, line: str, level: int) -> None:
        self.shown.append(("log", rank, line, level))


class Stage:
    """One run of the supervisor: jobs act on it as executors would."""

    def __init__(self) -> None:
        self.spark = FakeSpark()
        self.hub = Hub()
        self.view = FakeView()
        self.submitted: list[int] = []
        self.left: list[int] = []
        self.prepared: list[float] = []

    def say(self, rank: int, kind: str, *, attempt: int = 0, **body: Any) -> None:
        event = Event(
            attempt=attempt, rank=rank, received=time.monotonic(), body={"kind": kind, **body}
        )
        self.hub.events.put(event)

    def say_task(self, rank: int, number: int, *, attempt: int = 0) -> None:
        """The first word of a worker in Spark's task of this number."""
        task = {"stage_id": 0, "partition": rank, "attempt_id": number}
        self.say(rank, "task", attempt=attempt, task=task)

    def fail(self, failure: Mapping[str, Any], *, attempt: int = 0) -> None:
        self.say(failure["rank"], "error", attempt=attempt, failure=failure)

    def until_cancelled(self) -> JobResults:
        assert self.spark.sparkContext.ended.wait(10), "nobody cancelled the job"
        raise PySparkException("job cancelled")

    def run(
        self,
        *jobs: Job | BaseException,
        world_size: int = 2,
        max_restarts: int = 0,
        heartbeat_timeout: float = 5.0,
        start_timeout: float = 5.0,
        queue_timeout: float = 10.0,
        is_watched: bool = True,
        heal: Callable[[Attempt], None] | None = None,
        starts: Sequence[int] = (),
        sizes: Sequence[int] = (),
        resize: Callable[[Attempt], str | None] | None = None,
        needs_all: bool = True,
    ) -> GangResult:
        def submit(attempt: Attempt) -> Job:
            attempt.world_size = sizes[attempt.number] if sizes else world_size
            self.submitted.append(attempt.number)
            self.left.append(attempt.restarts_left)
            attempt.start = starts[attempt.number] if starts else 0
            job = jobs[attempt.number]
            self.prepared.append(time.monotonic())
            if isinstance(job, BaseException):
                raise job
            return job

        spark: Any = self.spark
        self.hub = Hub()
        link: Any = SimpleNamespace(hub=self.hub, channel="there" if is_watched else None)
        cluster = ClusterInfo(master="local", num_executors=1, cores_per_executor=2)
        run = Launch(
            spark=spark,
            run_id="r",
            slots=Slots(num_workers=world_size, threads=1, cluster=cluster),
            link=link,
            settings=Settings(
                heartbeat_timeout_seconds=heartbeat_timeout,
                start_timeout_seconds=start_timeout,
                queue_timeout_seconds=queue_timeout,
            ),
            view=self.view,
            max_restarts=max_restarts,
        )
        decisions = [] if resize is None else [lambda _: None, resize, lambda _: None]
        self.changes = [Decides(decide) for decide in decisions]
        return supervise(run, submit, heal=heal, changes=self.changes, needs_all=needs_all)


class Decides:
    """What a function says; counts the attempts that it has seen end."""

    def __init__(self, decide: Callable[[Attempt], str | None]) -> None:
        self.decide, self.num_ended = decide, 0

    def __call__(self, attempt: Attempt) -> str | None:
        return self.decide(attempt)

    def end(self) -> None:
        self.num_ended += 1


def failure(rank: int, kind: str, type_name: str = "X", message: str = "m") -> dict[str, Any]:
    return {
        "rank": rank, "kind": kind, "type": type_name, "message": message,
        "traceback": f"Traceback of {type_name}",
    }  # fmt: skip


def result(*ranks: int) -> JobResults:
    return [(rank, "result", b"{}") for rank in ranks]


def error_rows(*failures: Mapping[str, Any]) -> JobResults:
    return [(f["rank"], "error", json.dumps(f).encode()) for f in failures]


USER_0 = failure(0, "user", "KeyError", "'zero'")
USER_1 = failure(1, "user", "ValueError", "one")
PEER_0 = failure(0, "gang", "CommunicationError", "connection closed")
PEER_1 = failure(1, "gang", "CommunicationError", "connection closed")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(module, "_LISTEN_SECONDS", 0.1)
    return Stage()


@pytest.fixture(autouse=True)
def no_thread_left() -> Any:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("sparkdl-r-")] == []


def test_each_attempt_shuts_out_the_one_before(stage: Stage) -> None:
    seen: list[tuple[int, str]] = []

    def job() -> JobResults:
        stage.hub.set(f"{stage.hub.access.attempt}/key", b"")
        seen.append((stage.hub.access.attempt, stage.hub.access.secret))
        return error_rows(PEER_0, PEER_1) if len(seen) == 1 else result(0, 1)

    stage.run(job, job, max_restarts=1)
    assert [attempt for attempt, _ in seen] == [0, 1]
    assert len({secret for _, secret in seen}) == 2
    assert stage.hub.get("0/key") is None and stage.hub.get("1/key") == b""


def test_a_gang_that_starts_again_with_more_workers_has_not_failed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_RESIZE_SECONDS", 0.1)
    seen: list[tuple[float, Attempt]] = []

    def job() -> JobResults:
        for rank, step in ((0, 5), (0, 6), (1, 9), (0, 8), (1, 7)):
            stage.say(rank, "heartbeat", epoch=1, step=step, loss=0.5, rows=9)
        stage.say(0, "checkpoint", step=6)
        return stage.until_cancelled()

    def grow(attempt: Attempt) -> str | None:
        seen.append((time.monotonic(), attempt))
        return "there are slots" if len(seen) == 3 else None

    caplog.set_level("INFO", "sparkdl")
    found = stage.run(
        job, lambda: result(0, 1, 2), sizes=(2, 3), starts=(5, 6), max_restarts=0, resize=grow
    )
    assert found == GangResult(rows=result(0, 1, 2), restarts=0, sizes=[(5, 2), (6, 3)])
    assert "there are slots" in caplog.text
    assert [change.num_ended for change in stage.changes] == [2, 2, 2]
    assert stage.left == [0, 0]  # it cost no restart
    (first, attempt), (second, _), (third, _) = seen[:3]
    assert second - first > 0.1 and third - second > 0.1
    assert attempt.first_step and attempt.steps and attempt.saved
    assert (attempt.first_step[0], attempt.steps[0], attempt.saved[0]) == (6, 8, 6)
    assert stage.prepared[0] < attempt.submitted < attempt.first_step[1] < attempt.saved[1]


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_gang_that_is_ended_before_it_begins_is_not_counted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    monkeypatch.setattr(module, "_RESIZE_SECONDS", 0.0)

    def job() -> JobResults:
        stage.say(0, "heartbeat", epoch=1, step=6 if has_begun else 5, loss=0.5, rows=9)
        return stage.until_cancelled()

    def shrink(attempt: Attempt) -> str | None:
        return "one of two has come" if attempt.last_event else None

    found = stage.run(job, lambda: result(0), sizes=(2, 1), starts=(5, 5), resize=shrink)
    sizes = [(5, 2), (5, 1)] if has_begun else [(5, 1)]
    assert found == GangResult(rows=result(0), restarts=0, sizes=sizes)


def test_a_gang_that_ends_while_it_is_ended_has_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RESIZE_SECONDS", 0.0)

    def job() -> JobResults:
        assert stage.spark.sparkContext.ended.wait(10)
        return result(0, 1)

    assert stage.run(job, resize=lambda _: "there are slots").rows == result(0, 1)


def test_the_speed_of_a_rank_is_that_of_its_own_work(stage: Stage) -> None:
    seen: list[Attempt] = []

    def job() -> JobResults:
        spent = {"data": 2.0, "compute": 8.0, "communication": 90.0}
        stage.say(1, "hardware", hardware={"host": "far"})
        stage.say(0, "hardware", hardware={"host": "near", "gpu": "H100"})  # see Attempt.speeds
        stage.say(0, "held", shards=[[1], [0, 2]])
        stage.say(0, "missing", shards=[2])
        stage.say(0, "missing", shards=[0, 2])
        stage.say(1, "heartbeat", epoch=1, step=7, rows=500, seconds=spent)
        stage.say(0, "heartbeat", epoch=1, step=7, rows=5, seconds={"compute": 0.1})
        return result(0, 1)

    def heal(attempt: Attempt) -> None:
        seen.append(attempt)

    stage.run(lambda: (job(), error_rows(PEER_0, PEER_1))[1], job, max_restarts=1, heal=heal)
    assert seen[0].speeds == {1: 50.0}
    assert (seen[0].hosts, seen[0].held) == ({1: "far"}, [[1], [0, 2]])
    assert seen[0].missing == {0, 2}


def test_what_is_lost_while_a_gang_is_resized_is_a_loss(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RESIZE_SECONDS", 0.1)

    def fails() -> JobResults:
        time.sleep(0.3)
        stage.fail(USER_1)
        return stage.until_cancelled()

    with pytest.raises(WorkerError, match="one"):
        stage.run(
            fails, max_restarts=0, resize=lambda attempt: "more" if attempt.failures else None
        )


def test_a_good_run(stage: Stage) -> None:
    def job() -> JobResults:
        for rank in (0, 1):
            stage.say(rank, "heartbeat")
            stage.say(rank, "log", lines=[[20, f"line of {rank}"]])
            stage.say(rank, "epoch", record={"epoch": 1})
            stage.say(rank, "done")
        return result(0, 1)

    found = stage.run(job)
    assert found == GangResult(rows=result(0, 1), restarts=0, sizes=[(0, 2)])
    assert stage.spark.sparkContext.tags == ["sparkdl-r-0"]
    assert stage.spark.sparkContext.cancelled == []
    assert stage.view.shown == [
        ("heartbeat", 0),
        ("log", 0, "line of 0", 20),
        ("epoch", {"epoch": 1}),  # of rank 0 only
        ("heartbeat", 1),
        ("log", 1, "line of 1", 20),
    ]


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([USER_0], 0),
        ([USER_1, USER_0], 1),
        ([PEER_0, USER_1], 1),
        ([USER_0, PEER_1], 0),
        ([USER_1, failure(0, "sparkdl", "ClusterError")], 1),
    ],
)
@pytest.mark.parametrize("way", ["events", "rows"])
def test_the_first_error_of_the_user_ends_the_run(
    stage: Stage, failures: Sequence[Mapping[str, Any]], rank: int, way: str
) -> None:
    def job() -> JobResults:
        if way == "events":
            for one in failures:
                stage.fail(one)
        return error_rows(*failures)

    with pytest.raises(WorkerError) as caught:
        stage.run(job, max_restarts=3)
    assert caught.value.rank == rank
    expected = USER_0 if rank == 0 else USER_1
    assert caught.value.error_type == expected["type"]
    assert caught.value.worker_traceback == expected["traceback"]
    assert stage.submitted == [0]


def test_arrival_counts_not_the_order_of_the_rows(stage: Stage) -> None:
    def job() -> JobResults:
        stage.fail(USER_1)
        return error_rows(USER_0, USER_1)

    with pytest.raises(WorkerError, match="ValueError on rank 1: one"):
        stage.run(job)


def test_peers_that_compute_on_are_cancelled(stage: Stage) -> None:
    def job() -> JobResults:
        stage.fail(USER_1)
        return stage.until_cancelled()

    began = time.monotonic()
    with pytest.raises(WorkerError, match="ValueError on rank 1: one"):
        stage.run(job, max_restarts=3)
    assert time.monotonic() - began < 3
    assert set(stage.spark.sparkContext.cancelled) == {"sparkdl-r-0"}
    assert stage.submitted == [0]


def test_the_cause_may_arrive_after_its_consequence(stage: Stage) -> None:
    def job() -> JobResults:
        stage.fail(PEER_0)
        time.sleep(0.15)
        stage.fail(USER_1)
        return stage.until_cancelled()

    with pytest.raises(WorkerError, match="ValueError on rank 1: one"):
        stage.run(job)


ALONE_0 = failure(0, "gang", "CollectiveError", "Connection closed by peer")


@pytest.mark.parametrize("way", ["events", "rows"])
def test_a_rank_that_waits_for_one_that_has_ended_is_a_mistake(stage: Stage, way: str) -> None:
    def job() -> JobResults:
        if way == "rows":
            return error_rows(ALONE_0)
        stage.say(1, "done")
        stage.fail(ALONE_0)
        return stage.until_cancelled()

    with pytest.raises(WorkerError, match="rank 1 had come to its end") as caught:
        stage.run(job, max_restarts=3)
    assert caught.value.worker_traceback == ALONE_0["traceback"]
    assert stage.submitted == [0]


@pytest.mark.parametrize("others", [[], [failure(1, "gang", "ShardLost", "gone")]])
def test_a_rank_that_waits_for_one_that_was_lost_starts_again(
    stage: Stage, others: list[Mapping[str, Any]]
) -> None:
    def job() -> JobResults:
        stage.say(2, "done")
        for one in (ALONE_0, *others):
            stage.fail(one)
        return stage.until_cancelled()

    found = stage.run(job, lambda: result(0, 1, 2), world_size=3, max_restarts=1)
    assert found.restarts == 1


def test_a_broken_gang_starts_again(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    found = stage.run(
        lambda: error_rows(PEER_0, PEER_1), lambda: result(0, 1), max_restarts=2
    )  # fmt: skip
    assert found.restarts == 1
    assert stage.submitted == [0, 1]
    assert stage.spark.sparkContext.tags == ["sparkdl-r-0", "sparkdl-r-1"]
    assert "rank 0 failed with CommunicationError: connection closed; restart 1 of 2" in caplog.text


def test_the_reason_is_the_cause_not_what_its_peers_report(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    gone = failure(1, "gang", "ShardLost", "no file")
    stage.run(lambda: error_rows(PEER_0, gone), lambda: result(0, 1), max_restarts=1)
    assert "rank 1 failed with ShardLost: no file; restart 1 of 1" in caplog.text


def test_what_broke_a_gang_is_mended_before_it_starts_again(stage: Stage) -> None:
    healed: list[tuple[int, bool]] = []

    def heal(failed: Attempt) -> None:
        healed.append((failed.number, failed.has_reported(ShardLost)))

    stage.run(
        lambda: error_rows(PEER_0, failure(1, "gang", "ShardLost")),
        lost,
        lambda: result(0, 1),
        max_restarts=2,
        heal=heal,
    )
    assert healed == [(0, True), (1, False)]


def test_a_job_cancelled_by_hand_is_not_started_again(stage: Stage) -> None:
    def job() -> JobResults:
        raise PySparkException("cancelled", errorClass="SPARK_JOB_CANCELLED")

    with pytest.raises(TrainingFailed, match="the Spark job was cancelled"):
        stage.run(job, max_restarts=3)
    assert stage.submitted == [0]


def lost() -> JobResults:
    raise PySparkException("ExecutorLostFailure\n  at org.apache...")


def test_a_lost_worker_outweighs_what_its_peers_report(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def job() -> JobResults:
        stage.fail(USER_0)
        return lost()

    found = stage.run(job, lambda: result(0, 1), max_restarts=1)
    assert found.restarts == 1
    assert "a worker or executor was lost (ExecutorLostFailure" in caplog.text


CRASH = "Python worker exited unexpectedly (crashed)"
ABORTED = 'Fatal Python error: Aborted\n\nThread 1:\n  File "/x/distributed_c10d.py" in all_reduce'


def test_sizes_that_differ_between_ranks_are_a_mistake_of_the_users(stage: Stage) -> None:
    """Gloo aborts the rank that gets too much, and the others see its end."""

    def job() -> JobResults:
        stage.fail(PEER_0)
        stage.say(1, "crash", text=ABORTED)
        raise PySparkException(CRASH)

    with pytest.raises(WorkerError, match=r"Aborted on rank 1: gloo .* of different si") as caught:
        stage.run(job, max_restarts=3)
    assert "in all_reduce" in caught.value.worker_traceback
    assert stage.submitted == [0]


def test_another_crash_is_told_and_may_be_healed(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def job() -> JobResults:
        stage.say(0, "crash", text="")  # Spark has ended this one
        later = threading.Timer(0.1, lambda: stage.say(1, "crash", text=f"{SEGFAULT}\nThread 1:"))
        later.start()  # it comes after Spark's own word
        raise PySparkException(CRASH)

    SEGFAULT = "Fatal Python error: Segmentation fault"
    assert stage.run(job, lambda: result(0, 1), max_restarts=1).restarts == 1
    assert f"rank 1 has crashed: {SEGFAULT}" in caplog.text


def test_a_worker_that_ends_without_a_word_is_told_by_its_rank(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """It was a sentence of 470 characters."""
    caplog.set_level("INFO", logger=module.logger.name)
    words = (
        "Job aborted due to stage failure: Could not recover from a failed barrier ResultStage.\n"
        f"org.apache.spark.SparkException: {CRASH}. Consider setting 'spark.python.x' to 'true'."
    )

    def job() -> JobResults:
        stage.say(1, "crash", text="")
        stage.say(0, "crash", text="")  # Spark has ended this one
        raise PySparkException(words)

    assert stage.run(job, lambda: result(0, 1), max_restarts=1).restarts == 1
    warning, details = caplog.records
    told = "rank 1 was lost: its process has ended without a word; restart 1 of 1"
    assert (warning.levelname, warning.getMessage()) == ("WARNING", told)
    assert details.levelname == "INFO"
    assert "Consider setting" in details.getMessage()
    with pytest.raises(TrainingFailed, match=r"last: rank 1 was lost: .* lower batchSize"):
        stage.run(job)


def test_restarts_are_counted_and_end(stage: Stage) -> None:
    with pytest.raises(TrainingFailed) as caught:
        stage.run(lost, lambda: error_rows(PEER_1), lost, max_restarts=2)
    assert stage.submitted == [0, 1, 2]
    told = str(caught.value)
    assert told.startswith("training failed 3 times without progress (maxRestarts=2); last: a wo")
    assert "lower batchSize, raise gradientAccumulationSteps" in told


def test_progress_refills_the_restarts(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A lost node a day must not end a run of weeks."""
    jobs = [lost] * 6 + [lambda: result(0, 1)]
    found = stage.run(*jobs, max_restarts=2, starts=[0, 0, 5, 5, 10, 10, 15])
    assert found.restarts == 6
    assert stage.left == [2, 1, 0, 1, 0, 1, 0]
    assert "restart 1 of 2" in caplog.text
    assert "restart 3" not in caplog.text


def test_an_older_checkpoint_is_no_progress(stage: Stage) -> None:
    with pytest.raises(TrainingFailed, match="failed 3 times without progress"):
        stage.run(lost, lost, lost, max_restarts=2, starts=[10, 5, 10])
    assert stage.submitted == [0, 1, 2]


def test_no_restart_at_all(stage: Stage) -> None:
    with pytest.raises(
        TrainingFailed, match=r"training failed once \(maxRestarts=0\); last: rank"
    ) as caught:
        stage.run(lambda: error_rows(PEER_1))
    assert "memoryOverhead" not in str(caught.value)  # no worker was lost


def test_a_failure_while_preparing_counts_too(stage: Stage) -> None:
    found = stage.run(
        PySparkException("executor lost"), lambda: result(0, 1), max_restarts=1,
        resize=lambda _: None,
    )  # fmt: skip
    assert (found.restarts, stage.submitted) == (1, [0, 1])
    assert [change.num_ended for change in stage.changes] == [2, 2, 2]
    with pytest.raises(TrainingFailed, match="2 times"):
        stage.run(PySparkException("a"), PySparkException("b"), max_restarts=1)


@pytest.mark.parametrize("error", [DataError("changed"), ClusterError("slots"), OSError("x")])
def test_what_starting_again_cannot_heal_while_preparing(stage: Stage, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        stage.run(error, max_restarts=3)
    assert caught.value is error
    assert stage.submitted == [0]


def test_a_mistake_of_ours_in_the_job_is_not_taken_for_a_lost_worker(stage: Stage) -> None:
    def job() -> JobResults:
        raise TypeError("cannot pickle")

    with pytest.raises(TypeError, match="cannot pickle"):
        stage.run(job, max_restarts=3)
    assert stage.submitted == [0]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (PythonException, DataError),
        (ArithmeticException, DataError),
        (PySparkPicklingError, PySparkPicklingError),
    ],
)
def test_an_error_of_spark_that_would_come_again_is_raised(
    stage: Stage, kind: type[Exception], told: type[Exception]
) -> None:
    def job() -> JobResults:
        raise kind("always the same")

    with pytest.raises(told, match="always the same"):
        stage.run(job, max_restarts=3)
    assert stage.submitted == [0]


@pytest.mark.parametrize("kind", [ClusterError, ConfigError, CheckpointError])
def test_our_own_errors_come_back_as_they_are(stage: Stage, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        stage.run(
            lambda: error_rows(PEER_0, failure(1, "sparkdl", kind.__name__, "what to do")),
            max_restarts=3,
        )
    assert type(caught.value) is kind
    assert str(caught.value) == "what to do"


@pytest.mark.parametrize("name", ["OfAnotherVersion", "WorkerError", "annotations"])
def test_an_error_of_unknown_type_is_a_worker_error(stage: Stage, name: str) -> None:
    with pytest.raises(WorkerError, match=f"{name} on rank 1: m"):
        stage.run(lambda: error_rows(failure(1, "sparkdl", name)))


def beating(stage: Stage, ranks: Sequence[int], seconds: float, attempt: int = 0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not stage.spark.sparkContext.ended.is_set():
        for rank in ranks:
            stage.say(rank, "heartbeat", attempt=attempt)
        time.sleep(0.03)


def test_silence_is_a_hang(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def hangs() -> JobResults:
        stage.say(1, "heartbeat")
        beating(stage, [0], 8)
        return stage.until_cancelled()

    found = stage.run(hangs, lambda: result(0, 1), max_restarts=1, heartbeat_timeout=0.6)
    assert found.restarts == 1
    assert set(stage.spark.sparkContext.cancelled) == {"sparkdl-r-0"}
    told = (
        "rank 1 has not been heard for 0.6 s (spark.sparkdl.heartbeatTimeout), nor used the CPU or "
        "waited for it"
    )
    assert f"{told}; restart 1 of 1" in caplog.text


def test_a_rank_that_spark_runs_may_not_be_silent(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """In rounds too."""
    context = stage.spark.sparkContext
    context.task(3, partition=0)
    context.task(4, partition=1)

    def hangs() -> JobResults:
        stage.say_task(1, 4)
        beating(stage, [0], 8)
        return stage.until_cancelled()

    began = time.monotonic()
    found = stage.run(
        hangs, lambda: result(0, 1), max_restarts=1, heartbeat_timeout=0.6, needs_all=False
    )
    assert found.restarts == 1 and time.monotonic() - began < 3
    assert "rank 1 has not been heard for 0.6 s" in caplog.text


def test_a_rank_whose_task_is_lost_is_waited_for_in_rounds(stage: Stage) -> None:
    """Until Spark has slots for it, and then until its new process has spoken."""
    context = stage.spark.sparkContext
    context.task(3, partition=0)
    context.task(4, partition=1, status="FAILED")

    def job() -> JobResults:
        stage.say_task(0, 3)
        stage.say_task(1, 4)
        beating(stage, [0], 0.6)
        context.task(5, partition=1)
        beating(stage, [0], 0.6)
        stage.say_task(1, 5)
        beating(stage, [0, 1], 0.2)
        return result(0, 1)

    assert stage.run(job, heartbeat_timeout=0.3, needs_all=False).restarts == 0


def test_lost_tasks_are_not_waited_for_without_end(stage: Stage) -> None:
    context = stage.spark.sparkContext
    context.task(3, partition=0, status="KILLED")

    def job() -> JobResults:
        stage.say_task(0, 3)
        return stage.until_cancelled()

    with pytest.raises(ClusterError, match=r"no worker started within 0.9 s.*queueTimeout"):
        stage.run(job, heartbeat_timeout=0.3, queue_timeout=0.9, needs_all=False, max_restarts=3)
    assert stage.submitted == [0]


def test_a_new_worker_that_says_nothing_is_started_again(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    context = stage.spark.sparkContext
    context.task(4, partition=1, status="FAILED")
    context.task(5, partition=1, age=60)

    def job() -> JobResults:
        stage.say_task(1, 4)
        beating(stage, [0], 8)
        return stage.until_cancelled()

    times: Any = {"heartbeat_timeout": 0.3, "start_timeout": 50.0}
    assert stage.run(job, lambda: result(0, 1), max_restarts=1, needs_all=False, **times).restarts
    assert "rank 1 was lost, and its new worker did not start within 50 s" in caplog.text


def test_a_gang_does_not_wait_for_a_lost_rank(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.spark.sparkContext.task(4, partition=1, status="FAILED")

    def job() -> JobResults:
        stage.say_task(1, 4)
        beating(stage, [0], 8)
        return stage.until_cancelled()

    found = stage.run(job, lambda: result(0, 1), max_restarts=1, heartbeat_timeout=0.3)
    assert found.restarts == 1
    assert "rank 1 failed with WorkerLost: its worker or executor was lost" in caplog.text


def test_a_rank_whose_last_report_was_lost_is_not_silent(stage: Stage) -> None:
    stage.spark.sparkContext.task(4, partition=1, status="SUCCESS")

    def job() -> JobResults:
        stage.say_task(1, 4)
        beating(stage, [0], 1)
        return result(0, 1)

    assert stage.run(job, heartbeat_timeout=0.3).restarts == 0


def test_a_rank_that_spark_runs_again_may_not_be_silent_though_it_was_done(stage: Stage) -> None:
    """An executor that is lost takes with it what Spark keeps of its tasks."""
    stage.spark.sparkContext.task(5, partition=1)

    def job() -> JobResults:
        stage.say_task(1, 4)
        stage.say(1, "done")
        stage.say_task(1, 5)
        beating(stage, [0], 8)
        return stage.until_cancelled()

    times: Any = {"max_restarts": 1, "heartbeat_timeout": 0.3}
    assert stage.run(job, lambda: result(0, 1), needs_all=False, **times).restarts == 1


def test_a_watcher_may_speak_for_a_rank(stage: Stage) -> None:
    def job() -> JobResults:
        stage.say(1, "heartbeat")
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            stage.say(0, "heartbeat")
            stage.say(1, "alive")
            time.sleep(0.03)
        return result(0, 1)

    assert stage.run(job, heartbeat_timeout=0.6).restarts == 0


def test_a_rank_that_has_finished_may_be_silent(stage: Stage) -> None:
    def job() -> JobResults:
        stage.say(1, "heartbeat")
        stage.say(1, "done")
        beating(stage, [0], 1.5)
        return result(0, 1)

    assert stage.run(job, heartbeat_timeout=0.6).restarts == 0


def test_without_a_channel_silence_means_nothing(stage: Stage) -> None:
    def job() -> JobResults:
        time.sleep(0.6)
        return result(0, 1)

    found = stage.run(job, heartbeat_timeout=0.2, start_timeout=0.2, is_watched=False)
    assert found.restarts == 0


def test_without_a_channel_spark_says_whether_the_gang_has_begun(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background_job, "_ASK_SECONDS", 0.1)
    with pytest.raises(ClusterError, match=r"no worker started within 0.2 s.*queueTimeout"):
        stage.run(stage.until_cancelled, queue_timeout=0.2, is_watched=False)

    def part() -> JobResults:
        stage.spark.sparkContext.num_running = 1
        return stage.until_cancelled()

    def whole() -> JobResults:
        stage.spark.sparkContext.num_running = 2
        time.sleep(1.7)
        return result(0, 1)

    # A busy machine may need half a second until the job's thread runs.
    times: Any = {"start_timeout": 0.3, "queue_timeout": 1.5}
    assert stage.run(part, whole, max_restarts=1, is_watched=False, **times).restarts == 1
    assert "1 of 2 workers did not start within 0.3 s since Spark runs their tasks" in caplog.text


def test_a_pause_of_the_driver_is_no_hang(stage: Stage) -> None:
    paused = []

    def pause() -> None:
        if not paused:
            paused.append(1)
            time.sleep(1.2)

    def job() -> JobResults:
        for rank in (0, 1):
            stage.say(rank, "heartbeat")
        while not paused:
            time.sleep(0.01)
        time.sleep(1.4)
        return result(0, 1)

    stage.view.on_heartbeat = pause
    assert stage.run(job, heartbeat_timeout=0.8).restarts == 0


def test_short_pauses_of_a_driver_that_gets_no_cpu_are_no_hang(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.2)
    stage.view.on_heartbeat = lambda: time.sleep(0.3)

    def job() -> JobResults:
        stage.say(1, "heartbeat")
        for _ in range(5):
            stage.say(0, "heartbeat")
            time.sleep(0.3)
        return result(0, 1)

    assert stage.run(job, heartbeat_timeout=0.8).restarts == 0


def test_slots_that_never_come(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background_job, "_SAY_SECONDS", 0.1)
    with pytest.raises(ClusterError, match=r"no worker started within 0.4 s.*queueTimeout"):
        stage.run(stage.until_cancelled, start_timeout=0.1, queue_timeout=0.4, max_restarts=3)
    assert set(stage.spark.sparkContext.cancelled) == {"sparkdl-r-0"}
    assert "no worker has started yet: other jobs hold the slots" in caplog.text
    assert "restarts left" not in caplog.text  # nothing was lost


def test_workers_that_say_nothing_from_the_first_are_started_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were stopped before they could say anything; it has held the fit for queueTimeout."""
    monkeypatch.setattr(background_job, "_ASK_SECONDS", 0.1)
    context = stage.spark.sparkContext

    def job() -> JobResults:
        context.num_running = 2
        return stage.until_cancelled()

    def again() -> JobResults:
        context.num_running = 0  # now other jobs hold the slots
        time.sleep(0.7)
        return result(0, 1)

    assert stage.run(job, again, start_timeout=0.3, max_restarts=1).restarts == 1
    assert (
        "rank 0 failed with Missing: 2 of 2 workers did not start within 0.3 s since Spark runs "
        "their tasks (spark.sparkdl.startTimeout); restart 1 of 1"
    ) in caplog.text


def test_part_of_a_gang_is_started_again(stage: Stage) -> None:
    def job() -> JobResults:
        beating(stage, [0], 20)
        return stage.until_cancelled()

    found = stage.run(job, lambda: result(0, 1), start_timeout=0.3, max_restarts=1)
    assert found.restarts == 1
    assert set(stage.spark.sparkContext.cancelled) == {"sparkdl-r-0"}


def test_a_gang_that_grows_has_not_failed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the workers that are ended say of each other."""
    monkeypatch.setattr(module, "_RESIZE_SECONDS", 0.0)

    def job() -> JobResults:
        stage.say(0, "heartbeat")
        stage.say(0, "checkpoint", step=3)
        try:
            return stage.until_cancelled()
        finally:
            stage.fail(PEER_0)

    def resize(attempt: Attempt) -> str | None:
        return None if attempt.saved is None else f"after {attempt.saved[0]}"

    found = stage.run(job, lambda: result(0, 1), resize=resize, max_restarts=0)
    assert found.rows == result(0, 1) and found.sizes == [(0, 2), (0, 2)]
    assert stage.submitted == [0, 1]
    assert stage.left == [0, 0]


def test_late_news_of_an_earlier_attempt_is_ignored(stage: Stage) -> None:
    def again() -> JobResults:
        stage.fail(USER_0, attempt=0)
        stage.say(0, "log", lines=[[20, "late"]], attempt=0)
        stage.say(0, "log", lines=[[20, "news"]], attempt=1)
        time.sleep(0.3)
        return result(0, 1)

    assert stage.run(lost, again, max_restarts=1).restarts == 1
    assert stage.view.shown == [("log", 0, "news", 20)]


def test_interrupting_cancels_the_job(stage: Stage) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def job() -> JobResults:
        stage.say(0, "heartbeat")
        return stage.until_cancelled()

    stage.view.on_heartbeat = interrupt
    with pytest.raises(KeyboardInterrupt):
        stage.run(job, max_restarts=3)
    assert set(stage.spark.sparkContext.cancelled) == {"sparkdl-r-0"}
    assert stage.submitted == [0]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without the garbage collector: what a signal raises in a weak reference's callback is lost.

    A fit's signal comes again.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_signal_while_nothing_is_heard_cancels_the_job(stage: Stage) -> None:
    """Up to Python 3.12 `Thread.join`, when it is interrupted, takes the thread for ended."""
    main = threading.main_thread().ident or 0

    def job() -> JobResults:
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
        return stage.until_cancelled()

    with pytest.raises(KeyboardInterrupt):
        stage.run(job)
    assert set(stage.spark.sparkContext.cancelled) == {"sparkdl-r-0"}


@pytest.mark.usefixtures("uncollected")
def test_a_job_that_spark_did_not_know_yet_is_cancelled_as_well(stage: Stage) -> None:
    """Interrupted between the start and the first heartbeat, with very many steps to go."""
    context = stage.spark.sparkContext
    asked = threading.Event()

    def job() -> JobResults:
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        assert asked.wait(10)  # only now does Spark learn of the job
        context.ended.clear()
        return stage.until_cancelled()

    main = threading.main_thread().ident or 0
    cancel = context.cancelJobsWithTag

    def cancelled(tag: str) -> None:
        cancel(tag)
        asked.set()

    context.cancelJobsWithTag = cancelled  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stage.run(job)
    assert time.monotonic() - began < 5
    assert len(context.cancelled) > 1


@pytest.mark.usefixtures("uncollected")
def test_a_job_that_was_cancelled_before_it_began_never_begins(stage: Stage) -> None:
    context, main = stage.spark.sparkContext, threading.main_thread().ident or 0
    tag = context.addJobTag

    def slowly(name: str) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.3)
        tag(name)

    def job() -> JobResults:
        raise AssertionError("it must not begin")

    context.addJobTag = slowly  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stage.run(job)


def test_events_that_come_meanwhile_wait_for_their_turn(stage: Stage) -> None:
    """Else whoever is told of them slowly would keep the supervisor from looking after the gang."""

    def again() -> None:
        stage.say(0, "heartbeat")

    stage.view.on_heartbeat = again  # there is always one more
    began = time.monotonic()
    with pytest.raises(WorkerError):
        stage.run(lambda: [again(), stage.fail(USER_0), stage.until_cancelled()][2])
    assert time.monotonic() - began < 5


def test_a_view_that_fails_does_not_leave_the_job_running(stage: Stage) -> None:
    def fail() -> None:
        raise BrokenPipeError

    def job() -> JobResults:
        stage.say(0, "heartbeat")
        return stage.until_cancelled()

    stage.view.on_heartbeat = fail
    with pytest.raises(BrokenPipeError):
        stage.run(job)
    assert set(stage.spark.sparkContext.cancelled) == {"sparkdl-r-0"}


def test_workers_whose_work_nobody_wants_end_by_themselves(stage: Stage) -> None:
    """As when a search prunes a trial: their processes, which have imported torch, stay."""

    def prune() -> None:
        if len(stage.view.shown) == 2:
            raise StopIteration

    def job() -> JobResults:
        for rank in (0, 1):
            stage.say(rank, "heartbeat")
        deadline = time.monotonic() + 20
        while not stage.hub.is_over and time.monotonic() < deadline:
            time.sleep(0.01)
        return error_rows(PEER_0, PEER_1)

    stage.view.on_heartbeat = prune
    with pytest.raises(StopIteration):
        stage.run(job)
    assert stage.hub.is_over
    assert stage.spark.sparkContext.cancelled == []


def test_a_session_that_has_ended_is_no_lost_worker(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = MagicMock()
    ended.sc.return_value.isStopped.return_value = True

    def job() -> JobResults:
        monkeypatch.setattr(FakeContext, "_jsc", ended)
        raise PySparkException("Job 3 cancelled because SparkContext was shut down")

    with pytest.raises(ClusterError, match=r"the Spark session .*has ended") as caught:
        stage.run(job, max_restarts=3)
    assert stage.submitted == [0]
    assert isinstance(caught.value.__cause__, PySparkException)


class Spooling:
    """A job that fails as it is told to."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.prepared = 0

    def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "spooled"

    def prepare(self, restarts_left: int) -> None:
        self.prepared += 1

    def run(self, max_restarts: int) -> str:
        return persistently(self, max_restarts=max_restarts, prepare=self.prepare)


def test_spooling_is_tried_again_after_a_loss() -> None:
    spooling = Spooling(PySparkException("lost"), PySparkException("lost"))
    assert spooling.run(2) == "spooled"
    assert spooling.prepared == 2


def test_spooling_gives_up() -> None:
    with pytest.raises(TrainingFailed, match=r"spooling failed 2 times .* \(maxRestarts=1\); last"):
        Spooling(PySparkException("a"), PySparkException("b")).run(1)


@pytest.mark.parametrize(
    "error",
    [DataError("null"), PythonException("UDF"), ArithmeticException("1/0"), OSError("x")],
)
def test_spooling_is_not_tried_again_in_vain(error: Exception) -> None:
    spooling = Spooling(error)
    with pytest.raises((DataError, OSError)) as caught:
        spooling.run(3)
    assert error in (caught.value, caught.value.__cause__)
    assert spooling.prepared == 0


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_gang_under_dynamic_allocation_knows_how_many_it_waits_for(dynamic: bool) -> None:
    cluster = ClusterInfo(
        master="spark://h:7077", num_executors=1, cores_per_executor=2, dynamic_allocation=dynamic
    )
    link: Any = SimpleNamespace(
        hub=Hub(), channel="there", url=None, relays=(), address=lambda: ("host", 1)
    )
    anything: Any = None
    run = Launch(
        spark=anything, run_id="r", slots=Slots(num_workers=3, threads=1, cluster=cluster),
        link=link, settings=Settings(), view=anything, max_restarts=0,
    )  # fmt: skip
    order = run.gang_order(
        GangOrder, attempt=0, run_key="k", device="cpu", payload=b"", resume_path=None
    )
    job: Any = run.gang_job(anything, anything, order, num_workers=2)
    assert job.args[1].num_tasks == (2 if dynamic else None)
    link.channel = None
    refused = pytest.raises(ClusterError, match="through the driver's channel")
    with refused if dynamic else contextlib.nullcontext():
        run.gang_job(anything, anything, order, num_workers=2)

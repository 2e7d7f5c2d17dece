"""A Spark job in a thread of its own, so that its caller can look after it, and need not wait."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pyspark.sql import SparkSession

from sparkdl.comm.worker_environment import SparkTask
from sparkdl.errors import ClusterError
from sparkdl.runtime.activity import STOPPING, doing
from sparkdl.spark.session import compat
from sparkdl.spark.session.failures import raise_unless_loss
from sparkdl.spark.session.interrupts import is_hurried, raise_if_asked

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_SECONDS = 0.05
_ASK_SECONDS = 1.0
"""Seconds between two questions to Spark about the tasks of a job."""
_SAY_SECONDS = 60.0
"""Seconds between two messages about a wait for slots."""
_MOST_TASKS = 1000
"""Largest number of a stage's tasks that are looked at to find the hosts of those that run."""
_ALL_TASKS = 2**31 - 1
_NEWEST_TASKS = 16
"""Number of a stage's tasks that are looked at to find the one that was launched last."""
_BEGINS_SECONDS = 1.0
"""Age at which a task has its Python worker. Where a younger one is interrupted while it waits for
a new process, Spark 4.3 takes the daemon for lost, and ends all Python workers of that executor,
those of other jobs as well."""

_run_name: ContextVar[str] = ContextVar("run_name", default="")
"""The user's name for the run of this thread."""


@contextlib.contextmanager
def jobs_named_after(run_name: str | None) -> Iterator[None]:
    """The jobs that this thread makes in the block are named after a run of the user's, too."""
    token = _run_name.set(run_name or "")
    try:
        yield
    finally:
        _run_name.reset(token)


class BackgroundJob(Generic[T]):
    """Submits Spark jobs and gives a value, in a thread of its own."""

    def __init__(
        self,
        spark: SparkSession,
        work: Callable[[], T],
        *,
        tag: str,
        name: str,
        cleans_up: bool = False,
    ) -> None:
        """Prepare it; `begin` starts it.

        No other job has the ``tag``, by which it can be cancelled. ``cleans_up``: the jobs do not
        belong to the job group of the thread that begins them, which may just have been cancelled.
        """
        self.is_over = threading.Event()
        """Set when the work has ended. To be waited for in place of its thread: up to Python 3.12 a
        ``Thread.join`` that Ctrl-C interrupts takes the thread for ended (bpo-45274)."""
        self.values: list[T] = []
        """Values that the work gave, when it has ended well."""
        self.error: Exception | None = None
        """The error that the work raised."""
        self.is_cancelled = False
        """True if we ended it, so that Spark's error says nothing new; work that has not begun by
        then never does."""
        self.is_started = False
        """True once `begin` was called."""
        self.progress = TaskProgress(spark, tag)
        """Progress of its tasks."""
        self._spark, self._work, self._tag = spark, work, tag
        self._name = f"{name} ({_run_name.get()})" if _run_name.get() else name
        self._cleans_up = cleans_up
        self._has_begun = False
        self._times_said = 0
        """Number of times that the user was told that none of its tasks has started yet."""

    def begin(self) -> None:
        """Start the thread; called in a ``try`` that ends in `end`, since users interrupt."""
        self.is_started = True
        take_properties = None if self._cleans_up else compat.thread_properties(self._spark)
        threading.Thread(
            target=self._run, args=(take_properties,), name=self._tag, daemon=True
        ).start()

    def _run(self, take_properties: Callable[[], None] | None) -> None:
        self._has_begun = True  # and then looks whether it may go on; `end` looks after that
        try:
            if take_properties is not None:
                take_properties()
            compat.tag_jobs(self._spark, self._tag)
            with compat.described(self._spark, self._name), self.progress.of_this_thread():
                if not self.is_cancelled:
                    self.values.append(self._work())
        except Exception as error:
            self.error = error
        finally:
            self.is_over.set()

    def wait(self, timeout_seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the work has ended, time is up, or ``until`` is true; True if it has ended."""
        deadline = time.monotonic() + timeout_seconds
        while not self.is_over.wait(max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))):
            raise_if_asked()
            if time.monotonic() >= deadline or until():
                return False
        return True

    def has_tasks(self) -> bool:
        """True if Spark says that tasks of it run."""
        try:
            return self.progress.tasks()[0] > 0
        except Exception as error:  # whatever py4j raises where Spark is gone
            logger.info("Spark does not say any more what runs: %s", error)
            return False

    def cancel(self) -> None:
        """Cancel its jobs without waiting, if they have been submitted; `end` sees to the rest."""
        if not self.is_over.is_set() and not self.is_cancelled:
            self.is_cancelled = True
            _begin_cancelling(self.progress, self.is_over)

    def end(self) -> None:
        """Cancel its jobs until it has ended; see `end_job`."""
        if not self.is_over.is_set():
            self.is_cancelled = True
            if self._has_begun:
                doing(STOPPING, "")  # workers that import torch take seconds to end
                end_job(self.progress, self.is_over)

    def leave(self, limit_seconds: float, given_up: Callable[[], None]) -> None:
        """Let it go on while its caller does not, but neither longer nor longer than its session.

        Before the session or the interpreter ends, it gets some seconds, and is cancelled then:
        where Spark ends below its tasks, errors of these would be the last lines of the program.

        Args:
            limit_seconds: longest time before it is cancelled.
            given_up: called if it was cancelled.
        """
        with _leaving:
            _left.append((self, given_up))
        _end_left_before_stop(self._spark)
        threading.Thread(
            target=self._end_later, args=(limit_seconds,), name="sparkdl-clean-up", daemon=True
        ).start()

    def _end_later(self, seconds: float) -> None:
        self.wait(seconds)
        with _leaving:
            given_up = [call for job, call in _left if job is self]
            _left[:] = [entry for entry in _left if entry[0] is not self]
        if given_up and not self.is_over.is_set():
            self.end()
            given_up[0]()

    def result(self) -> T:
        """Return what the work gave, when it has ended; raises what it raised."""
        if self.error is not None:
            raise self.error
        return self.values[0]

    def watched(
        self,
        timeout_seconds: float,
        *,
        queue_seconds: float = math.inf,
        once_submitted: Callable[[], None] | None = None,
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> T:
        """Run it to its end; each of its tasks takes little time once it runs.

        ``timeout_seconds`` (``spark.sparkdl.startTimeout``) is the longest time in which tasks run,
        and none ends; ``queue_seconds`` (``spark.sparkdl.queueTimeout``) the longest wait for the
        first one. ``once_submitted`` is called once Spark has the job, beside it: jobs that it
        submits come after this one. ``meanwhile`` is called often, and ends a pause by True. Raises
        ClusterError when they are over, and what the work or one of these two raised.
        """
        began = time.monotonic()
        try:
            if not self.is_started:
                self.begin()
            if once_submitted is not None:
                self.wait(queue_seconds, until=self.progress.is_submitted)
                if self.error is None:
                    once_submitted()
            while not self.wait(_ASK_SECONDS, until=meanwhile):
                silence, waited = self.progress.seconds_without(), time.monotonic() - began
                if not self.progress.num_begun:
                    self.check_queue(f"task of the job '{self._name}'", waited, queue_seconds)
                if silence > timeout_seconds:
                    where = ", ".join(self.progress.hosts()) or "an executor"
                    if not self.is_over.is_set():
                        raise ClusterError(
                            f"Python on {where} has not answered within {timeout_seconds:g} s "
                            "(spark.sparkdl.startTimeout): it was stopped, or waits for a disk, a "
                            "network mount, a lock, or a core; see what the Python worker does "
                            "there (py-spy dump), end it, or raise the setting"
                        )
        finally:
            self.end()
        return self.result()

    def check_queue(self, what: str, waited: float, queue_seconds: float, more: str = "") -> None:
        """Say each minute that no ``what`` has begun; in the end raise ClusterError."""
        if waited > (self._times_said + 1) * _SAY_SECONDS:
            self._times_said += 1
            logger.warning(
                "no %s has started yet: other jobs hold the slots, or executors are gone; %.0f of "
                "at most %.0f s (spark.sparkdl.queueTimeout) have passed%s",
                *(what, waited, queue_seconds, more),
            )
        if waited > queue_seconds:
            raise ClusterError(
                f"no {what.partition(' ')[0]} started within {queue_seconds:g} s: other jobs hold "
                "the slots, or executors are gone; free them, lower numWorkers, or raise "
                "spark.sparkdl.queueTimeout"
            )


def bounded(spark: SparkSession, work: Callable[[], T], seconds: float, name: str) -> T | None:
    """Return the value of ``work``; None if it is not done in time, then its jobs are cancelled."""
    tag = f"sparkdl-bounded-{uuid.uuid4().hex[:12]}"
    job = BackgroundJob(spark, work, tag=tag, name=name)
    try:
        job.begin()
        is_in_time = job.wait(seconds)
    finally:  # also if the user interrupts
        job.end()
    if not is_in_time:
        return None
    if job.error is not None:
        raise_unless_loss(job.error)
    return job.result()


@dataclass(frozen=True, kw_only=True)
class Fate:
    """The state of a task, as Spark says it."""

    runs_for: float | None = None
    """Seconds since its launch; None: it has ended, or its executor is gone."""
    has_succeeded: bool = False


class TaskProgress:
    """The progress of the tasks of a tagged job, as Spark says it."""

    def __init__(self, spark: SparkSession, tag: str) -> None:
        self.spark = spark
        self.tag = tag
        self._told = 0, 0
        """Numbers that Spark Connect said last: of tasks that run, and of those that have ended."""
        self._told_at = 0.0
        """Time at which these became other ones."""
        self.num_begun = 0
        """Tasks that run or have ended, as far as `seconds_without` has asked."""
        self.num_running = 0
        """Tasks that run, likewise."""
        self._ended = -1
        self._since = self._asked = self._next = 0.0

    @contextlib.contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Have Spark Connect tell of this thread's jobs; it does not answer questions."""
        if not compat.is_connect(self.spark):
            yield
            return
        mine = threading.current_thread()

        def told(*, stages: Iterable[Any] | None, inflight_tasks: int, **_: object) -> None:
            if threading.current_thread() is mine:  # it is called in the thread that waits
                ended = sum(stage.num_completed_tasks for stage in stages or ())
                if self._told != (inflight_tasks, ended):
                    self._told, self._told_at = (inflight_tasks, ended), time.monotonic()

        handler: Any = told
        self.spark.registerProgressHandler(handler)
        try:
            yield
        finally:
            self.spark.removeProgressHandler(handler)

    def seconds_without(self) -> float:
        """Seconds since a task has ended, or the first began; asks Spark once a second."""
        now = time.monotonic()
        if now >= self._next:
            self._asked, self._next = now, now + _ASK_SECONDS
            running, ended = self.tasks()
            self.num_begun = max(self.num_begun, running + ended)
            self.num_running = running
            if not running or ended != self._ended:
                self._ended, self._since = ended, now
        return self._asked - self._since

    def is_submitted(self) -> bool:
        """True if Spark has the job; Spark Connect tells when a task of it runs."""
        if compat.is_connect(self.spark):
            return self._told != (0, 0)
        return bool(len(self._tracker().getJobIdsForTag(self.tag)))

    def tasks(self) -> tuple[int, int]:
        """Tasks that run, and those that have ended, well or not."""
        if compat.is_connect(self.spark):
            return self._told
        running = ended = 0
        for info in self._stages():
            running += info.numActiveTasks()
            ended += info.numCompletedTasks() + info.numFailedTasks()
        return running, ended

    def _stages(self) -> list[Any]:
        tracker = self._tracker()
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForTag(self.tag)]
        numbers = [n for job in jobs if job.isDefined() for n in job.get().stageIds()]
        found = [tracker.getStageInfo(number) for number in numbers]
        return [stage.get() for stage in found if stage.isDefined()]

    def _tracker(self) -> Any:
        return compat.scala_context(self.spark).statusTracker()

    def seconds_of_newest(self) -> float:
        """Return the age of the task launched last; infinity: none runs.

        Spark Connect does not say more than how many tasks there are, and when that has changed.
        """
        if compat.is_connect(self.spark):
            return time.monotonic() - self._told_at if self._told[0] else math.inf
        launched = (
            task.launchTime().getTime() / 1000
            for stage in self._stages()
            for task in self._all(stage.stageId(), stage.currentAttemptId(), _NEWEST_TASKS)
            if task.status() == "RUNNING"
        )
        return time.time() - max(launched, default=-math.inf)

    def hosts(self) -> list[str]:
        """Return where tasks run now; Spark Connect does not say it."""
        if compat.is_connect(self.spark):
            return []
        return sorted(
            {
                str(task.host())
                for stage in self._stages()
                for task in self._all(stage.stageId(), stage.currentAttemptId(), _MOST_TASKS)
                if task.status() == "RUNNING"
            }
        )

    def fates(self, stage_ids: Iterable[int]) -> dict[SparkTask, Fate] | None:
        """Return what has become of the tasks of some stages; asks Spark about each of them.

        None: Spark Connect, which has no status store, does not say it.
        """
        if compat.is_connect(self.spark):
            return None
        executors = compat.scala_context(self.spark).statusStore().executorList(True)
        living = {executors.apply(index).id() for index in range(executors.size())}
        found, now = {}, time.time()
        for stage_id in stage_ids:
            stage = self._tracker().getStageInfo(stage_id)
            # Tasks of an earlier attempt at a stage run on, beside those that it has lost.
            attempts = range(stage.get().currentAttemptId() + 1) if stage.isDefined() else ()
            for task in (task for one in attempts for task in self._all(stage_id, one)):
                number = SparkTask(
                    stage_id=stage_id, partition=task.partitionId(), attempt_id=task.taskId()
                )
                runs = task.status() == "RUNNING" and task.executorId() in living
                found[number] = Fate(
                    runs_for=now - task.launchTime().getTime() / 1000 if runs else None,
                    has_succeeded=task.status() == "SUCCESS",
                )
        return found

    def _all(self, stage_id: int, attempt: int, most: int = _ALL_TASKS) -> Iterator[Any]:
        """The tasks of an attempt at a stage, the newest ``most`` of them."""
        tasks = compat.scala_context(self.spark).statusStore().taskList(stage_id, attempt, most)
        return (tasks.apply(index) for index in range(tasks.size()))


_AGAIN_SECONDS = 0.5
_WAIT_SECONDS = 60.0
_LAST_SECONDS = 10.0
"""Longest time that jobs in the background may go on when the session ends."""

_left: list[tuple[BackgroundJob[Any], Callable[[], None]]] = []
"""Jobs that go on in the background, and what to call if they are cancelled."""
_leaving = threading.Lock()


def _end_left_before_stop(spark: SparkSession) -> None:
    """Have the session's context call `end_left` before it stops."""
    if compat.is_connect(spark):
        return  # its server lives on
    context: Any = spark.sparkContext
    if "stop" in vars(context):
        return
    stop = context.stop

    def end_left_and_stop() -> None:
        end_left()
        stop()

    context.stop = end_left_and_stop


@atexit.register
def end_left() -> None:
    """Wait for what goes on in the background, some seconds in all, and cancel the rest."""
    deadline = time.monotonic() + _LAST_SECONDS
    with _leaving:
        jobs = [job for job, _ in _left]
    for job in jobs:
        job.is_over.wait(max(0.0, deadline - time.monotonic()))
        job._end_later(0.0)
    for job in jobs:  # Spark tells a job's end before its tasks have ended
        while time.monotonic() < deadline + _AGAIN_SECONDS and job.has_tasks():
            time.sleep(_LOOK_SECONDS)


def end_job(progress: TaskProgress, is_over: threading.Event) -> None:
    """Cancel a job until it has ended, and wait for that, but no longer than a minute.

    ``progress`` has the tag of `tag_jobs` in the thread that submits the job, which sets
    ``is_over``.
    """
    cancelling = _begin_cancelling(progress, is_over)
    deadline = time.monotonic() + _WAIT_SECONDS
    while not is_over.wait(timeout=_AGAIN_SECONDS):
        if time.monotonic() > deadline or is_hurried():
            logger.warning(
                "the Spark job with the tag %s could not be cancelled yet, and may take slots; it "
                "is cancelled as soon as Spark lets it begin, or kill it in Spark's UI",
                progress.tag,
            )
            return
    cancelling.join()


def _begin_cancelling(progress: TaskProgress, is_over: threading.Event) -> threading.Thread:
    cancelling = threading.Thread(
        target=_keep_cancelling, args=(progress, is_over), name="sparkdl-cancel", daemon=True
    )
    cancelling.start()
    return cancelling


def _keep_cancelling(progress: TaskProgress, is_over: threading.Event) -> None:
    while not is_over.is_set():
        try:
            _let_begin(progress, is_over)
            compat.cancel_jobs(progress.spark, progress.tag)
        except Exception as error:  # whatever py4j or gRPC raise where Spark is gone
            logger.info("Spark does not cancel jobs any more: %s", error)
        is_over.wait(timeout=_AGAIN_SECONDS)


def _let_begin(progress: TaskProgress, is_over: threading.Event) -> None:
    """Wait until a task that was launched just now has its Python worker; not for later ones."""
    deadline = time.monotonic() + _BEGINS_SECONDS
    while time.monotonic() < deadline and progress.seconds_of_newest() < _BEGINS_SECONDS:
        if is_hurried() or is_over.wait(_LOOK_SECONDS):
            return

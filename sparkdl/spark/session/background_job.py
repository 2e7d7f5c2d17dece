"""A Spark job in a thread of its own, so that its caller can look after it, and need not wait.

pyspark's calls last as long as their jobs, and a job lasts for ever if a Python worker hangs, or if
other jobs hold all slots.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pyspark.sql import SparkSession

from sparkdl.spark.session.cancel import end_job
from sparkdl.spark.session.compat import described, is_connect, tag_jobs
from sparkdl.spark.session.interrupts import raise_if_asked

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_SECONDS = 0.05
_ASK_SECONDS = 1.0
"""How often Spark is asked about the tasks of a job."""
_MOST_TASKS = 1000
"""Of a stage, that are looked at to find the hosts of those that run."""


class BackgroundJob(Generic[T]):
    """What submits Spark jobs and gives a value, in a thread that begins at once."""

    def __init__(self, spark: SparkSession, work: Callable[[], T], *, tag: str, name: str) -> None:
        """Begin.

        Args:
            spark: the session.
            work: submits the jobs.
            tag: of the jobs, by which they can be cancelled; no other job has it.
            name: of the jobs in Spark's UI.
        """
        self.is_over = threading.Event()
        """Set when the work has ended."""
        self.error: Exception | None = None
        self._spark, self._work, self._tag, self._name = spark, work, tag, name
        self._values: list[T] = []
        thread = threading.Thread(target=self._run, name="sparkdl-job", daemon=True)
        thread.start()

    def _run(self) -> None:
        try:
            tag_jobs(self._spark, self._tag)
            with described(self._spark, self._name):
                self._values.append(self._work())
        except Exception as error:
            self.error = error
        finally:
            self.is_over.set()

    def wait(self, timeout_seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the work has ended, time is up, or ``until`` is true; True if it has ended."""
        deadline = time.monotonic() + timeout_seconds
        while not self.is_over.wait(_LOOK_SECONDS):
            if time.monotonic() > deadline or until():
                return False
        return True

    def end(self) -> None:
        """Cancel its jobs until it has ended; see `end_job`."""
        if not self.is_over.is_set():
            end_job(self._spark, self._tag, self.is_over)

    def result(self) -> T:
        """What the work gave, when it has ended; raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._values[0]

    def watched(self, timeout_seconds: float) -> T:
        """Wait for the work, whose tasks each take little time once they run.

        Args:
            timeout_seconds: longest time in which tasks run and none of them ends.

        Raises:
            TasksHang: that time is over.
            Exception: what the work raised.
        """
        progress = Progress(self._spark, self._tag)
        next_look = 0.0
        try:
            while not self.is_over.wait(_LOOK_SECONDS):
                raise_if_asked()
                if time.monotonic() < next_look:
                    continue
                next_look = time.monotonic() + _ASK_SECONDS
                if progress.seconds_without() > timeout_seconds:
                    hosts = progress.hosts()
                    if not self.is_over.is_set():
                        raise TasksHang(hosts)
        finally:
            self.end()
        return self.result()


class TasksHang(Exception):
    """Tasks of a job run, and none of them ends."""

    def __init__(self, hosts: list[str]) -> None:
        """``hosts`` are those where they run, as far as Spark says it."""
        super().__init__(", ".join(hosts))
        self.hosts = hosts


class Progress:
    """How the tasks of a tagged job get on, as classic Spark says; Spark Connect says nothing."""

    def __init__(self, spark: SparkSession, tag: str) -> None:
        """Of jobs with this tag, which may not have begun."""
        self._scala: Any = None if is_connect(spark) else spark.sparkContext._jsc.sc()
        self._tag = tag
        self._ended = -1
        self._since = time.monotonic()

    def seconds_without(self) -> float:
        """Seconds since a task has ended, or since the first began; 0 while none runs."""
        running, ended = self._tasks()
        if not running or ended != self._ended:
            self._ended, self._since = ended, time.monotonic()
        return time.monotonic() - self._since

    def _tasks(self) -> tuple[int, int]:
        """Tasks that run, and those that have ended, well or not."""
        running = ended = 0
        for info in self._stages():
            running += info.numActiveTasks()
            ended += info.numCompletedTasks() + info.numFailedTasks()
        return running, ended

    def _stages(self) -> list[Any]:
        if self._scala is None:
            return []
        tracker = self._scala.statusTracker()
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForTag(self._tag)]
        numbers = [n for job in jobs if job.isDefined() for n in job.get().stageIds()]
        found = [tracker.getStageInfo(number) for number in numbers]
        return [stage.get() for stage in found if stage.isDefined()]

    def hosts(self) -> list[str]:
        """Where tasks run now."""
        found = set()
        for stage in self._stages():
            number, attempt = stage.stageId(), stage.currentAttemptId()
            tasks = self._scala.statusStore().taskList(number, attempt, _MOST_TASKS)
            for index in range(tasks.size()):
                task = tasks.apply(index)
                if task.status() == "RUNNING":
                    found.add(str(task.host()))
        return sorted(found)

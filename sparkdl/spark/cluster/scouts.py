"""Tasks that wait for slots: Spark asks for executors while they wait, and they tell what comes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from sparkdl.spark.cluster.cluster_info import slots_per_executor
from sparkdl.spark.cluster.launch import Launch
from sparkdl.spark.session.background_job import BackgroundJob, TaskProgress
from sparkdl.spark.session.compat import conf, is_connect

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 120.0
"""Seconds that scouts keep slots of which nothing has come, and that none are sent afterwards."""
_HOLD_SECONDS = 4 * _PERIOD_SECONDS
"""A scout ends by itself then; the driver has called it back before, if there still is one."""


@dataclass(frozen=True)
class Scout:
    """The task: it keeps its slot, so that Spark does not release the executor."""

    seconds: float

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Wait, and yield nothing."""
        for _ in batches:
            pass
        time.sleep(self.seconds)
        yield from ()


class Scouts:
    """A job with a task for each worker that a gang lacks.

    The gang is a plain stage: its cluster grows with the tasks that wait (dynamic allocation), or
    does not tell its slots (Spark Connect). A scout that runs has found a slot for a worker.
    """

    def __init__(self, run: Launch) -> None:
        """None are sent yet."""
        self._run = run
        self._job: BackgroundJob[object] | None = None
        self._leaving: TaskProgress | None = None
        """Progress of the scouts called back: Spark ends a task of Python's seconds later."""
        self._times_sent = 0
        self._next = 0.0
        """Time at which to decide again."""
        self._before = 0
        """Number of scouts that had found a slot at the last decision."""

    def num_there(self, world_size: int, missing: int, pays: Callable[[], object]) -> int:
        """Return how many scouts have found a slot; called once a second while a gang trains.

        They are sent if that pays. They are called back if it pays no more, or if the gang has made
        nothing of the slots that they have kept for a while.

        Args:
            world_size: workers of the gang.
            missing: workers that it lacks.
            pays: whether it would start again if it had them all.
        """
        now, found = time.monotonic(), 0
        if self._job is not None:
            self._job.progress.seconds_without()  # asks Spark
            found = self._job.progress.num_running
        if now < self._next:
            return found
        if self._job is None or self._job.is_over.is_set():
            self.end()
            self._next = now + self._run.settings.elastic_wait_seconds
            if not self._is_full(world_size) and pays():
                self._next = now + _PERIOD_SECONDS
                self._send(missing)
        else:
            self._next = now + _PERIOD_SECONDS
            if (found and found == self._before) or not pays():
                self._job.cancel()
        self._before = found
        return found

    def _is_full(self, world_size: int) -> bool:
        """Return True if Spark may ask for no more executors than the gang has."""
        slots = self._run.slots
        most = conf(self._run.spark, "spark.dynamicAllocation.maxExecutors")
        is_known = slots.cluster.dynamic_allocation and slots.cluster.cores_per_executor is not None
        if most is None or not is_known:
            return False
        each = slots_per_executor(slots.cluster, slots.cpus_per_worker, slots.gpus_per_worker)
        return int(most) * each <= world_size

    def _send(self, missing: int) -> None:
        spark, run, number = self._run.spark, self._run, self._times_sent
        self._times_sent += 1
        tasks = spark.range(0, missing, 1, missing).mapInArrow(
            Scout(_HOLD_SECONDS), "id long", profile=run.slots.profile
        )
        tag, name = f"sparkdl-{run.run_id}-scouts-{number}", f"sparkdl {run.run_id}: ask for slots"
        self._job = BackgroundJob(spark, tasks.collect, tag=tag, name=name)
        self._job.begin()

    def call_back(self) -> None:
        """Have them leave their slots; the next ones are sent after a while."""
        if self._job is not None:
            self._job.cancel()

    def have_left(self) -> bool:
        """Return True if the slots of scouts called back are free; Spark Connect cannot tell."""
        if self._leaving is not None:
            self._leaving.seconds_without()  # asks Spark
            if not self._leaving.num_running or is_connect(self._run.spark):
                self._leaving = None
        return self._leaving is None

    def end(self) -> None:
        """Call them back for good, and wait until Spark knows it."""
        job, self._job, self._next = self._job, None, 0.0
        if job is None:
            return
        job.end()
        self._leaving = job.progress
        if job.error is not None and not job.is_cancelled:
            logger.info("Spark has ended the tasks that asked for more slots: %s", job.error)

"""A gang that does not get all its slots gives back those that it has, and asks again later.

Under dynamic allocation the tasks of a gang get their slots one by one. Two applications that have
some each would wait for each other for ever; so would one beside jobs that end never.
"""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError

from sparkdl.errors import ClusterError
from sparkdl.runtime.activity import doing
from sparkdl.spark.session.compat import is_connect
from sparkdl.spark.session.interrupts import raise_if_asked

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.spark.cluster.attempt import Attempt
    from sparkdl.spark.cluster.slots import Slots
    from sparkdl.spark.session.settings import Settings

logger = logging.getLogger(__name__)

_HOLD = 2.0
"""Multiple of ``spark.sparkdl.startTimeout`` for which slots are kept after the newest worker has
come: a cluster that grows by machines needs some minutes for each."""
_PAUSE = (0.25, 1.0)
"""Least and most parts of it after which they are asked for again; the part is a random one, so
that of two applications one asks first."""
_END_SECONDS = 15.0
"""Longest wait until tasks that were cancelled have ended: Spark ends those of Python later."""
_TICK_SECONDS = 0.2


class LetGo:
    """Decides whether a gang that lacks workers shall start again, see `supervisor.Change`.

    It is not used where the gang may begin with fewer workers, nor on Spark Connect, where
    executors cannot be given back.
    """

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        """Store the session and the settings of a run."""
        self._spark, self._settings = spark, settings
        self._since: float | None = None
        """Submission time of the first attempt without all its workers; None: there is none."""
        self._newest: tuple[int, float] = (0, 0.0)
        """Number of workers that are there, and the time since when."""
        self._pause: float | None = None
        """Seconds to wait once the present attempt has ended; None: there is no wait."""

    @classmethod
    def of(cls, spark: SparkSession, slots: Slots, settings: Settings) -> list[LetGo]:
        """One, where slots can be given back."""
        needs_all = slots.is_gang and not slots.is_barrier and slots.max_workers is None
        return [cls(spark, settings)] if needs_all and not is_connect(spark) else []

    def __call__(self, attempt: Attempt) -> str | None:
        """Why to start again; None: go on. ClusterError if that went on for too long."""
        there, now = len(attempt.last_event), time.monotonic()
        if there >= attempt.world_size:
            self._since = None
            return None
        if self._since is None:
            self._since = attempt.submitted
        if there != self._newest[0]:
            self._newest = there, attempt.first_event if there == 1 else now
        settings = self._settings
        held, limit = now - self._newest[1], settings.queue_timeout_seconds
        if not there or held < _HOLD * settings.start_timeout_seconds:
            return None
        if now - self._since > limit:
            raise ClusterError(
                f"no {attempt.world_size} workers had slots at the same time within {limit:g} s: "
                "other applications or jobs hold the slots, or executors are gone; free them, "
                "lower numWorkers, set minWorkers, or raise spark.sparkdl.queueTimeout"
            )
        self._pause = random.uniform(*_PAUSE) * settings.start_timeout_seconds
        text = (
            f"{there} of {attempt.world_size} workers have had slots for {held:.0f} s, and no "
            "further one came: other applications or jobs may hold the rest, and wait for these. "
            f"{self._spark.sparkContext.appName!r} gives its slots back, and asks again in "
            f"{self._pause:.0f} s; {now - self._since:.0f} of at most {limit:.0f} s "
            "(spark.sparkdl.queueTimeout) have passed"
        )
        logger.warning("%s", text)
        return text

    def end(self) -> None:
        """The attempt is over: give back what it held, if it shall be."""
        pause, self._pause, self._newest = self._pause, None, (0, 0.0)
        if pause is None:
            return
        until = time.monotonic() + pause
        try:
            self._give_back()
        except (Py4JError, OSError, AttributeError):
            # They go by themselves then, after Spark's idle time-outs.
            logger.debug("executors are not given back", exc_info=True)
        while (left := until - time.monotonic()) > 0:
            doing("waiting for slots", f"they were given back; asks again in {left:.0f} s")
            raise_if_asked()
            time.sleep(min(left, _TICK_SECONDS))

    def _give_back(self) -> None:
        """Have Spark end executors on which no task runs.

        Without that they would stay: Spark keeps executors that hold cached rows or shuffle files.
        """
        context: Any = self._spark.sparkContext
        scala = context._jsc.sc()
        deadline = time.monotonic() + _END_SECONDS
        while True:
            known = scala.statusStore().executorList(True)
            found = [known.apply(number) for number in range(known.size())]
            executors = [executor for executor in found if executor.id() != "driver"]
            idle = [executor.id() for executor in executors if not executor.activeTasks()]
            if len(idle) == len(executors) or time.monotonic() > deadline:
                break
            raise_if_asked()
            time.sleep(_TICK_SECONDS)
        if idle:
            ids = context._jvm.PythonUtils.toSeq(idle)
            ended = scala.schedulerBackend().killExecutors(ids, False, False, False)
            logger.info("%d executor(s) given back", ended.size())

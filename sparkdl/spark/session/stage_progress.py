"""The progress of Spark's tasks, and Spark's own bar, which is kept off ours."""

from __future__ import annotations

import logging
import math
import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from sparkdl.report.live.notebook import in_notebook
from sparkdl.report.live.progress import terminal_columns
from sparkdl.report.live.views import activity_view, showing
from sparkdl.spark.session.compat import RUN, is_connect

logger = logging.getLogger(__name__)

_ASK_SECONDS = 1.0


def working(
    spark: SparkSession, what: str, *, has_lines: bool = True
) -> AbstractContextManager[None]:
    """Show what the block does, and how many of Spark's tasks are done; see `activity_view`."""
    return showing(what, partial(activity_view, has_lines=has_lines), StageProgress(spark))


class StageProgress:
    """Asked four times a second while something of ours is on the screen.

    Spark draws its bar over the terminal's last line unless a job has just ended. So it is told
    that one has: nothing of the session is changed. In a file the bar is ended for good.
    """

    def __init__(self, spark: SparkSession, run_id: str | None = None) -> None:
        """Follow this session's jobs of a run (`jobs_of_run`), or those that belong to none.

        Spark Connect has neither a bar nor an answer.
        """
        self._run_id = run_id
        self._context: Any = None if is_connect(spark) else spark.sparkContext
        self._bar: Any = None
        self._has_screen = in_notebook() or terminal_columns() is not None
        self._found, self._next = "", -math.inf
        self._times_idle = 0

    def __call__(self) -> str:
        """Tasks of the stages that run now, in words; empty: none runs, or nobody knows."""
        if self._context is None:
            return ""
        try:
            now = time.monotonic()
            if now >= self._next:
                self._next = now + _ASK_SECONDS
                self._found = self._tasks()
            if self._bar is not None and self._has_screen:
                self._bar.finishAll()
            elif self._bar is not None:
                self._bar.stop()
        # The session has ended, or its cluster allows no such calls.
        except (Py4JError, OSError, AttributeError):
            logger.debug("how tasks get on is not shown any more", exc_info=True)
            self._context, self._found = None, ""
        return self._found

    def _tasks(self) -> str:
        scala = self._context._jsc.sc()
        bar = scala.progressBar()
        self._bar = bar.get() if bar.isDefined() else None
        tracker, scheduled = scala.statusTracker(), scala.taskScheduler().rootPool()
        known = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        stages = [stage.get() for stage in known if stage.isDefined()]
        # The tracker may be ten seconds late: it keeps what happens within a tenth of a second of
        # its last change until an executor's next heartbeat.
        names = [f"TaskSet_{stage.stageId()}.{stage.currentAttemptId()}" for stage in stages]
        found = [scheduled.getSchedulableByName(name) for name in names]
        sets = [one for one in found if one is not None and self._is_ours(one)]
        if not sets:
            return ""
        total = sum(one.numTasks() for one in sets)
        ended = sum(one.tasksSuccessful() for one in sets)
        is_idle = not ended and not any(one.runningTasks() for one in sets)
        self._times_idle = self._times_idle + 1 if is_idle else 0
        if self._times_idle > 1:  # not just about to start
            return "waiting for slots"
        return f"{ended} of {total} task{'s' * (total != 1)} done"

    def _is_ours(self, tasks: Any) -> bool:
        """Return True if a set of tasks belongs to the run, and not to another of the session."""
        properties = tasks.taskSet().properties()
        return (properties.getProperty(RUN) if properties else None) == self._run_id

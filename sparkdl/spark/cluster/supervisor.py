"""How is a gang watched, and what follows from its failure?

Spark aborts a job whose barrier stage fails, so the driver submits it again: errors of the
user's code end the fit at once with the traceback of the rank that failed first; lost workers,
lost executors and hangs are retried from the last complete checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pyspark.sql import SparkSession

from sparkdl.comm.channel import Event, Hub
from sparkdl.errors import ClusterError, SparkDLError, TrainingFailed
from sparkdl.report.live.progress import Progress, View
from sparkdl.report.recorder import Recorder
from sparkdl.spark.cluster.attempt import verdict
from sparkdl.spark.session.cancel import end_job
from sparkdl.spark.session.compat import described, tag_jobs
from sparkdl.spark.session.failures import LOST, LOST_REMEDY, raise_unless_loss, told_by
from sparkdl.spark.session.interrupts import raise_if_asked

logger = logging.getLogger(__name__)

Rows = list[tuple[int, str, bytes]]
T = TypeVar("T")

_TICK_SECONDS = 0.05
_GRACE_SECONDS = 3.0
"""How long the other ranks' reports and Spark's own reason may follow the first sign of failure."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When the supervisor loses patience."""

    max_restarts: int
    heartbeat_timeout_seconds: float
    start_timeout_seconds: float
    queue_timeout_seconds: float


@dataclass(kw_only=True)
class Attempt:
    """What is known of one submission of the gang."""

    number: int
    world_size: int
    submitted: float
    first_heard: float = 0.0
    """When the first worker was heard."""
    heard: dict[int, float] = field(default_factory=dict)
    """When each rank was last heard, by the driver's clock."""
    done: set[int] = field(default_factory=set)
    failures: list[Mapping[str, Any]] = field(default_factory=list)
    """Failures in the order of their arrival."""
    cancelled: bool = False
    """Whether we ended the job, so that Spark's error says nothing new; one that has not begun by
    then never does."""
    has_begun: bool = False
    """Whether its thread may have a job, or have one soon."""
    rows: Rows | None = None
    spark_error: Exception | None = None
    is_over: threading.Event = field(default_factory=threading.Event)
    """Set when Spark's job has ended. To be waited for in place of its thread: up to Python 3.12 a
    ``Thread.join`` that Ctrl-C interrupts takes the thread for ended (bpo-45274)."""

    def silent(self, now: float, timeout_seconds: float) -> list[int]:
        """Ranks that were heard once but not lately, and have not finished."""
        return sorted(
            rank
            for rank, heard in self.heard.items()
            if rank not in self.done and now - heard > timeout_seconds
        )

    def ended_well(self) -> set[int]:
        """Ranks that have come to their end without a failure."""
        ended = self.done if self.rows is None else set(range(self.world_size))
        return ended - {failure["rank"] for failure in self.failures}

    def has_reported(self, kind: type[SparkDLError]) -> bool:
        """Whether a rank has failed with an error of this very type."""
        return any(failure["type"] == kind.__name__ for failure in self.failures)


@dataclass(frozen=True, kw_only=True)
class GangResult:
    """What came of a run."""

    rows: Rows
    restarts: int


def supervise(
    spark: SparkSession,
    submit: Callable[[int], Callable[[], Rows]],
    *,
    world_size: int,
    hub: Hub,
    limits: Limits,
    view: View,
    run_id: str,
    is_watched: bool = True,
    first_attempt: int = 0,
    heal: Callable[[Attempt], None] | None = None,
    recorder: Recorder | None = None,
    what: str = "train",
) -> GangResult:
    """Run a gang to its end, however many submissions that takes.

    Args:
        spark: the session.
        submit: given the attempt's number, prepares it (finds the checkpoint, rebuilds lost
            shards) and returns the call that runs the gang and gives its rows.
        world_size: number of ranks.
        hub: where the workers' events arrive.
        limits: time-outs and number of restarts.
        view: shows progress and logs.
        run_id: names the run's jobs, so that they can be cancelled.
        is_watched: whether workers reach the driver's hub; else only rows tell what happened.
        first_attempt: number of the first submission, where a run makes several gangs.
        heal: given a failed attempt, mends what would make the next one fail too.
        recorder: is told what the view does not show: failures and their reasons, hardware.
        what: is done, for Spark's UI.

    Raises:
        WorkerError: the user's code failed.
        TrainingFailed: workers were lost more than ``max_restarts`` times, or the job was
            cancelled by hand.
        DataError: the source of the DataFrame can no longer be read.
        SparkDLError: what a worker raised on purpose, such as a version mismatch.
    """
    reasons: list[str] = []
    for number in range(limits.max_restarts + 1):
        try:
            job = submit(first_attempt + number)
            attempt = _run(
                spark,
                job,
                first_attempt + number,
                world_size,
                hub,
                limits,
                view,
                run_id,
                is_watched=is_watched,
                recorder=recorder,
                name=f"sparkdl {run_id}: {what}" + f", restart {number}" * (number > 0),
            )
        except Exception as error:
            raise_unless_loss(error)
            attempt = Attempt(number=number, world_size=world_size, submitted=0, spark_error=error)
        reason = verdict(attempt)
        if reason is None:
            assert attempt.rows is not None
            return GangResult(rows=attempt.rows, restarts=number)
        reasons.append(reason)
        if recorder is not None:
            recorder.failure(reason)
        if number < limits.max_restarts:
            logger.warning(
                "%s; restart %d of %d",
                reason,
                number + 1,
                limits.max_restarts,
            )
            if heal is not None:
                heal(attempt)
    raise _given_up("training", len(reasons), reasons[-1], limits.max_restarts)


def _given_up(what: str, times: int, reason: str, max_restarts: int) -> TrainingFailed:
    often = "once" if times == 1 else f"{times} times"
    remedy = f"; {LOST_REMEDY}" if reason.startswith(LOST) else ""
    told = f"{what} failed {often} (maxRestarts={max_restarts}); last: {reason}{remedy}"
    return TrainingFailed(told)


def persistently(action: Callable[[], T], *, max_restarts: int, prepare: Callable[[], None]) -> T:
    """Run a Spark job again after the loss of a worker or executor, as `supervise` does.

    Spark does not retry a failed barrier stage, so the spooling job needs this as well.

    Args:
        action: submits the job.
        max_restarts: how often it may be submitted again.
        prepare: called before each new submission; waits for executors.

    Raises:
        TrainingFailed: workers were lost more than ``max_restarts`` times, or the job was
            cancelled by hand.
        DataError: the source of the DataFrame cannot be read.
    """
    for number in range(max_restarts + 1):
        if number > 0:
            prepare()
        try:
            return action()
        except Exception as error:
            raise_unless_loss(error)
            reason = f"{LOST} ({told_by(error)})"
        if number < max_restarts:
            logger.warning("%s; trying again, %d of %d", reason, number + 1, max_restarts)
    raise _given_up("spooling", max_restarts + 1, reason, max_restarts)


def _run(
    spark: SparkSession,
    job: Callable[[], Rows],
    number: int,
    world_size: int,
    hub: Hub,
    limits: Limits,
    view: View,
    run_id: str,
    *,
    is_watched: bool,
    recorder: Recorder | None,
    name: str,
) -> Attempt:
    """Submit once and watch until Spark's job has ended."""
    attempt = Attempt(number=number, world_size=world_size, submitted=time.monotonic())
    tag = f"sparkdl-{run_id}-{number}"
    thread = threading.Thread(
        target=_submit,
        args=(spark, job, tag, name, attempt),
        name=f"sparkdl-gang-{number}",
        daemon=True,
    )
    try:
        thread.start()
        hear = partial(_hear, hub, attempt, view, recorder)
        _watch(attempt, hear, limits, is_watched=is_watched)
    finally:
        if not attempt.is_over.is_set():
            attempt.cancelled = True
            if attempt.has_begun:
                end_job(spark, tag, attempt.is_over)
        _hear(hub, attempt, view, recorder)  # the last events may come a moment after the rows
    if attempt.rows is not None:
        reported = [json.loads(payload) for _, kind, payload in attempt.rows if kind == "error"]
        known = {failure["rank"] for failure in attempt.failures}
        attempt.failures.extend(f for f in reported if f["rank"] not in known)
    return attempt


def _submit(
    spark: SparkSession, job: Callable[[], Rows], tag: str, name: str, attempt: Attempt
) -> None:
    attempt.has_begun = True  # and then looks whether it may go on; who cancels looks after that
    try:
        tag_jobs(spark, tag)
        with described(spark, name):
            if not attempt.cancelled:
                attempt.rows = job()
    except Exception as error:
        attempt.spark_error = error
    finally:
        attempt.is_over.set()


def _watch(
    attempt: Attempt,
    hear: Callable[[], None],
    limits: Limits,
    *,
    is_watched: bool,
) -> None:
    """Return when the job has ended, or when it must be cancelled."""
    before = time.monotonic()
    doomed_since: float | None = None
    while not attempt.is_over.is_set():
        raise_if_asked()
        hear()
        now = time.monotonic()
        if now - before > limits.heartbeat_timeout_seconds / 2:
            # The driver itself stood still; silence during that time says nothing.
            attempt.heard = dict.fromkeys(attempt.heard, now)
        before = now
        if attempt.failures and doomed_since is None:
            doomed_since = now
        if doomed_since is not None and now - doomed_since > _GRACE_SECONDS:
            return
        if is_watched and doomed_since is None:
            _check_start(attempt, now, limits)
            silent = attempt.silent(now, limits.heartbeat_timeout_seconds)
            if silent:
                attempt.failures.append(_hang(silent, limits.heartbeat_timeout_seconds))
                return
        attempt.is_over.wait(timeout=_TICK_SECONDS)


def _check_start(attempt: Attempt, now: float, limits: Limits) -> None:
    """Wait long for slots, which other jobs may hold, but not for part of a gang.

    Raises:
        ClusterError: no slots became free.
    """
    missing = attempt.world_size - len(attempt.heard)
    if missing == attempt.world_size:
        if now - attempt.submitted > limits.queue_timeout_seconds:
            raise ClusterError(
                f"no worker started within {limits.queue_timeout_seconds:g} s: other jobs hold "
                "the slots, or executors are gone; free them, lower numWorkers, or raise "
                "spark.sparkdl.queueTimeout"
            )
    elif missing and now - attempt.first_heard > limits.start_timeout_seconds:
        attempt.failures.append(
            {
                "rank": min(set(range(attempt.world_size)) - set(attempt.heard)),
                "kind": "gang",
                "type": "Missing",
                "message": f"{missing} of {attempt.world_size} workers did not start within "
                f"{limits.start_timeout_seconds:g} s of the first (spark.sparkdl.startTimeout)",
            }
        )


def _hang(silent: Sequence[int], timeout_seconds: float) -> Mapping[str, Any]:
    ranks = ", ".join(map(str, silent))
    return {
        "rank": silent[0],
        "kind": "gang",
        "type": "Hang",
        "message": f"rank {ranks} has not been heard for {timeout_seconds:g} s",
    }


def _hear(hub: Hub, attempt: Attempt, view: View, recorder: Recorder | None) -> None:
    """Take all events that have arrived; those that arrive meanwhile must wait for their turn."""
    with contextlib.suppress(queue.Empty):
        for _ in range(hub.events.qsize()):
            event = hub.events.get_nowait()
            if event.attempt == attempt.number:
                _take(event, attempt, view, recorder)


def _take(event: Event, attempt: Attempt, view: View, recorder: Recorder | None) -> None:
    if not attempt.heard:
        attempt.first_heard = event.received
    attempt.heard[event.rank] = event.received
    kind = event.body["kind"]
    if kind == "heartbeat":
        view.progress(event.rank, Progress.of(event.body))
    elif kind == "log":
        for level, line in event.body["lines"]:
            view.log(event.rank, line, level)
    elif kind == "epoch" and event.rank == 0:
        view.epoch(event.body["record"])
    elif kind == "error":
        attempt.failures.append(event.body["failure"])
        attempt.done.add(event.rank)
    elif kind == "done":
        attempt.done.add(event.rank)
    elif recorder is not None:
        recorder.fact(event.rank, event.body)

"""A run's jobs are submitted, watched, and submitted again after a loss.

Spark aborts a job whose barrier stage fails, so the driver submits it again: errors of the
user's code end the fit at once with the traceback of the rank that failed first; lost workers,
lost executors and hangs are retried from the last complete checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sparkdl.comm.channel import Event
from sparkdl.comm.file_chunks import JobResults
from sparkdl.comm.worker_environment import SparkTask
from sparkdl.errors import TrainingFailed
from sparkdl.report.live.progress import Progress
from sparkdl.runtime.activity import doing
from sparkdl.runtime.versions import untested
from sparkdl.spark.cluster.attempt import Attempt, Silence, restart_reason
from sparkdl.spark.cluster.launch import Launch
from sparkdl.spark.cluster.let_go import LetGo
from sparkdl.spark.session import failures
from sparkdl.spark.session.background_job import BackgroundJob
from sparkdl.spark.session.interrupts import raise_if_asked

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TICK_SECONDS = 0.05
_QUEUED_SECONDS = 3.0
"""After how long without a task a gang is said to wait for slots."""
_RESIZE_SECONDS = 1.0
"""Between two looks whether the gang can have more workers."""
_LISTEN_SECONDS = 1.0
"""Between two looks whether ranks are silent, for which Spark is asked about their tasks."""
_PAUSE_SECONDS = 1.0
"""A look at the gang that comes so late shows that the driver itself stood still."""
_MEASURED_SECONDS = 5.0
"""After so much of a rank's own work its speed is known."""
_LEAVE_SECONDS = 2.0
"""Longest wait for workers to end by themselves, once nobody wants their work any more."""
_GRACE_SECONDS = 3.0
"""Longest wait after the first sign of failure for other ranks' reports and Spark's own reason."""


class Change(Protocol):
    """Decides whether a gang starts again with other workers, or with other shards for them."""

    def __call__(self, attempt: Attempt) -> str | None:
        """Why to start again; None: go on. Asked once a second."""

    def end(self) -> None:
        """An attempt is over: nothing may hold slots that the next one needs."""


@dataclass(frozen=True, kw_only=True)
class GangResult:
    """The results of a run."""

    rows: JobResults
    restarts: int
    """After losses."""
    sizes: list[tuple[int, int]]
    """First step and number of workers of each submission."""


def supervise(
    run: Launch,
    submit: Callable[[Attempt], Callable[[], JobResults]],
    *,
    first_attempt: int = 0,
    heal: Callable[[Attempt], None] | None = None,
    changes: Sequence[Change] = (),
    needs_all: bool = True,
    what: str = "train",
    once_there: str = "waiting for the first step",
) -> GangResult:
    """Run a gang, or the tasks of a round, to the end, however many submissions that takes.

    Only restarts without progress count: an attempt that begins from a newer checkpoint than all
    before it may be followed by ``max_restarts`` more. Where workers do not reach the driver's
    channel, only their rows tell what happened.

    Args:
        run: whose job it is.
        submit: given an attempt, prepares it (finds the checkpoint, rebuilds lost shards), notes
            in it where it starts, and returns the call that runs the job and gives its rows.
        first_attempt: number of the first submission, where a run makes several jobs.
        heal: given a failed attempt, mends what would make the next one fail too.
        changes: who may want to start again with other workers or shards; that is no failure.
        needs_all: as in `Attempt`.
        what: is done, for Spark's UI.
        once_there: as in `Attempt`.

    Raises:
        WorkerError: the user's code failed.
        TrainingFailed: workers were lost too often without progress, or the job was cancelled.
        DataError: the source of the DataFrame can no longer be read.
        ClusterError: no slots became free, or the session has ended.
        SparkDLError: what a worker raised on purpose, such as a version mismatch.
    """
    failed, furthest, losses = 0, -1, 0
    changes = [*changes, *(LetGo.of(run.spark, run.slots, run.settings) if needs_all else ())]
    sizes: list[tuple[int, int]] = []
    for restarts in itertools.count():
        attempt = Attempt(
            number=first_attempt + restarts,
            world_size=run.slots.num_workers,
            submitted=time.monotonic(),
            restarts_left=run.max_restarts - failed,
            needs_all=needs_all,
            once_there=once_there,
            on_gpus=bool(run.slots.gpus_per_worker or run.slots.cluster.gpus_per_executor),
        )
        try:
            run.link.hub.begin(attempt.number)  # what is left of the one before is shut out
            job = submit(attempt)
            sizes.append((attempt.start, attempt.world_size))
            attempt.submitted = time.monotonic()
            name = f"sparkdl {run.run_id}: {what}" + f", restart {restarts}" * (restarts > 0)
            _run(run, job, attempt, name, changes)
        except Exception as error:
            failures.raise_unless_loss(error)
            attempt.spark_error, attempt.cancelled = error, False
        finally:
            for change in changes:
                change.end()
        if attempt.resized is not None and attempt.rows is None:  # it failed as it was ended
            logger.info("%s", attempt.resized)
            if attempt.steps is None and attempt.saved is None:  # it had not begun
                sizes.pop()
            continue
        reason = restart_reason(attempt)
        if reason is None:
            assert attempt.rows is not None
            return GangResult(rows=attempt.rows, restarts=losses, sizes=sizes)
        if attempt.start > furthest:
            failed, furthest = 0, attempt.start
        failed, losses = failed + 1, losses + 1
        run.view.failure(reason)
        failures.raise_if_ended(run.spark, attempt.spark_error)
        if failed > run.max_restarts:
            raise _given_up("training", failed, reason, run.max_restarts)
        logger.warning("%s; restart %d of %d", reason, failed, run.max_restarts)
        if attempt.spark_error is not None:
            logger.info("Spark's words: %s", failures.spark_message(attempt.spark_error))
        if heal is not None:
            heal(attempt)
    raise AssertionError("the loop has no other end")


def _given_up(what: str, times: int, reason: str, max_restarts: int) -> TrainingFailed:
    often = "once" if times == 1 else f"{times} times without progress"
    remedy = (
        f"; {failures.LOST_REMEDY}"
        if reason.startswith(failures.LOST) or reason.endswith(failures.SILENT)
        else ""
    )
    message = (
        f"{what} failed {often} (maxRestarts={max_restarts}); last: {reason}{remedy}{untested()}"
    )
    return TrainingFailed(message)


def persistently(
    action: Callable[[], T], *, max_restarts: int, prepare: Callable[[int], object]
) -> T:
    """Run a Spark job again after the loss of a worker or executor, as `supervise` does.

    Spark does not retry a failed barrier stage, so the spooling job needs this as well. ``prepare``
    waits for executors; it is told how many submissions are left after this one.
    """
    for number in range(max_restarts + 1):
        if number > 0:
            prepare(max_restarts - number)
        try:
            return action()
        except Exception as error:
            failures.raise_unless_loss(error)
            reason = failures.loss_reason(error)
            logger.info("Spark's words: %s", failures.spark_message(error))
        if number < max_restarts:
            logger.warning("%s; trying again, %d of %d", reason, number + 1, max_restarts)
    raise _given_up("spooling", max_restarts + 1, reason, max_restarts)


def _run(
    run: Launch,
    work: Callable[[], JobResults],
    attempt: Attempt,
    name: str,
    changes: Sequence[Change],
) -> None:
    """Submit once and watch until Spark's job has ended."""
    tag = f"sparkdl-{run.run_id}-{attempt.number}"
    job = BackgroundJob(run.spark, work, tag=tag, name=name)
    try:
        job.begin()
        _watch(run, attempt, job, changes)
    except Exception:  # such as a trial of a search that is pruned
        _dismiss(run, attempt, job)
        raise
    finally:
        job.end()
        _receive(run, attempt)  # the last events may come a moment after the rows
    attempt.spark_error, attempt.cancelled = job.error, job.is_cancelled
    attempt.rows = next(iter(job.values), None)
    if attempt.spark_error is not None and failures.has_crashed(attempt.spark_error):
        _await_crash(run, attempt)
    if attempt.rows is not None:
        reported = [json.loads(payload) for _, kind, payload in attempt.rows if kind == "error"]
        known = {failure["rank"] for failure in attempt.failures}
        attempt.failures.extend(f for f in reported if f["rank"] not in known)


def _dismiss(run: Launch, attempt: Attempt, job: BackgroundJob[JobResults]) -> None:
    """Have workers end by themselves, for a moment.

    Spark would end their processes, and the next ones would have to import torch anew.
    """
    if run.link.channel is not None and len(attempt.last_event) == attempt.world_size:
        run.link.hub.is_over = True
        job.wait(_LEAVE_SECONDS)


def _await_crash(run: Launch, attempt: Attempt) -> None:
    """Give the process beside a worker that has crashed a moment to say where.

    Those of workers that Spark has ended since say nothing of the cause.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    while run.link.channel is not None and time.monotonic() < deadline:
        if any(attempt.crashes.values()):
            return
        raise_if_asked()
        time.sleep(_TICK_SECONDS)
        _receive(run, attempt)


def _watch(
    run: Launch,
    attempt: Attempt,
    job: BackgroundJob[JobResults],
    changes: Sequence[Change],
) -> None:
    """Return when the job has ended, or when it must be cancelled."""
    reaches_driver = run.link.channel is not None
    before = asked = listened = time.monotonic()
    doomed_since: float | None = None
    while not job.wait(_TICK_SECONDS):
        _receive(run, attempt)
        _say_how_many(attempt, job, reaches_driver=reaches_driver)
        now = time.monotonic()
        if now - before > _PAUSE_SECONDS:
            # The driver itself stood still, or got no CPU; silence during that time says nothing.
            for rank, at in attempt.last_event.items():
                attempt.last_event[rank] = min(now, at + now - before)
        before = now
        if changes and not attempt.failures and now - asked > _RESIZE_SECONDS:
            asked = now
            attempt.resized = next(filter(None, (change(attempt) for change in changes)), None)
            if attempt.resized is not None:
                return
        if attempt.failures and doomed_since is None:
            doomed_since = now
        if doomed_since is not None and now - doomed_since > _GRACE_SECONDS:
            return
        if doomed_since is None:
            _check_start(attempt, now, run, job)
            if now - listened > _LISTEN_SECONDS:
                listened = now
                if _check_silence(attempt, now, run, job):
                    return


def _say_how_many(
    attempt: Attempt, job: BackgroundJob[JobResults], *, reaches_driver: bool
) -> None:
    """Show how many workers are there until all are."""
    num_there = len(attempt.last_event) if reaches_driver else job.progress.num_begun
    if num_there < attempt.world_size:
        said = f"{num_there} of {attempt.world_size} are there"
        is_queued = not job.progress.num_begun and not num_there
        if is_queued and time.monotonic() - attempt.submitted > _QUEUED_SECONDS:
            said += "; their tasks wait for slots"
        doing("starting workers", said)
    elif reaches_driver:
        doing(attempt.once_there, "")
    else:
        doing("training", "the workers cannot say how far they are")


def _check_start(attempt: Attempt, now: float, run: Launch, job: BackgroundJob[JobResults]) -> None:
    """Wait long for slots, but not for workers that have them; raises ClusterError.

    Where workers do not reach the driver, as many are there as Spark runs tasks. The tasks of a
    plain stage get their slots one by one.
    """
    settings, reaches_driver = run.settings, run.link.channel is not None
    num_there = len(attempt.last_event) if reaches_driver else job.progress.num_begun
    missing = attempt.world_size - num_there
    if missing <= 0:
        return
    silence, started = job.progress.seconds_without(), "since Spark runs their tasks"
    if not num_there:
        left = f"; restarts left after this one: {attempt.restarts_left}" if attempt.number else ""
        waited = now - attempt.submitted
        job.check_queue("worker", waited, settings.queue_timeout_seconds, left)
    if not attempt.needs_all:  # they may wait for each other's slots
        return
    if num_there and reaches_driver:
        silence, started = now - attempt.first_event, "of the first"
        if not run.slots.is_barrier:
            left = f"; {num_there} of {attempt.world_size} workers are there"
            job.check_queue("further worker", silence, settings.queue_timeout_seconds, left)
            return
    if silence > settings.start_timeout_seconds:
        first = min(set(range(attempt.world_size)) - set(attempt.last_event))
        message = (
            f"{missing} of {attempt.world_size} workers did not start within "
            f"{settings.start_timeout_seconds:g} s {started} (spark.sparkdl.startTimeout)"
        )
        attempt.failures.append(_failure(first, "Missing", message))


def _check_silence(
    attempt: Attempt, now: float, run: Launch, job: BackgroundJob[JobResults]
) -> bool:
    """Ask Spark about the tasks of silent ranks; True if the attempt has failed by one.

    A rank whose task Spark has lost does not exist until Spark has started it again, and that may
    take as long as slots do. Raises ClusterError if it takes longer.
    """
    settings = run.settings
    silent = attempt.silent(now, settings.heartbeat_timeout_seconds)
    if not silent:
        return False
    fates = job.progress.fates(
        {attempt.tasks[rank].stage_id for rank in silent if rank in attempt.tasks}
    )
    ranks: dict[Silence, list[int]] = {}
    for rank in silent:
        meaning = attempt.meaning_of_silence(rank, fates, settings.start_timeout_seconds)
        ranks.setdefault(meaning, []).append(rank)
    if hung := ranks.get("hung"):
        message = (
            f"rank {', '.join(map(str, hung))} has not been heard for "
            f"{settings.heartbeat_timeout_seconds:g} s (spark.sparkdl.heartbeatTimeout), "
            "nor used the CPU or waited for it"
        )
        attempt.failures.append(_failure(hung[0], "Hang", message))
    elif stuck := ranks.get("stuck"):
        message = (
            f"rank {', '.join(map(str, stuck))} was lost, and its new worker did not start within "
            f"{settings.start_timeout_seconds:g} s since Spark runs its task "
            "(spark.sparkdl.startTimeout)"
        )
        attempt.failures.append(_failure(stuck[0], "Missing", message))
    elif lost := ranks.get("lost"):
        if attempt.needs_all:
            message = "its worker or executor was lost"
            attempt.failures.append(_failure(lost[0], "WorkerLost", message))
        else:  # others may hold the slot that it needs
            waited = now - max(attempt.last_event.values())
            job.check_queue("worker in place of a lost one", waited, settings.queue_timeout_seconds)
    return bool(attempt.failures)


def _failure(rank: int, kind: str, message: str) -> Mapping[str, Any]:
    """Return the failure of a rank that the driver itself has noticed."""
    return {"rank": rank, "kind": "gang", "type": kind, "message": message}


def _receive(run: Launch, attempt: Attempt) -> None:
    """Take all events that have arrived; those that arrive meanwhile wait for the next call."""
    events = run.link.hub.events
    with contextlib.suppress(queue.Empty):
        for _ in range(events.qsize()):
            event = events.get_nowait()
            if event.attempt == attempt.number:
                _take(event, attempt, run)


def _take(event: Event, attempt: Attempt, run: Launch) -> None:
    if not attempt.last_event:
        attempt.first_event = event.received
    attempt.last_event[event.rank] = event.received
    kind = event.body["kind"]
    if kind == "heartbeat":
        progress = Progress.of(event.body)
        if event.rank == 0 and progress.step > attempt.start:
            attempt.steps = (progress.step, event.received)
            attempt.first_step = attempt.first_step or attempt.steps
        spent = sum(progress.seconds.get(name, 0.0) for name in ("data", "compute"))
        if spent > _MEASURED_SECONDS:
            attempt.speeds[event.rank] = progress.rows / spent
        run.view.progress(event.rank, progress)
    elif kind == "log":
        for level, line in event.body["lines"]:
            run.view.log(event.rank, line, level)
    elif kind == "epoch" and event.rank == 0:
        run.view.epoch(event.body["record"])
    elif kind == "error":
        attempt.failures.append(event.body["failure"])
        attempt.done.add(event.rank)
    elif kind == "done":
        attempt.done.add(event.rank)
    elif kind == "task":
        attempt.tasks[event.rank] = SparkTask(**event.body["task"])
        attempt.done.discard(event.rank)  # Spark does again what the one before has done
    elif kind == "missing":
        attempt.missing.update(event.body["shards"])
    elif kind == "held":
        attempt.held = event.body["shards"]
    elif kind == "checkpoint":
        attempt.saved = (event.body["step"], event.received)
    elif kind == "crash":
        attempt.crashes[event.rank] = event.body["text"]
    elif kind != "alive":  # which is all that a watcher says
        if kind == "hardware" and "gpu" not in event.body["hardware"]:
            attempt.hosts[event.rank] = event.body["hardware"]["host"]
        run.view.fact(event.rank, event.body)

"""One submission of a gang: what is known of it, and why it must start again, if it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdl import errors
from sparkdl.comm.file_chunks import JobResults
from sparkdl.comm.worker_environment import SparkTask
from sparkdl.errors import CollectiveError, CommunicationError, SparkDLError, WorkerError
from sparkdl.spark.session.background_job import Fate
from sparkdl.spark.session.failures import (
    SILENT,
    has_crashed,
    loss_reason,
    raise_unless_loss,
)

_CONSEQUENCES = (CommunicationError.__name__, CollectiveError.__name__)
"""Types of the errors that ranks report because a peer fell away."""


Silence = Literal["hung", "done", "lost", "starting", "stuck"]
"""State of a silent rank: its process stands still; it has ended, and its last report was lost;
Spark has lost its task, and not started it again; its new process has not said a word yet, or not
in time."""


@dataclass(kw_only=True)
class Attempt:
    """The state of one submission of the gang."""

    number: int
    world_size: int
    submitted: float
    restarts_left: int = 0
    """Restarts of the gang that are left after this attempt, if it makes no progress."""
    start: int = -1
    """Steps (or checkpoints) done when it begins; set by who submits it; -1: not known yet."""
    needs_all: bool = True
    """True if its workers need each other, as those of a gang do. The tasks of a round may run one
    after the other, and Spark alone runs a lost one again."""
    once_there: str = ""
    """Status that is shown when all workers are there, until they say how far they are."""
    first_event: float = 0.0
    """Time at which the first event of a worker arrived."""
    last_event: dict[int, float] = field(default_factory=dict)
    """Rank -> the time at which its last event arrived, by the driver's clock."""
    tasks: dict[int, SparkTask] = field(default_factory=dict)
    """Rank -> the task of its newest process that has said a word."""
    done: set[int] = field(default_factory=set)
    failures: list[Mapping[str, Any]] = field(default_factory=list)
    """Failures in the order of their arrival."""
    missing: set[int] = field(default_factory=set)
    """Shards that no worker could read."""
    steps: tuple[int, float] | None = None
    """The newest step that rank 0 has reported, and when; None: none yet."""
    first_step: tuple[int, float] | None = None
    """The first one, likewise."""
    saved: tuple[int, float] | None = None
    """The step (or number) of the newest checkpoint of this attempt, and when it was there."""
    hosts: dict[int, str] = field(default_factory=dict)
    """Rank -> the host on whose CPUs it computes, by the name that the rank gives it."""
    speeds: dict[int, float] = field(default_factory=dict)
    """Rows per second of each rank, by the time that it has spent on reading and computing; it
    means nothing of a GPU, which computes on while its process waits for others."""
    held: Sequence[Sequence[int]] = ()
    """The numbers of each rank's shards."""
    resized: str | None = None
    """Why it was ended to start again with more workers, or other shards; None: it was not."""
    crashes: dict[int, str] = field(default_factory=dict)
    """Rank whose process is gone -> where it has crashed, as Python's faulthandler says; empty: it
    does not say."""
    on_gpus: bool = False
    """True if workers may talk by NCCL, whose watchdog aborts ranks whose peers are lost."""
    cancelled: bool = False
    """True if we ended the job, so that Spark's error says nothing new."""
    rows: JobResults | None = None
    spark_error: Exception | None = None

    def silent(self, now: float, timeout_seconds: float) -> list[int]:
        """Ranks that have sent something once but not lately, and have not finished."""
        return sorted(
            rank
            for rank, at in self.last_event.items()
            if rank not in self.done and now - at > timeout_seconds
        )

    def meaning_of_silence(
        self, rank: int, fates: Mapping[SparkTask, Fate] | None, start_timeout_seconds: float
    ) -> Silence:
        """Return what it means that a rank sends no events.

        Args:
            rank: one of `silent`.
            fates: what Spark says of the tasks of its stage; None: nothing, and the rank counts as
                hung.
            start_timeout_seconds: how long a process may take until it says its first word.
        """
        own = self.tasks.get(rank)
        if fates is None or own is None:
            return "hung"
        fate = fates.get(own, Fate())
        if fate.runs_for is not None:
            return "hung"
        if fate.has_succeeded:
            return "done"
        again = [
            other.runs_for
            for task, other in fates.items()
            if task.partition == own.partition and task.stage_id == own.stage_id
            if other.runs_for is not None
        ]
        if not again:
            return "lost"
        return "starting" if min(again) <= start_timeout_seconds else "stuck"

    def has_reported(self, kind: type[SparkDLError]) -> bool:
        """True if a rank has failed with an error of this very type."""
        return any(failure["type"] == kind.__name__ for failure in self.failures)


def restart_reason(attempt: Attempt) -> str | None:
    """Why the gang must start again; None if it succeeded. Raises what would come again."""
    if attempt.spark_error is not None and not attempt.cancelled:
        # Workers never raise into Spark, so one was lost. What its peers reported, whatever
        # its type, is a consequence; a mistake of the user's would come again.
        raise_unless_loss(attempt.spark_error)
        _raise_if_sizes_differ(attempt)
        for rank, text in attempt.crashes.items():
            if lines := [line.strip() for line in text.splitlines() if line.strip()]:
                return f"rank {rank} has crashed: {' | '.join(lines[:6])}"
        if has_crashed(attempt.spark_error):
            for rank in attempt.crashes:  # Spark ends the others a moment later
                return f"rank {rank} was lost: {SILENT}"
        return loss_reason(attempt.spark_error)
    for failure in attempt.failures:
        if failure["kind"] == "user":
            raise _of_user(failure)
        if failure["kind"] == "sparkdl":
            raise _own_error(failure)
    if attempt.failures:
        _raise_if_calls_differ(attempt)
        # Failures of a lost rank's peers often arrive before the one that tells why.
        causes = [f for f in attempt.failures if f["type"] not in _CONSEQUENCES]
        first = (causes or attempt.failures)[0]
        return f"rank {first['rank']} failed with {first['type']}: {first['message']}"
    return None


def _raise_if_sizes_differ(attempt: Attempt) -> None:
    """Raise WorkerError if gloo aborted a rank: it does so if a peer sends more than expected."""
    for rank, text in attempt.crashes.items():
        is_abort = "Aborted" in text.partition("\n")[0] and "distributed_c10d.py" in text
        if is_abort and not attempt.on_gpus:
            raise WorkerError(
                rank,
                "Aborted",
                "gloo has aborted the process in a collective of torch.distributed, as it does if "
                "the ranks call it with tensors of different sizes or types; every rank must make "
                "the same calls in the same order",
                text,
            )


def _raise_if_calls_differ(attempt: Attempt) -> None:
    """Raise WorkerError if ranks were in a collective when all others had come to their end."""
    failed = {failure["rank"] for failure in attempt.failures}
    done = attempt.done if attempt.rows is None else set(range(attempt.world_size))
    ended = sorted(done - failed)
    is_all = len(ended) + len(failed) == attempt.world_size
    if not ended or not is_all:
        return
    if all(failure["type"] == CollectiveError.__name__ for failure in attempt.failures):
        first = attempt.failures[0]
        raise WorkerError(
            first["rank"],
            first["type"],
            f"rank {', '.join(map(str, ended))} had come to its end while this one was in a "
            "collective; every rank must make the same calls of torch.distributed in the same "
            f"order ({first['message']})",
            first["traceback"],
        )


def _of_user(failure: Mapping[str, Any]) -> WorkerError:
    return WorkerError(
        failure["rank"],
        failure["type"],
        failure["message"],
        failure["traceback"],
        failure.get("host", ""),
    )


def _own_error(failure: Mapping[str, Any]) -> SparkDLError:
    kind = getattr(errors, failure["type"], None)
    if not (isinstance(kind, type) and issubclass(kind, SparkDLError)) or kind is WorkerError:
        return _of_user(failure)
    error: SparkDLError = kind(failure["message"])
    return error

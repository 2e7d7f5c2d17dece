"""Runs and times some rounds on plain Spark stages: what they cost beyond their steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from sparkdl.data.plan import RoundPart
from sparkdl.explain.cost_model import Stages
from sparkdl.spark.rounds.averaging_rounds import Averaged
from sparkdl.spark.rounds.round_jobs import RoundJobs
from sparkdl.spark.run.run import Run
from sparkdl.spark.session.background_job import BackgroundJob
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.train.state import EpochBook

_ROUNDS = (1, 1, 1, 1, 5, 5)
"""Steps of the rounds that are timed; the very first starts processes."""
_JOBS = 3


@dataclass(frozen=True, kw_only=True)
class TimedRound:
    """One round."""

    num_steps: int
    seconds: float
    """With the merge on the driver."""
    step_seconds: float
    """Of the slowest task's steps."""
    num_bytes: int
    """Of the states of all tasks."""


def measure_rounds(run: Run, first_attempt: int) -> Stages:
    """Run some rounds of averaging as a fit does, with its errors, and jobs that do nothing.

    No other job on the run's link may have the number ``first_attempt`` or a larger one.
    """
    run = replace(run, run_id=f"{run.run_id}-rounds")
    jobs = RoundJobs(run, EpochBook(run.config, run.plan), first_attempt=first_attempt)
    replicas = Averaged(run, ParameterAveraging(), jobs)
    timed = []
    for wanted in _ROUNDS:
        num_steps = min(wanted, run.plan.steps_per_epoch)
        began = time.perf_counter()
        done = replicas.train(RoundPart(epoch=0, step_in_epoch=0, step=0, num_steps=num_steps))
        timed.append(
            TimedRound(
                num_steps=num_steps,
                seconds=time.perf_counter() - began,
                step_seconds=done.seconds,
                num_bytes=sum(done.bytes_sent.values()),
            )
        )
    return stages_of(timed, _empty_job_seconds(run))


def stages_of(timed: Sequence[TimedRound], empty_seconds: float) -> Stages:
    """The costs of a round by rounds of one step and of more; the very first of them is left out.

    Of what they take beyond their steps the least counts: the driver's JVM becomes faster by the
    round, as in a fit. The longest rounds are at the end.
    """
    first, *others = timed
    by_length: dict[int, list[float]] = {}
    for one in others:
        by_length.setdefault(one.num_steps, []).append(one.step_seconds)
    (few, short), *longer = sorted((n, statistics.median(s)) for n, s in by_length.items())
    step = short / few
    for many, long in longer:
        step = (long - short) / (many - few)
    step = max(1e-9, step)
    overhead = max(0.0, min(one.seconds - one.num_steps * step for one in others))
    carried = max(0.0, overhead - empty_seconds) / max(1, others[-1].num_bytes)
    return Stages(
        fixed_seconds=min(overhead, empty_seconds),
        byte_seconds=carried,
        step_seconds=step,
        first_seconds=max(0.0, first.seconds - first.num_steps * step - overhead),
    )


def _empty_job_seconds(run: Run) -> float:
    """A job over the shards whose tasks do nothing; the median of some."""
    found = []
    for number in range(_JOBS):
        job = BackgroundJob(
            run.spark,
            run.table.df.mapInArrow(_count, "rows long").collect,
            tag=f"sparkdl-{run.run_id}-empty-{number}",
            name=f"sparkdl {run.run_id}: a job that does nothing",
        )
        began = time.perf_counter()
        job.watched(run.settings.start_timeout_seconds)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})

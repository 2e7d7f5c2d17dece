"""Training in a gang: one long barrier stage under the supervisor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import cloudpickle

from sparkdl.errors import ShardLost
from sparkdl.report.summary import TrainingSummary
from sparkdl.spark.cluster.attempt import Attempt, Rows
from sparkdl.spark.cluster.slots import wait_again
from sparkdl.spark.cluster.supervisor import GangResult, supervise
from sparkdl.spark.run.resume import find_checkpoint
from sparkdl.spark.run.run import Run
from sparkdl.storage.checkpoint_format import decode
from sparkdl.worker import training


def train_in_gang(run: Run) -> TrainingSummary:
    """Train, and give the weights to the run's module.

    Raises:
        WorkerError: the user's code failed on a worker.
        TrainingFailed: workers were lost more than ``max_restarts`` times.
        SparkDLError: what a worker raised on purpose.
    """
    payload = cloudpickle.dumps((run.config, run.packed.skeleton))
    result = supervise(run, partial(_submit, run, payload), heal=partial(_heal, run))
    _load_final(run, result)
    return _trained(result)


def _heal(run: Run, failed: Attempt) -> None:
    """Have shards written anew whose files are gone although Spark still holds their rows."""
    if failed.has_reported(ShardLost):
        run.table.rebuild()


def _submit(run: Run, payload: bytes, attempt: int) -> Callable[[], Rows]:
    """Prepare one attempt: lost shards are rebuilt, the newest checkpoint is found."""
    link = run.link
    shards = run.plan.shards
    if attempt > 0:
        run.view.begun_again(attempt, None)
        wait_again(run.spark, run.slots, run.settings)
        shards = tuple(part.shard for part in run.table.collect())
    found = find_checkpoint(run, link.checkpoints) if link.checkpoints is not None else None
    start_step = found.step if found is not None else 0
    run.view.attempt(attempt, start_step)
    order = run.gang_order(
        training.WorkOrder,
        attempt=attempt,
        run_key=run.run_key,
        device=run.config.device,
        plan=replace(run.plan, shards=shards),
        payload=payload,
        weights=link.send(
            training.INITIAL,
            run.packed.tensors,
            what="the module's weights have",
            remedy="submit the job inside the cluster's network",
        ),
        resume_path=found.path if found is not None else None,
        source=run.table.reader,
    )
    return run.gang_job(run.table.df, training.run, order)


def _load_final(run: Run, result: GangResult) -> None:
    """Give the trained weights to the driver's module."""
    if run.link.channel is not None:
        data = run.link.files.read(training.FINAL)
    else:
        data = next(payload for _, kind, payload in result.rows if kind == "weights")
    run.module.load_state_dict(decode(data, training.FINAL))


def _trained(result: GangResult) -> TrainingSummary:
    reports = {rank: json.loads(payload) for rank, kind, payload in result.rows if kind == "result"}
    first = reports[0]
    return TrainingSummary(
        history=first["history"],
        steps=first["steps"],
        restarts=result.restarts,
        phase_seconds={f"rank 0: {name}": spent for name, spent in first["seconds"].items()},
        throughput_by_rank=[reports[rank]["rows_per_second"] for rank in sorted(reports)],
        bytes_sent_by_rank=[reports[rank]["bytes_sent"] for rank in sorted(reports)],
    )

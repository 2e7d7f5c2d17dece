"""How does a run train in a gang? One long barrier stage under the supervisor."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import cloudpickle

from sparkdl.errors import ClusterError, ShardLost
from sparkdl.runtime.versions import versions
from sparkdl.spark.cluster.cluster_info import wait_for_slots
from sparkdl.spark.cluster.gang import launch
from sparkdl.spark.cluster.supervisor import Attempt, GangResult, Limits, Rows, supervise
from sparkdl.spark.run.resume import find_checkpoint
from sparkdl.spark.run.run import Run, Trained
from sparkdl.storage.checkpoint_format import decode
from sparkdl.worker import training

logger = logging.getLogger(__name__)

_MAX_INLINE_BYTES = 16 * 2**20
"""Largest initial weights that travel in the task itself when there is no other way."""


def train_in_gang(run: Run) -> Trained:
    """Train, and give the weights to the run's module.

    Raises:
        WorkerError: the user's code failed on a worker.
        TrainingFailed: workers were lost more than ``max_restarts`` times.
        SparkDLError: what a worker raised on purpose.
    """
    settings = run.settings
    payload = cloudpickle.dumps((run.config, run.packed.skeleton))
    result = supervise(
        run.spark,
        partial(_submit, run, payload),
        world_size=run.slots.num_workers,
        hub=run.link.hub,
        limits=Limits(
            max_restarts=run.max_restarts,
            heartbeat_timeout_seconds=settings.heartbeat_timeout_seconds,
            start_timeout_seconds=settings.start_timeout_seconds,
            queue_timeout_seconds=settings.queue_timeout_seconds,
        ),
        view=run.view,
        run_id=run.run_id,
        is_watched=run.link.channel is not None,
        heal=partial(_heal, run),
        recorder=run.recorder,
    )
    _load_final(run, result)
    return _trained(result)


def _heal(run: Run, failed: Attempt) -> None:
    """Have shards written anew whose files are gone although Spark still holds their rows."""
    if failed.has_reported(ShardLost):
        run.table.rebuild()


def _submit(run: Run, payload: bytes, attempt: int) -> Callable[[], Rows]:
    """Prepare one attempt: lost shards are rebuilt, the newest checkpoint is found."""
    slots, link, settings = run.slots, run.link, run.settings
    shards = run.plan.shards
    if attempt > 0:
        run.recorder.begun_again(attempt, None)
        link.hub.clear(f"{run.run_id}/{attempt - 1}/")
        wait_for_slots(run.spark, slots.num_workers, slots.profile, settings)
        shards = tuple(part.shard for part in run.table.collect())
    found = find_checkpoint(run, link.checkpoints) if link.checkpoints is not None else None
    start_step = found.step if found is not None else 0
    run.view.attempt(attempt, start_step)
    order = training.WorkOrder(
        run_id=run.run_id,
        run_key=run.run_key,
        attempt=attempt,
        device=run.config.device,
        plan=replace(run.plan, shards=shards),
        payload=payload,
        weights=_weights_in_task(run),
        storage_url=link.url,
        relays=link.relays,
        driver_hosts_channel=link.channel is not None,
        resume_path=found.path if found is not None else None,
        threads=slots.threads,
        versions=versions(),
        start_timeout_seconds=settings.start_timeout_seconds,
        collective_timeout_seconds=settings.collective_timeout_seconds,
        source=run.table.reader,
    )
    return partial(
        launch, run.table.df, training.run, order, channel=link.channel, profile=slots.profile
    )


def _weights_in_task(run: Run) -> bytes | None:
    """Initial weights travel over the channel; without it, in the task itself."""
    link, tensors = run.link, run.packed.tensors
    if link.channel is not None:
        if not link.files.exists(training.INITIAL):
            link.files.write(training.INITIAL, tensors)
        return None
    if len(tensors) > _MAX_INLINE_BYTES:
        raise ClusterError(
            f"the module has {len(tensors) >> 20} MiB of weights; from a driver that executors "
            f"cannot reach at most {_MAX_INLINE_BYTES >> 20} MiB can be sent; submit the job "
            "inside the cluster's network"
        )
    return tensors


def _load_final(run: Run, result: GangResult) -> None:
    """Give the trained weights to the driver's module."""
    if run.link.channel is not None:
        data = run.link.files.read(training.FINAL)
    else:
        data = next(payload for _, kind, payload in result.rows if kind == "weights")
    run.module.load_state_dict(decode(data, training.FINAL))


def _trained(result: GangResult) -> Trained:
    reports = {rank: json.loads(payload) for rank, kind, payload in result.rows if kind == "result"}
    first = reports[0]
    return Trained(
        history=first["history"],
        steps=first["steps"],
        restarts=result.restarts,
        seconds={f"rank 0: {name}": seconds for name, seconds in first["seconds"].items()},
        throughput_by_rank=[reports[rank]["rows_per_second"] for rank in sorted(reports)],
        bytes_sent_by_rank=[reports[rank]["bytes_sent"] for rank in sorted(reports)],
    )

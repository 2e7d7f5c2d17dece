"""How does a DataFrame become a trained module? The whole of ``fit``, in order.

Checks that need no job come first, then those that need a small one, then the spool, then what
only the data can tell, then the gang. Whatever happens, nothing is left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
from pyspark.sql import DataFrame, SparkSession

from sparkdl import sync, worker
from sparkdl.checkpoint.format import decode, latest
from sparkdl.config import TrainConfig
from sparkdl.describe import describe
from sparkdl.environment import versions
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.packing import PackedModule, pack
from sparkdl.plan import Column, TrainPlan, make_plan
from sparkdl.progress import ProgressView, SilentView, View
from sparkdl.spark.checks import (
    check_labels,
    check_travels,
    dry_run,
    make_module,
    prepare_columns,
    shaped,
)
from sparkdl.spark.gang import launch
from sparkdl.spark.link import Link, open_link
from sparkdl.spark.preflight import (
    check_memory,
    choose_num_workers,
    inspect_cluster,
    make_profile,
    require_gang_support,
    threads_per_worker,
    wait_for_slots,
)
from sparkdl.spark.request import FitRequest, FitResult
from sparkdl.spark.session import conf
from sparkdl.spark.settings import Settings, read_settings
from sparkdl.spark.shards import ShardTable, SpooledShard, content_of
from sparkdl.spark.supervise import GangResult, Limits, Rows, persistently, supervise
from sparkdl.summary import TrainingSummary

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from torch import nn

__all__ = ["FitRequest", "FitResult", "fit"]

logger = logging.getLogger(__name__)

_SKEW = 1.5
"""Largest worker's rows over the mean from which on the user is told."""
_MAX_INLINE_BYTES = 16 * 2**20
"""Largest initial weights that travel in the task itself when there is no other way."""


@dataclass(frozen=True, kw_only=True)
class _Gang:
    """What the cluster part of the preflight decided."""

    num_workers: int
    threads: int
    profile: ResourceProfile | None


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run's fixed values once the data is known."""

    run_id: str
    run_key: str
    plan: TrainPlan
    payload: bytes
    packed: PackedModule


def fit(df: DataFrame, request: FitRequest) -> FitResult:
    """Train on all workers of the cluster.

    Raises:
        ConfigError: a parameter is wrong, or the module cannot take the features.
        DataError: the DataFrame cannot be trained on.
        ClusterError: the cluster cannot run the gang.
        StorageError: checkpoints cannot be kept.
        WorkerError: the user's code failed on a worker.
        TrainingFailed: workers were lost more than ``max_restarts`` times.
    """
    clock = Clock()
    spark = df.sparkSession
    run_id = uuid.uuid4().hex[:12]
    settings = read_settings(partial(conf, spark))
    check_travels(request.config)
    module, float_dtype = make_module(request)
    prepared, validation = prepare_columns(df, request, float_dtype)
    gang = _plan_gang(spark, request, settings)
    sync.resolve(request.config.sync_strategy).check(request.config, gang.num_workers)
    with contextlib.ExitStack() as stack:
        link = open_link(
            spark,
            checkpoint_dir=request.config.checkpoint.directory,
            num_workers=gang.num_workers,
            profile=gang.profile,
            settings=settings,
            run_id=run_id,
            stack=stack,
        )
        clock.lap("preflight")
        table = ShardTable(
            df,
            prepared,
            validation,
            num_shards=gang.num_workers,
            run_id=run_id,
            profile=gang.profile,
        )
        stack.callback(table.close)
        spooled = persistently(
            table.collect,
            max_restarts=request.max_restarts,
            prepare=partial(wait_for_slots, spark, gang.num_workers, gang.profile, settings),
        )
        clock.lap("spool")
        columns = shaped(table, spooled, request)
        num_classes = dry_run(module, columns, request)
        if num_classes is not None and request.label_col is not None:
            index = len(request.feature_cols)
            check_labels(df, request.label_col, num_classes, index, spooled)
        plan = _make_plan(columns, spooled, gang, request)
        _check_memory(spark, module, plan, gang)
        run = _fix_run(run_id, module, plan, request, content_of(spooled))
        view: View = ProgressView(plan) if request.verbose else SilentView()
        stack.callback(view.close)
        result = supervise(
            spark,
            partial(_submit, spark, table, run, gang, link, settings, view),
            world_size=gang.num_workers,
            hub=link.hub,
            limits=Limits(
                max_restarts=request.max_restarts,
                heartbeat_timeout_seconds=settings.heartbeat_timeout_seconds,
                start_timeout_seconds=settings.start_timeout_seconds,
                queue_timeout_seconds=settings.queue_timeout_seconds,
            ),
            view=view,
            run_id=run_id,
            is_watched=link.channel is not None,
        )
        clock.lap("train")
        _load_final(module, result, link)
        summary = partial(_summary, result, plan, clock)
        view.done(summary().steps)
    clock.lap("clean up")
    return FitResult(
        module=module.eval(),
        columns=tuple(column for column in columns if column.role == "feature"),
        num_classes=num_classes,
        summary=summary(),
    )


def _plan_gang(spark: SparkSession, request: FitRequest, settings: Settings) -> _Gang:
    info = inspect_cluster(spark)
    require_gang_support(info, partial(conf, spark), settings)
    profile = make_profile(spark, info, request.cpus_per_worker, request.gpus_per_worker)
    num_workers = choose_num_workers(
        info,
        request.num_workers,
        cpus_per_worker=request.cpus_per_worker,
        gpus_per_worker=request.gpus_per_worker,
    )
    wait_for_slots(spark, num_workers, profile, settings)
    threads = threads_per_worker(info, num_workers, request.cpus_per_worker)
    return _Gang(num_workers=num_workers, threads=threads, profile=profile)


# --- the gang ---------------------------------------------------------------------------------


def _make_plan(
    columns: Sequence[Column], spooled: Sequence[SpooledShard], gang: _Gang, request: FitRequest
) -> TrainPlan:
    config = request.config
    plan = make_plan(
        columns=columns,
        shards=[part.shard for part in spooled],
        world_size=gang.num_workers,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )
    logger.info(
        "%d rows for training, %d for validation; %d worker(s) of %d thread(s); batches of up to "
        "%d rows per worker, %d for all; %d steps per epoch, %d in all",
        plan.num_rows,
        plan.num_validation_rows,
        plan.world_size,
        gang.threads,
        plan.batch_size,
        plan.batch_size * plan.world_size,
        plan.steps_per_epoch,
        plan.total_steps,
    )
    largest = max(plan.rows_of(rank) for rank in range(plan.world_size))
    if largest * plan.world_size > _SKEW * plan.num_rows and largest > plan.batch_size:
        logger.warning(
            "the largest worker has %d of the %d rows, because equal rows stay together: the "
            "result is exact, but the other workers wait for it; use fewer workers, or fewer equal "
            "rows",
            largest,
            plan.num_rows,
        )
    return plan


def _check_memory(spark: SparkSession, module: nn.Module, plan: TrainPlan, gang: _Gang) -> None:
    tensors = [*module.parameters(), *module.buffers()]
    replica = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    check_memory(
        inspect_cluster(spark),
        partial(conf, spark),
        replica_bytes=replica,
        # gradients, two moments as Adam keeps them, and a checkpoint's copy of it all
        state_bytes=trained + 2 * trained + replica + 2 * trained,
        spool_bytes=max(shard.num_bytes for shard in plan.shards),
        num_workers=gang.num_workers,
    )


def _fix_run(
    run_id: str, module: nn.Module, plan: TrainPlan, request: FitRequest, content: str
) -> _Run:
    packed = pack(module)
    return _Run(
        run_id=run_id,
        run_key=run_key(module, plan, request.config, content),
        plan=plan,
        payload=cloudpickle.dumps((request.config, packed.skeleton)),
        packed=packed,
    )


def run_key(module: nn.Module, plan: TrainPlan, config: TrainConfig, content: str) -> str:
    """Name of a run's checkpoints: equal for equal data, module and configuration.

    What only says how long to train (epochs, steps), or how to watch it, is left out, so that a
    finished run can be continued; so is the number of workers.
    """
    parameters = [(n, list(t.shape), str(t.dtype)) for n, t in module.state_dict().items()]
    columns = [(c.name, c.role, c.dtype, list(c.shape)) for c in plan.columns]
    options = {
        name: _named(getattr(config, name))
        for name in config.__dataclass_fields__
        if name not in ("epochs", "max_steps", "checkpoint", "callbacks", "device")
    }
    text = json.dumps([parameters, columns, options, content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _named(value: Any) -> Any:
    """A value as JSON; what cannot be described goes by the name of its type."""
    if isinstance(value, Mapping):
        return {str(key): _named(item) for key, item in value.items()}
    try:
        return describe(value)
    except ConfigError:
        return (
            f"{type(value).__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        )


def _submit(
    spark: SparkSession,
    table: ShardTable,
    run: _Run,
    gang: _Gang,
    link: Link,
    settings: Settings,
    view: View,
    attempt: int,
) -> Callable[[], Rows]:
    """Prepare one attempt: lost shards are rebuilt, the newest checkpoint is found."""
    shards = run.plan.shards
    if attempt > 0:
        link.hub.clear(f"{run.run_id}/{attempt - 1}/")
        wait_for_slots(spark, gang.num_workers, gang.profile, settings)
        shards = tuple(part.shard for part in table.collect())
    found = None
    if link.checkpoints is not None:
        found = latest(link.checkpoints, run.run_key)
    start_step = found.step if found is not None else 0
    if found is not None:
        logger.info("going on from the checkpoint of step %d (%s)", start_step, found.path)
    view.attempt(attempt, start_step)
    order = worker.WorkOrder(
        run_id=run.run_id,
        run_key=run.run_key,
        attempt=attempt,
        plan=replace(run.plan, shards=shards),
        payload=run.payload,
        weights=_weights_in_task(run, link),
        storage_url=link.url,
        driver_hosts_channel=link.channel is not None,
        resume_path=found.path if found is not None else None,
        threads=gang.threads,
        versions=versions(),
        start_timeout_seconds=settings.start_timeout_seconds,
        collective_timeout_seconds=settings.collective_timeout_seconds,
    )
    return partial(launch, table.df, worker.run, order, channel=link.channel, profile=gang.profile)


def _weights_in_task(run: _Run, link: Link) -> bytes | None:
    """Initial weights travel over the channel; without it, in the task itself."""
    if link.channel is not None:
        if not link.files.exists(worker.INITIAL):
            link.files.write(worker.INITIAL, run.packed.tensors)
        return None
    if len(run.packed.tensors) > _MAX_INLINE_BYTES:
        raise ClusterError(
            f"the module has {len(run.packed.tensors) >> 20} MiB of weights; from a driver that "
            f"executors cannot reach at most {_MAX_INLINE_BYTES >> 20} MiB can be sent; submit "
            "the job inside the cluster's network"
        )
    return run.packed.tensors


def _load_final(module: nn.Module, result: GangResult, link: Link) -> None:
    """Give the trained weights to the driver's module."""
    if link.channel is not None:
        data = link.files.read(worker.FINAL)
    else:
        data = next(payload for _, kind, payload in result.rows if kind == "weights")
    module.load_state_dict(decode(data, worker.FINAL))


def _summary(result: GangResult, plan: TrainPlan, clock: Clock) -> TrainingSummary:
    reports = {rank: json.loads(payload) for rank, kind, payload in result.rows if kind == "result"}
    first = reports[0]
    phases = {f"fit: {name}": seconds for name, seconds in clock.laps.items()}
    phases.update({f"rank 0: {name}": seconds for name, seconds in first["seconds"].items()})
    return TrainingSummary(
        history=first["history"],
        phase_seconds=phases,
        restarts=result.restarts,
        rows=plan.num_rows,
        validation_rows=plan.num_validation_rows,
        steps=first["steps"],
        world_size=plan.world_size,
        throughput_by_rank=[reports[rank]["rows_per_second"] for rank in sorted(reports)],
        bytes_sent_by_rank=[reports[rank]["bytes_sent"] for rank in sorted(reports)],
        seconds=clock.total(),
    )


class Clock:
    """Seconds of each phase of a fit on the driver, in order."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End a phase."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds since the start."""
        return self._last - self._start

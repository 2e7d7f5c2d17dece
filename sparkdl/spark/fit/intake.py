"""What is checked and decided of a fit before it runs anything? The same for ``explain``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from pyspark.sql import DataFrame, SparkSession

from sparkdl import sync
from sparkdl.data.source import Source
from sparkdl.errors import ConfigError
from sparkdl.spark.cluster.cluster_info import check_memory, inspect_cluster, require_plain_files
from sparkdl.spark.cluster.slots import Slots, plan_gang, plan_rounds
from sparkdl.spark.fit.checks import (
    check_source,
    check_sync_batch_norm,
    check_training,
    check_travels,
    make_module,
    prepare_columns,
)
from sparkdl.spark.frames.source_table import active_session, empty_frame, require_source
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.compat import conf
from sparkdl.spark.session.settings import Settings, read_settings
from sparkdl.sync.frozen_layers import freeze
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.callbacks import make_stopper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column as SparkColumn
    from torch import nn

    from sparkdl.data.plan import TrainPlan
    from sparkdl.spark.frames.columns import Prepared


MODES = ("auto", "gang", "rounds")


def choose_mode(requested: str, strategy: SyncStrategy) -> Literal["gang", "rounds"]:
    """What the user asked for; ``auto`` leaves it to the strategy.

    Raises:
        ConfigError: there is no such mode, or the strategy cannot run in it.
    """
    if requested not in MODES:
        raise ConfigError(f"executionMode must be one of {MODES}; received {requested!r}")
    if requested == "gang":
        if (obstacle := strategy.why_not_gang()) is not None:
            raise ConfigError(
                f"{type(strategy).__name__} cannot run with executionMode='gang': {obstacle}; use "
                "executionMode='rounds'"
            )
        return "gang"
    obstacle = strategy.why_not_rounds()
    if requested == "auto":
        return "rounds" if strategy.prefers_rounds and obstacle is None else "gang"
    if obstacle is not None:
        raise ConfigError(
            f"{type(strategy).__name__} cannot run with executionMode='rounds': {obstacle}; use "
            "executionMode='gang'"
        )
    return "rounds"


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Intake:
    """What a fit has decided before its first job."""

    spark: SparkSession
    settings: Settings
    source: Source | None
    """None: the rows are those of a DataFrame."""
    df: DataFrame
    """The rows; of a source one without rows that has its columns."""
    strategy: SyncStrategy
    in_rounds: bool
    module: nn.Module
    """Of our own, on the CPU; what does not train is frozen."""
    frozen: Sequence[str]
    """What `freeze` has frozen, for `thaw`."""
    prepared: Sequence[Prepared]
    validation: SparkColumn | None
    slots: Slots


def take_in(data: DataFrame | Source, request: FitRequest) -> Intake:
    """Check all that needs no job, and wait for the cluster's slots.

    Args:
        data: the rows, or a source that workers read by themselves.
        request: what the estimator asks for.

    Raises:
        ConfigError: a parameter is wrong.
        DataError: a column is missing, or of a type of which no tensor can be made.
        ClusterError: the cluster cannot run as many workers.
        StorageError: the initial weights or the source cannot be read.
    """
    # DataFrames first: they have an attribute for each column, whatever its name.
    source = None if isinstance(data, DataFrame) else require_source(data)
    spark = data.sparkSession if isinstance(data, DataFrame) else active_session()
    settings = read_settings(partial(conf, spark))
    if source is None:
        require_plain_files(partial(conf, spark), settings)
    check_travels(request.config, inputs=request.specified, labels=request.labels)
    strategy = sync.resolve(request.config.sync_strategy)
    in_rounds = choose_mode(request.execution_mode, strategy) == "rounds"
    module, float_dtype = make_module(request)
    frozen = freeze(module, request.config.frozen_layers)
    check_training(module, request)
    if source is None:  # others say only with their rows whether some are for validation
        make_stopper(request.config, has_validation=request.validation_col is not None)
    else:
        check_source(source, request, strategy)
    df = data if isinstance(data, DataFrame) else empty_frame(spark, data)
    prepared, validation = prepare_columns(df, request, float_dtype)
    plan_slots = plan_rounds if in_rounds else plan_gang
    slots = plan_slots(
        spark,
        settings,
        num_workers=request.num_workers,
        cpus_per_worker=request.cpus_per_worker,
        gpus_per_worker=request.gpus_per_worker,
    )
    if request.num_workers is None:
        logger.info(
            "numWorkers is not set: training with %d, by the cluster's executors or GPUs",
            slots.num_workers,
        )
    strategy.check(request.config, slots.num_workers)
    check_sync_batch_norm(module, request.config, slots.num_workers)
    return Intake(
        spark=spark,
        settings=settings,
        source=source,
        df=df,
        strategy=strategy,
        in_rounds=in_rounds,
        module=module,
        frozen=frozen,
        prepared=prepared,
        validation=validation,
        slots=slots,
    )


def replica_bytes(module: nn.Module) -> int:
    """Parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_plan_memory(
    spark: SparkSession, module: nn.Module, plan: TrainPlan, slots: Slots
) -> None:
    """Refuse a plan whose replicas cannot fit into the executors' containers.

    Raises:
        ClusterError: with the setting to raise.
    """
    replica = replica_bytes(module)
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    check_memory(
        inspect_cluster(spark),
        partial(conf, spark),
        replica_bytes=replica,
        # gradients, two moments as Adam keeps them, and a checkpoint's copy of it all
        state_bytes=trained + 2 * trained + replica + 2 * trained,
        spool_bytes=max(shard.num_bytes for shard in plan.shards),
        num_workers=slots.num_workers,
    )

"""The checks of a fit before its first job, and what they decide. ``explain`` makes the same."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession

from sparkdl import sync
from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column, Shard, SpoolColumn, TrainPlan, make_plan
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.inputs import Named
from sparkdl.runtime.process import borrowed_generator
from sparkdl.serialization.identity import identity
from sparkdl.serialization.initial_weights import InitialWeights, load_initial_weights
from sparkdl.serialization.program.imported_values import (
    ProgramValues,
    imported_values,
    program_code,
)
from sparkdl.serialization.program.program_state import program_kept
from sparkdl.serialization.saved_module import why_not_saved
from sparkdl.serialization.travel.packed_module import travelled
from sparkdl.serialization.travel.pickling import sent_along
from sparkdl.serialization.travel.shared_values import SharedValue
from sparkdl.spark.cluster.cluster_info import parse_bytes
from sparkdl.spark.cluster.probe import Needs
from sparkdl.spark.cluster.slots import Slots, plan_slots
from sparkdl.spark.fit.begin_module import HALF, begin_module
from sparkdl.spark.fit.check_mesh import check_mesh, check_worker_memory
from sparkdl.spark.fit.check_training import (
    check_lightning,
    check_max_norm,
    check_memory_of_weights,
    check_sparse_gradients,
    check_sync_batch_norm,
    check_training,
)
from sparkdl.spark.fit.check_travels import (
    check_autocast,
    check_global_hooks,
    check_travels,
    foreign_names,
)
from sparkdl.spark.frames.columns import drawn, refuse_outputs, schema_of, validation_indicator
from sparkdl.spark.frames.kept_frames import KeepChoice, check_cache_dir, choose_keep
from sparkdl.spark.frames.own_partitions import (
    ShardChoice,
    choose_shards,
    frame_facts,
    require_partitions,
)
from sparkdl.spark.frames.prepare_columns import prepare, prepare_labels
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.unstable_rows import unstable_operator
from sparkdl.spark.frames.user_data import UserData
from sparkdl.spark.rounds.driver_memory import check_driver_memory, round_state_bytes
from sparkdl.spark.run.placement import is_fixed
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session import compat
from sparkdl.spark.session.settings import Settings, session_settings
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.frozen_layers import freeze
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.population.population import PopulationStrategy
from sparkdl.sync.strategy import SyncStrategy

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.serialization.recorded.recipe import RecordedWeights
    from sparkdl.train.objective.loss import LossFunction
    from sparkdl.train.training_state import TrainingMethod, TrainingState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckedValues:
    """The values that follow from the Params alone."""

    request: FitRequest
    """As it was asked for; ``config.sync_strategy`` is an object."""
    mode: Literal["gang", "rounds"]
    module: nn.Module
    """A module of our own, on the CPU; what does not train is frozen."""
    weights: RecordedWeights | None
    """Values of its parameters if these are on the meta device; None: they have their values."""
    float_dtype: str
    """The dtype of floating features."""
    frozen: Sequence[str]
    """Names of the parameters that `freeze` has frozen, for `thaw`."""
    objective: LossFunction
    """The loss that the run minimizes; built once on the driver."""
    has_logs: bool
    """True if the module may log values for the history."""
    shared: tuple[SharedValue, ...] = ()
    """The objects that the module and what else is in the configuration had in common."""

    @property
    def config(self) -> TrainConfig:
        """The configuration by which every worker trains."""
        return self.request.config

    @property
    def strategy(self) -> SyncStrategy:
        """The rule by which replicas are brought to agree."""
        strategy: SyncStrategy = self.config.sync_strategy
        return strategy


@dataclass(frozen=True, kw_only=True)
class CheckedRequest(CheckedValues):
    """The decisions of a fit before its first job."""

    data: UserData
    settings: Settings
    columns: tuple[SpoolColumn, ...]
    """Features, labels and weight, in this order."""
    validation: SparkColumn | None
    """Says which rows are for validation; None: none."""
    slots: Slots
    method: TrainingMethod | None
    """Settings of the training; None if no other fit goes on from this one, or this from one."""
    begins_from: TrainingState | None
    """State that an earlier fit has left; None: training begins."""
    shard_choice: ShardChoice
    """Choice of the rows that make a shard of a fit."""
    keep_choice: KeepChoice | None = None
    """Choice to keep a fit's spool or not; None: nobody asks for it."""

    @property
    def needs(self) -> Needs:
        """The things that executors must have."""
        travels = (vars(self.config), self.request.specified, self.request.labels, self.module)
        sent = sent_along(travels)
        code = [one for one, _ in sent.code]
        return Needs(
            names=foreign_names(sent),
            values=imported_values(code),
            code=ProgramValues(code=program_code(code)),
            operators=sent.operators,
            cuda=self.config.device == "cuda",
        )

    @property
    def spark(self) -> SparkSession:
        """The session of the data."""
        return self.data.spark

    @property
    def begins_from_text(self) -> str:
        """Part of the checkpoints' key that sets a fit that goes on apart from others."""
        if self.begins_from is None:
            return ""
        text = json.dumps(identity(self.begins_from.shared()))
        return f"-after-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def in_rounds(self) -> bool:
        """True if tasks of rounds train, False if a gang does."""
        return not self.slots.is_gang

    @property
    def fixed_shards(self) -> int | None:
        """Parts of the rows that do not follow from the number of workers; None: they do."""
        return self.request.num_shards or self.slots.max_workers

    @property
    def num_shards(self) -> int:
        """Parts of the rows."""
        return self.fixed_shards or self.num_readers

    @property
    def num_readers(self) -> int:
        """Workers that train on different rows."""
        mesh = self.config.parallelism
        return self.slots.num_workers if mesh is None else int(mesh.num_readers)

    @property
    def shards_per_worker(self) -> int:
        """Shards of a worker, at most."""
        return -(-self.num_shards // self.num_readers)

    @property
    def table_spec(self) -> TableSpec:
        """The description of the shards that the run shall have."""
        return TableSpec(
            columns=self.columns,
            num_shards=self.num_shards,
            num_places=self.num_readers,
            validation=self.validation,
            validation_col=self.request.validation_col,
            seed=0 if self.data.source is None else self.config.seed,
            # Where workers come and go shards move to them, and no stage may need all slots.
            at_once=self.slots.is_gang and is_fixed(self.slots, self.num_readers),
            is_barrier=self.slots.is_barrier,
            profile=self.slots.profile,
            heartbeat_timeout_seconds=self.settings.heartbeat_timeout_seconds,
            queue_timeout_seconds=self.settings.queue_timeout_seconds,
        )

    @property
    def fit_spec(self) -> TableSpec:
        """The same of a fit, whose shards may be the DataFrame's own partitions."""
        choice, keep = self.shard_choice, self.keep_choice
        spec = self.table_spec if keep is None else replace(self.table_spec, keep=keep.keep)
        if choice.pieces is None:
            return spec
        return replace(
            spec,
            num_shards=choice.num_places * choice.pieces,
            num_places=choice.num_places,
            pieces=choice.pieces,
            at_once=False,
        )

    def make_plan(self, columns: Sequence[Column], shards: Sequence[Shard]) -> TrainPlan:
        """The plan of a run over these shards, without windows."""
        plan = make_plan(
            columns=columns,
            shards=shards,
            world_size=self.num_readers,
            batch_size=self.config.batch_size,
            epochs=self.config.epochs,
            max_steps=self.config.max_steps,
            first_epoch=0 if self.begins_from is None else self.begins_from.epoch,
            first_step=0 if self.begins_from is None else self.begins_from.step,
            num_parts=None if self.shard_choice.pieces is None else self.num_shards,
        )
        self.data.check_plan(plan, self.strategy)
        return self.strategy.hold_out(plan)


def check_request(data: UserData, request: FitRequest) -> CheckedRequest:
    """Check all that needs no job, and wait for the cluster's slots.

    Raises:
        ConfigError: a parameter is wrong.
        DataError: a column is missing, or of a type of which no tensor can be made.
        ClusterError: the cluster cannot run as many workers, or the driver cannot hold the states
            of rounds.
        StorageError: the initial weights or the source cannot be read.
    """
    compat.run_workers_here(data.spark)
    settings = session_settings(data.spark)
    data.check_files(settings)
    check_travels({"source": data.source})
    values = check_values(request)
    request, module, config, strategy = (
        values.request,
        values.module,
        values.config,
        values.strategy,
    )
    method, begins_from = check_initial_state(module, request, values.mode)
    data.check_inputs((*request.specified, *request.labels))
    data.check_training(config, request.validation, has_logs=values.has_logs)
    refuse_outputs(schema_of(data.frame), request.output_cols, f"the model of {request.name}")
    columns, validation = prepare_columns(data.frame, request, values.float_dtype)
    check_range(request, strategy, values.mode)
    mesh = config.parallelism
    slots = plan_slots(
        data.spark,
        settings,
        num_workers=request.num_workers if mesh is None else mesh.size,
        cpus_per_worker=request.cpus_per_worker,
        gpus_per_worker=request.gpus_per_worker,
        is_gang=values.mode == "gang",
        most_workers=request.num_shards if mesh is None else None,
        min_workers=request.min_workers,
        mesh=mesh,
    )
    most = slots.total or slots.num_workers
    check_worker_memory(module, config, slots.cluster, partial(compat.conf, data.spark), most)
    if config.elasticity == "bits":  # those that a gang of any size has
        slots = replace(slots, threads=request.cpus_per_worker or slots.cluster.task_threads)
    if request.num_workers is None and mesh is None and "numWorkers" not in request.automatic:
        some_have_several = slots.num_workers < (request.num_shards or 0)
        logger.log(
            logging.WARNING if some_have_several else logging.INFO,
            "numWorkers is not set: training with %d, by the cluster's executors or GPUs%s",
            slots.num_workers,
            f", on {request.num_shards} shards" if some_have_several else "",
        )
    strategy.check(config, slots.num_workers if mesh is None else mesh.num_replicas)
    readers = (slots.max_workers or slots.num_workers) if mesh is None else mesh.num_readers
    check_shards(request.num_shards, strategy, readers)
    if not slots.is_gang:
        keeps_optimizer, num_members = True, slots.num_workers
        if isinstance(strategy, AveragingStrategy):
            keeps_optimizer, num_members = strategy.optimizer_state == "average", 1
        check_driver_memory(
            partial(compat.conf, data.spark),
            state_bytes=round_state_bytes(module, config, keeps_optimizer=keeps_optimizer),
            num_members=num_members,
            heap_bytes=compat.driver_heap_bytes(data.spark),
            is_local=compat.shares_console(data.spark),
        )
    check_sync_batch_norm(module, config, slots.num_workers, values.mode)
    if readers > 1 and not strategy.trains_apart:
        check_max_norm(module)
    checked = CheckedRequest(
        **vars(values),
        data=data,
        settings=settings,
        columns=tuple(columns),
        validation=validation,
        slots=slots,
        method=method,
        begins_from=begins_from,
        shard_choice=ShardChoice(reason="the default"),
    )
    unstable = None if data.source is not None else unstable_operator(data.frame)
    if unstable is not None and not slots.cluster.is_one_process:
        logger.warning(
            "if an executor is lost these rows cannot be made again, since the DataFrame has %s; "
            "write them to Parquet before, or order them by a key",
            unstable,
        )
    checked = replace(checked, shard_choice=_choose_shards(checked))
    return replace(checked, keep_choice=_choose_keep(checked))


def _choose_shards(checked: CheckedRequest) -> ShardChoice:
    """Choose which rows make a shard; ConfigError if partitions cannot, whatever they are."""
    asked, name = checked.request.shards, type(checked.strategy).__name__
    obstacle = None
    if checked.data.source is not None:
        obstacle = f"{type(checked.data.source).__name__} cuts its shards itself"
    elif checked.in_rounds:
        obstacle = "in rounds each shard trains a replica, which needs equally many rows"
    elif not checked.strategy.is_elastic:
        obstacle = f"what {name} learns depends on which worker has which rows"
    require_partitions(asked, obstacle)
    if asked == "rows" or obstacle is not None:
        return ShardChoice(reason=obstacle or "dealt by their hash, as shards='rows' asks")
    slots = checked.slots
    parts = [max(1, column.kind.num_parts + 1) for column in checked.columns]
    choice = choose_shards(
        asked,
        frame_facts(checked.data.frame),
        num_parts=checked.num_shards,
        num_executors=_most_executors(checked),
        num_workers=slots.max_workers or checked.num_readers,
        num_files=sum(parts) * (1 if checked.validation is None else 2),
    )
    is_refused = asked == "partitions" and choice.pieces is None
    level = logging.WARNING if is_refused else logging.INFO
    logger.log(level, "shards are made of %s", choice)
    return choice


def _most_executors(checked: CheckedRequest) -> float:
    """Return how many executors may spool, as far as Spark tells; 0: it does not."""
    cluster = checked.slots.cluster
    if not cluster.dynamic_allocation:
        return cluster.num_executors or 0
    most = compat.conf(checked.spark, "spark.dynamicAllocation.maxExecutors")
    return float(most or math.inf)  # its tasks have Spark start them


def _choose_keep(checked: CheckedRequest) -> KeepChoice | None:
    """Choose if the spool is kept, where that is asked for; raises ConfigError if it cannot be."""
    directory, source = checked.request.cache_dir, checked.data.source
    if directory is None:
        return None
    if source is not None:
        raise ConfigError(
            f"cacheDir keeps the spool of a DataFrame, and {type(source).__name__} has none; leave "
            "it unset"
        )
    limit = checked.settings.cache_bytes
    try:
        limit_bytes = None if limit is None else parse_bytes(limit, unit=1)
    except ClusterError as error:
        raise ConfigError(f"spark.sparkdl.cacheBytes: {error}") from error
    choice = choose_keep(checked.data.frame, checked.fit_spec, directory, limit_bytes)
    level = logging.WARNING if choice.keep is None else logging.INFO
    logger.log(level, "the spool is %s", choice)
    return choice


def check_range(request: FitRequest, strategy: SyncStrategy, mode: str) -> None:
    """Refuse a range of workers that cannot be had, or that changes the result; ConfigError."""
    fewest, most = request.min_workers, request.num_workers
    if fewest is None:
        return
    if most is not None and fewest > most:
        raise ConfigError(f"minWorkers={fewest} is more than numWorkers={most}; lower it")
    if mode == "rounds":
        raise ConfigError(
            "minWorkers is of a gang: rounds train their shards with however many slots there "
            "are; leave it unset"
        )
    if not strategy.is_elastic:
        raise ConfigError(
            f"minWorkers={fewest}: what this {type(strategy).__name__} learns depends on the "
            "number of workers; leave minWorkers unset, use AllReduce without compression and "
            "backup workers, or a strategy that runs in rounds"
        )


def check_shards(shards: int | None, strategy: SyncStrategy, workers: int) -> None:
    """Refuse more workers than shards, or fewer where that changes the result; raises ConfigError.

    Averaging strategies train a replica on each shard. Where hosts differ in speed there must be
    more shards than workers.
    """
    if strategy.work_shares is not None and (shards or workers) <= workers:
        raise ConfigError(
            f"work_shares gives workers on faster hosts more shards, and {workers} shard(s) for "
            f"{workers} worker(s) leave nothing to give; set numShards, for example to "
            f"{4 * workers}"
        )
    if shards is None or shards == workers:
        return
    if shards < workers:
        raise ConfigError(
            f"numShards={shards} is less than the {workers} workers, of which each needs a shard; "
            f"raise numShards, or set numWorkers to at most {shards}"
        )
    name = type(strategy).__name__
    if not strategy.is_elastic:
        raise ConfigError(
            f"numShards={shards} with {workers} workers: what {name} learns depends on which "
            "worker has which rows; leave numShards unset, or use AllReduce without compression "
            "and backup workers"
        )


def check_elasticity(config: TrainConfig, strategy: SyncStrategy, *, has_logs: bool) -> None:
    """Refuse ``elasticity="bits"`` with what depends on who has which shard; raises ConfigError."""
    if config.elasticity != "bits":
        return
    bits, name = "elasticity='bits'", type(strategy).__name__
    if not isinstance(strategy, AllReduce) or not strategy.is_elastic:
        raise ConfigError(
            f"{bits} sums the gradients of shards at every step; instead of this {name} use "
            "AllReduce without compression and backup workers, or set elasticity='rounding'"
        )
    if strategy.double_buffering or strategy.topology != "auto":
        raise ConfigError(
            f"{bits} has a way of its own to sum gradients, along a tree of shards, and waits for "
            f"it; leave double_buffering and topology of {name} as they are"
        )
    if config.sync_batch_norm:
        raise ConfigError(
            f"{bits} trains on one shard after the other, whose batches syncBatchNorm would join "
            "within a pass; unset one of the two"
        )
    if has_logs:
        raise ConfigError(
            f"{bits}: what a LightningModule logs, and the hooks it has, belong to workers, not to "
            "shards; pass a training_step function or a loss, or use elasticity='rounding'"
        )


def check_values(request: FitRequest) -> CheckedValues:
    """Check what needs no rows; raises what `make_module` and `check_training` raise."""
    from torch import nn

    config = request.config
    given = request.module if isinstance(request.module, nn.Module) else None
    check_travels({**vars(config), "inputs": request.specified, "labels": request.labels}, given)
    config = replace(config, sync_strategy=sync.resolve(config.sync_strategy))
    request = replace(request, config=config)
    asked = request.execution_mode
    if asked == "auto" and config.parallelism is not None:
        asked = "gang"
    mode = choose_mode(asked, config.sync_strategy)
    check_autocast()
    check_global_hooks()
    if request.cache_dir is not None:
        check_cache_dir(request.cache_dir)
    begun = begin_module(request)
    module = begun.module
    frozen = freeze(module, config.frozen_layers)
    factory = None if isinstance(request.module, nn.Module) else request.module
    if (obstacle := why_not_saved(module, factory)) is not None:
        logger.warning("the fitted model will predict, but save will refuse it: %s", obstacle)
    has_logs = check_lightning(module, config, in_rounds=mode == "rounds")
    check_elasticity(config, config.sync_strategy, has_logs=has_logs)
    check_sparse_gradients(module, config, config.sync_strategy)
    check_mesh(request, module, mode, has_logs=has_logs)
    check_memory_of_weights(module, config, mode)
    return CheckedValues(
        request=request,
        mode=mode,
        module=module,
        weights=begun.weights,
        float_dtype=begun.float_dtype,
        shared=begun.shared,
        frozen=frozen,
        objective=check_training(module, request, in_rounds=mode == "rounds"),
        has_logs=has_logs,
    )


def choose_mode(requested: str, strategy: SyncStrategy) -> Literal["gang", "rounds"]:
    """The mode that the user asked for; ``auto`` leaves it to the strategy; raises ConfigError."""
    obstacles = {"gang": strategy.why_not_gang(), "rounds": strategy.why_not_rounds()}
    if requested == "auto":
        return "rounds" if strategy.prefers_rounds and obstacles["rounds"] is None else "gang"
    mode: Literal["gang", "rounds"] = "gang" if requested == "gang" else "rounds"
    if obstacles[mode] is not None:
        raise ConfigError(
            f"{type(strategy).__name__} cannot run with executionMode={mode!r}: {obstacles[mode]}; "
            f"use executionMode={'rounds' if mode == 'gang' else 'gang'!r}"
        )
    return mode


def prepare_columns(
    df: DataFrame, request: FitRequest, float_dtype: str
) -> tuple[list[SpoolColumn], SparkColumn | None]:
    """Features, labels and weight, and which rows are for validation; raises DataError."""
    schema = schema_of(df)
    inputs: list[str | Named] = [*request.feature_cols, *request.specified]
    cast = float_dtype if float_dtype in HALF else None
    float_dtype = "float32" if cast else float_dtype
    prepared = [
        replace(prepare(schema, wanted, "feature", float_dtype=float_dtype), cast=cast)
        for wanted in inputs
    ]
    prepared += prepare_labels(
        schema,
        request.config.task,
        request.config.loss,
        labels=request.labels,
        label_col=request.label_col,
        weight_col=request.weight_col,
        float_dtype=float_dtype,
        weight_dtype=float_dtype,
    )
    if request.config.group_by_length and not any(p.kind.has_length for p in prepared):
        raise ConfigError("groupByLength needs an input that is a sparkdl.Sequence")
    names = [p.name for p in prepared if p.role == "feature" and p.argument is None]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f'column "{twice}" is an input twice; pass inputs as a dict by argument, so that they '
            "can be told apart"
        )
    validation = None
    if request.validation_col is not None:
        validation = validation_indicator(schema, request.validation_col)
    elif request.validation_fraction is not None:
        expressions = [column.expression for column in prepared]
        validation = drawn(expressions, request.validation_fraction)
    return prepared, validation


def check_initial_state(
    module: nn.Module, request: FitRequest, mode: Literal["gang", "rounds"]
) -> tuple[TrainingMethod | None, TrainingState | None]:
    """Give the module the weights of the earlier fit, and check that its training can go on.

    Returns:
        How the module is trained, if the fit goes on or another may go on from it, and what the
        earlier fit has left, if there is one.

    Raises:
        ConfigError: the earlier fit was another, or the strategy has states for each member.
        StorageError: the model cannot be read, or has no training state.
    """
    from sparkdl.train.training_state import method_of

    initial, config = request.initial_state, request.config
    if initial is None and not request.keep_training_state:
        return None, None
    param = "keepTrainingState" if initial is None else "initialState"
    if isinstance(config.sync_strategy, PopulationStrategy):
        name = type(config.sync_strategy).__name__
        raise ConfigError(
            f"{param} has no meaning with {name}, whose members have optimizers of their own; "
            "use another strategy, or initialWeights"
        )
    if initial is not None:
        if request.initial_weights is not None:
            raise ConfigError("initialState brings weights too; leave initialWeights out")
        weights, left = initial.read()
        source = InitialWeights(source={**weights, **left.weights})
        load_initial_weights(module, source, "the weights of initialState")
    with borrowed_generator(config.seed), program_kept(module, vars(config)):
        method = method_of(config, travelled(module, copies=True), mode)
    return method, None if initial is None else left.for_method(method)

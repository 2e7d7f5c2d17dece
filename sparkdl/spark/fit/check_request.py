"""The checks of a fit before its first job, and what they decide. ``explain`` makes the same."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession

from sparkdl import sync
from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column, Shard, SpoolColumn, TrainPlan, make_plan
from sparkdl.errors import CheckpointError, ClusterError, ConfigError
from sparkdl.inputs import Named
from sparkdl.mesh import Mesh
from sparkdl.runtime.arguments import takes
from sparkdl.runtime.process import borrowed_generator
from sparkdl.runtime.tracebacks import arose_in
from sparkdl.serialization.identity import identity
from sparkdl.serialization.initial_weights import InitialWeights, load_initial_weights
from sparkdl.serialization.program.imported_values import (
    ProgramValues,
    imported_values,
    program_code,
)
from sparkdl.serialization.program.program_state import program_kept, whole_numbers
from sparkdl.serialization.program.shared_objects import shared_values
from sparkdl.serialization.saved_module import why_not_saved
from sparkdl.serialization.travel.attributes import showing_weights
from sparkdl.serialization.travel.packed_module import overlapping, sharing_memory, travelled
from sparkdl.serialization.travel.pickling import UsesModule, dumps, sent_code
from sparkdl.serialization.travel.shared_values import SharedValue
from sparkdl.spark.cluster.cluster_info import parse_bytes
from sparkdl.spark.cluster.probe import Needs
from sparkdl.spark.cluster.slots import Slots, plan_slots
from sparkdl.spark.fit.check_mesh import check_mesh, check_mesh_optimizer, check_worker_memory
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
from sparkdl.storage.tensor_tree import pack
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.asynchronous.hogwild import Hogwild
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.averaging.diloco import DiLoCo
from sparkdl.sync.frozen_layers import freeze
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.own_weights.elastic_averaging import ElasticAveraging
from sparkdl.sync.population.population import Competition, PopulationStrategy
from sparkdl.sync.sparse_gradients import sparse_parameters
from sparkdl.sync.strategy import SyncStrategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.serialization.recorded.recipe import RecordedWeights
    from sparkdl.train.objective.loss import LossFunction
    from sparkdl.train.optimizers.optimizers import Schedule
    from sparkdl.train.training_state import TrainingMethod, TrainingState

logger = logging.getLogger(__name__)

_HALF = ("bfloat16", "float16")
"""dtypes that floating features have in ``forward`` only."""
_MOST_COPIED = 1 << 26
"""Parameters of modules of which there is another copy to compare what optimizers do."""
_EVERYWHERE = {"cloudpickle", "numpy", "pyarrow", "pyspark", "sparkdl", "torch"}
"""Packages without which no executor gets as far as to be asked for others."""


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
    frozen: Items[str]
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
        sent = sent_code(travels)
        code = [one for one, _ in sent]
        return Needs(
            names=foreign_names(sent),
            values=imported_values(code),
            code=ProgramValues(code=program_code(code)),
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

    def make_plan(self, columns: Items[Column], shards: Items[Shard]) -> TrainPlan:
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
    check_sync_batch_norm(module, config, slots.num_workers)
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


def check_global_hooks() -> None:
    """Refuse hooks of this process that workers would not have; raises ConfigError."""
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    names = {
        "module": [
            f"_global_{kind}_hooks"
            for kind in ("forward_pre", "forward", "backward_pre", "backward")
        ],
        "optimizer": ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"],
    }
    for what, owner in (("module", modules), ("optimizer", optimizers)):
        if any(getattr(owner, name, None) for name in names[what]):
            raise ConfigError(
                f"torch has hooks for every {what} of this process, which workers do not have; "
                "remove them (their handle's remove()), and register hooks on "
                + ("the module itself" if what == "module" else "the one that optimizer= makes")
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


def check_travels(values: Mapping[str, Any], module: nn.Module | None = None) -> None:
    """Refuse what cannot be sent to other processes, such as a lock; raises ConfigError.

    Refused is also what uses a parameter of ``module``, of which workers train another one, and a
    callback that has one of its layers.
    """
    strange = {} if module is None else {id(p): name for name, p in module.named_parameters()}
    layers = {} if module is None else {id(m): name for name, m in module.named_modules() if name}
    for name, value in values.items():
        try:
            dumps(value, strange | layers if name == "callbacks" else strange)
        except UsesModule as error:
            remedy = "trainingStep, which gets the module that they train"
            if name == "callbacks":
                remedy = "state.model, which is the module that they train"
            raise ConfigError(
                f"{name} cannot be sent to the workers: {error}; use {remedy}"
            ) from error
        except Exception as error:  # whatever the user's classes raise when they are pickled
            raise ConfigError(
                f"{name} cannot be sent to the workers: {error}; make such things in the "
                "worker, for example in on_train_begin"
            ) from error


def foreign_names(sent: Items[tuple[Any, bool]]) -> frozenset[tuple[str, str]]:
    """Names of those that are in modules which executors may not have."""
    names = {(str(one.__module__), one.__qualname__) for one, is_by_name in sent if is_by_name}
    known = sys.stdlib_module_names | _EVERYWHERE
    return frozenset(name for name in names if name[0].split(".")[0] not in known)


@dataclass(frozen=True, kw_only=True)
class BegunModule:
    """A module to start from."""

    module: nn.Module
    """A module of our own, on the CPU."""
    weights: RecordedWeights | None = None
    """Values of its parameters if these are on the meta device; None: they have their values."""
    shared: tuple[SharedValue, ...] = ()
    """The objects that it and what else is in the configuration had in common."""

    @property
    def float_dtype(self) -> str:
        """The dtype of floating features."""
        return floating_dtype(self.module)


def begin_module(request: FitRequest) -> BegunModule:
    """Make the module to start from; see `make_module`.

    Where a mesh divides what a factory makes, its parameters are on the meta device, and their
    weights beside it: the driver never has all of them.
    """
    from torch import nn

    from sparkdl.serialization.recorded.recipe import NotRecorded
    from sparkdl.serialization.recorded.recording import recorded

    mesh, reason = request.config.parallelism, None
    is_factory = not isinstance(request.module, nn.Module) and callable(request.module)
    if is_factory and isinstance(mesh, Mesh) and mesh.is_divided:
        try:
            with borrowed_generator(request.config.seed):
                module, weights = recorded(request.module)
            check_travels(vars(request.config), module)
            shared = shared_values(module, vars(request.config))
            module = travelled(module, weights, copies=False)
        except Exception as error:  # also what the factory raises only here
            reason = f"{type(error).__name__}: {error}"
        else:
            try:
                if request.initial_weights is not None:
                    load_initial_weights(module, request.initial_weights, weights=weights)
                return BegunModule(module=module, weights=weights, shared=shared)
            except NotRecorded as error:
                reason = str(error)
    made = make_module(request)
    if reason is not None:
        logger.info("the driver makes the whole module before it is divided: %s", reason)
    return made


def make_module(request: FitRequest) -> BegunModule:
    """Make a module of our own, on the CPU, to start from.

    Raises:
        ConfigError: it is no module, it cannot be made, or the weights are not of this one.
        StorageError: the weights cannot be read.
    """
    from torch import nn

    from sparkdl.serialization.initial_weights import load_initial_weights

    owners = vars(request.config)
    if isinstance(request.module, nn.Module):
        shared = shared_values(request.module, owners)
        module = travelled(request.module, copies=True)
    else:
        try:
            with borrowed_generator(request.config.seed):
                module = request.module()
        except Exception as error:  # whatever the user's class or function raises
            name = getattr(request.module, "__qualname__", repr(request.module))
            remedy = "correct the arguments (model.args in a job file), or what makes it"
            if isinstance(request.module, type) and not takes(request.module):
                remedy = (
                    f"pass {name}(...) or functools.partial({name}, ...) (in a job file model.args)"
                )
            elif not takes(request.module):
                remedy = "it is called without arguments: give it these by functools.partial"
            elif "before Module.__init__() call" in str(error):
                remedy = "begin its __init__ with super().__init__()"
            elif arose_in(error, "torch.cuda"):
                remedy = "make it on the CPU: each worker moves it to its own device"
            raise ConfigError(
                f"module cannot be made: {name} raised {type(error).__name__}: {error}; {remedy}"
            ) from error
        if not isinstance(module, nn.Module):
            shown, remedy = type(module).__name__, ""
            if isinstance(module, type):
                shown, name = f"the class {module.__name__}", module.__name__
                remedy = f"; pass module={name}, or let it return {name}()"
            raise ConfigError(
                "module must be a torch.nn.Module or a callable that returns one; it returned "
                f"{shown}{remedy}"
            )
        check_travels(owners, module)  # it may be one that is kept
        shared = shared_values(module, owners)
        module = travelled(module, copies=False)
    _require_values(module)
    module = module.cpu()  # also what a class of its own keeps
    if request.initial_weights is not None:
        load_initial_weights(module, request.initial_weights)
    return BegunModule(module=module, shared=shared)


def floating_dtype(module: nn.Module) -> str:
    """The dtype of most of a module's floating values, in which it gets floating features."""
    from torch import nn

    counts: Counter[str] = Counter()
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point() and not nn.parameter.is_lazy(tensor):
            counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    found = counts.most_common(1)[0][0] if counts else "float32"
    return found if found in ("float64", *_HALF) else "float32"


def _require_values(module: nn.Module) -> None:
    """Refuse a module on the meta device, or one that cannot come back; raises ConfigError."""
    from torch.nn.parameter import is_lazy

    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if value.is_meta:
            raise ConfigError(
                f"the module is on the meta device: {name} has a shape, but no numbers; make it "
                "without torch.device('meta') and torch.set_default_device('meta'), or give it "
                "weights with to_empty and load_state_dict"
            )
    if any(is_lazy(value) for value in module.parameters()):
        return
    try:
        pack(dict(module.state_dict()))
    except CheckpointError as error:
        raise ConfigError(
            f"the weights of the module cannot be sent back from the workers: {error}"
        ) from error


def _require_training(parameters: Items[nn.Parameter]) -> None:
    """Refuse to train nothing; raises ConfigError."""
    if not parameters:
        raise ConfigError(
            "the module has no parameters, so that nothing trains; layers in a list or dict count "
            "only if that is an nn.ModuleList or nn.ModuleDict"
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError(
            f"none of the module's {len(parameters)} parameters trains: all have "
            "requires_grad=False; set it to True for those to train"
        )


def check_training(
    module: nn.Module, request: FitRequest, *, in_rounds: bool = False
) -> LossFunction:
    """Build once, on a copy of the module, what every worker will build, so that mistakes show now.

    Not the optimizer and its schedule where they are for CUDA, which the driver need not have,
    nor while the module is lazy. Raises ConfigError, or what the user's own callables raise.

    Returns:
        What the run minimizes, for all that the driver asks of it.
    """
    import torch
    from torch import nn

    from sparkdl.train.callbacks import steps_between
    from sparkdl.train.objective.metrics import check_metrics
    from sparkdl.train.objective.training_step import objective_of
    from sparkdl.train.optimizers import optimizers
    from sparkdl.train.optimizers.check_optimizer import (
        check_length,
        check_parameters,
        check_schedule,
        check_steps,
    )

    config = request.config
    strategy: SyncStrategy = config.sync_strategy
    steps_between(config.callbacks)
    with (
        borrowed_generator(config.seed),
        optimizers.without_compiler(),
        program_kept(vars(config)) as program,
    ):
        if isinstance(request.module, nn.Module):
            _check_ids(request.module, program.numbers)
        objective = objective_of(config, module)
        check_metrics(config, objective)
        is_lazy = any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())
        if config.device == "cuda" or is_lazy:
            optimizers.resolve_optimizer(config, module)
            if isinstance(config.optimizer, str | type):
                stand_in = nn.Parameter(torch.zeros(1))
                strategy.check_optimizer(optimizers.resolve_optimizer(config)([stand_in]))
        else:
            own = travelled(module, copies=True)
            _require_training(list(own.parameters()))
            make = optimizers.resolve_optimizer(config, own)
            optimizer = make(own.parameters())
            check_parameters(optimizer, own)
            strategy.check_optimizer(optimizer)
            check_mesh_optimizer(config.parallelism, optimizer, make)
            schedule = optimizers.make_scheduler(config, optimizer, make, steps_per_epoch=1)
            if in_rounds:
                optimizers.require_steps(schedule)
            sparse = sparse_parameters(own).values()
            scheduler = None if schedule is None else schedule.scheduler
            again: Callable[[], torch.optim.Optimizer] = partial(make, own.parameters())
            if sum(parameter.numel() for parameter in own.parameters()) <= _MOST_COPIED:
                again = partial(_new_optimizer, module, config)
            check_steps(optimizer, scheduler, config, sparse, again)
            if config.scheduler is not None and schedule is not None:
                check_schedule(optimizer, config.scheduler)
                fewest = config.epochs  # with one step each
                if config.max_steps >= 0:
                    fewest = min(config.max_steps, fewest)
                check_length(schedule, fewest, config, partial(stepped_schedule, module, config))
    return objective


def _new_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of another copy of the module."""
    from sparkdl.train.optimizers import optimizers

    own = travelled(module, copies=True)
    return optimizers.resolve_optimizer(config, own)(own.parameters())


def stepped_schedule(module: nn.Module, config: TrainConfig, steps_per_epoch: int = 1) -> Schedule:
    """The schedule of an optimizer that has taken a step, on a copy of the module."""
    from sparkdl.train.optimizers import optimizers
    from sparkdl.train.optimizers.check_optimizer import step_once

    own = travelled(module, copies=True)
    make = optimizers.resolve_optimizer(config, own)
    optimizer = make(own.parameters())
    schedule = optimizers.make_scheduler(config, optimizer, make, steps_per_epoch)
    assert schedule is not None
    step_once(optimizer, sparse_parameters(own).values())
    return schedule


def check_sparse_gradients(module: nn.Module, config: TrainConfig, strategy: SyncStrategy) -> None:
    """Refuse sparse gradients with what would make them dense; raises ConfigError."""
    found = [name for name, p in sparse_parameters(module).items() if p.requires_grad]
    name = type(strategy).__name__
    asked = {
        f"parallelism=Mesh({config.parallelism}) cannot divide it": config.parallelism is not None,
        "elasticity='bits' adds whole gradients up": config.elasticity == "bits",
        f"{name} sends gradients to slices of the weights": isinstance(strategy, AsyncSGD),
        f"double_buffering of {name} keeps whole gradients": isinstance(strategy, AllReduce)
        and strategy.double_buffering,
        f"num_backup_workers of {name} keep whole gradients": isinstance(strategy, AllReduce)
        and strategy.num_backup_workers > 0,
    }
    for obstacle, is_asked in asked.items():
        if found and is_asked:
            raise ConfigError(
                f"the gradient of {found[0]} is sparse, and {obstacle}; make the layer with "
                "sparse=False, or use AllReduce() or a strategy that averages replicas"
            )


def check_memory_of_weights(module: nn.Module, config: TrainConfig, mode: str) -> None:
    """Refuse weights in shared memory where it is left, or each is moved by itself; ConfigError."""
    strategy, mesh = config.sync_strategy, config.parallelism
    name = type(strategy).__name__
    moves_each = isinstance(strategy, AsyncSGD | ElasticAveraging | Hogwild)
    if isinstance(strategy, AveragingStrategy) and mode == "gang":
        is_plain = isinstance(strategy, DiLoCo) and not strategy.is_streaming
        moves_each = strategy.make_outer(2) is not None and not is_plain
    if moves_each:
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        for names in overlapping(trained):
            raise ConfigError(
                f"{' and '.join(names)} share memory, and {name} moves each weight by itself; let "
                "them be one parameter, self.b.weight = self.a.weight, or use AllReduce or "
                "ParameterAveraging"
            )
    is_divided = mesh is not None and mesh.is_divided
    if is_divided or isinstance(strategy, Hogwild):
        for path, weight in showing_weights(module):
            raise ConfigError(
                f"the attribute {path} shows the memory of {weight}, which "
                f"{f'parallelism=Mesh({mesh})' if is_divided else name} moves elsewhere, so that "
                "it would stay what it is; take it from the weight in forward"
            )
        buffers = dict(module.named_buffers(remove_duplicate=False))
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for names in sharing_memory({**parameters, **buffers}):
            shown = [name for name in names if name in buffers]
            if shown and parameters.keys() & names:
                raise ConfigError(
                    f"the buffer {shown[0]} shows the memory of a weight, which "
                    f"{f'parallelism=Mesh({mesh})' if is_divided else name} moves elsewhere; take "
                    "it from the weight in forward, or clone it"
                )


def _check_ids(module: nn.Module, numbers: Collection[int]) -> None:
    """Refuse code that knows parameters by `id`: workers have others; raises ConfigError."""
    ids = {id(parameter): name for name, parameter in module.named_parameters()}
    for number in {*numbers, *whole_numbers(module)} & ids.keys():
        raise ConfigError(
            f"the program keeps the id() of the parameter {ids[number]!r}, and workers train "
            "another object; tell parameters by their names, as parameterGroups does, or by their "
            "shapes"
        )


def check_max_norm(module: nn.Module) -> None:
    """Refuse layers whose weights follow from the rows that a worker reads; raises ConfigError."""
    from torch import nn

    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise ConfigError(
                f"{name or type(layer).__name__}: max_norm={layer.max_norm} shortens the weights "
                "of the rows that are read, and each worker reads others, so replicas would come "
                "apart; leave max_norm out and let a callback's on_step_end limit all of them, or "
                "set numWorkers=1, or a strategy that averages replicas"
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq:
            raise ConfigError(
                f"{name or type(layer).__name__}: scale_grad_by_freq divides gradients by how "
                "often an index is in the batch, and each worker sees a part of it; leave it out, "
                "or set numWorkers=1, or a strategy that averages replicas"
            )


def check_lightning(module: nn.Module, config: TrainConfig, *, in_rounds: bool) -> bool:
    """True if the module may log values; raises ConfigError if the strategy does not take it."""
    from sparkdl.train.objective import lightning, manual
    from sparkdl.train.objective.training_step import logs

    if not logs(config, module):
        return False
    if in_rounds:
        lightning.check_in_rounds(module)
    if manual.is_manual(module):
        manual.check_manual(config, config.sync_strategy, type(module).__name__)
    if isinstance(config.sync_strategy, Competition) and lightning.is_overridden(
        module, "validation_step"
    ):
        raise ConfigError(
            f"{type(config.sync_strategy).__name__} compares members by the loss of the training "
            f"step; remove validation_step from {type(module).__name__}, or use another strategy"
        )
    return True


def prepare_columns(
    df: DataFrame, request: FitRequest, float_dtype: str
) -> tuple[list[SpoolColumn], SparkColumn | None]:
    """Features, labels and weight, and which rows are for validation; raises DataError."""
    schema = schema_of(df)
    inputs: list[str | Named] = [*request.feature_cols, *request.specified]
    cast = float_dtype if float_dtype in _HALF else None
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


def check_sync_batch_norm(module: nn.Module, config: TrainConfig, num_workers: int) -> None:
    """Refuse ``syncBatchNorm`` with what it does not fit; raises ConfigError."""
    from sparkdl.train.modules import sync_batch_norm

    if config.sync_batch_norm:
        sync_batch_norm.batch_norms(module)
        sync_batch_norm.check_strategy(config.sync_strategy, num_workers)


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
    with borrowed_generator(config.seed):
        method = method_of(config, travelled(module, copies=True), mode)
    return method, None if initial is None else left.for_method(method)

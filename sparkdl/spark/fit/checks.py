"""Do module, DataFrame and configuration fit together? Asked on the driver, before the gang.

What needs no data is asked before any job; what only the rows can tell, after the spool.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl import sync
from sparkdl.config import TrainConfig
from sparkdl.data.column_stats import merge_stats
from sparkdl.data.plan import Column
from sparkdl.data.source import Source
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Named, Sequence, Tensor
from sparkdl.runtime.process import borrowed_generator
from sparkdl.spark.frames.columns import Prepared, prepare, quoted, validation_indicator
from sparkdl.spark.frames.shard_table import ShardTable, SpooledShard
from sparkdl.spark.frames.source_table import SourceTable
from sparkdl.spark.frames.specified_columns import prepare_named
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.compat import described, is_case_sensitive
from sparkdl.sync.population.population import PopulationStrategy
from sparkdl.sync.strategy import SyncStrategy

if TYPE_CHECKING:
    from torch import nn

_CONNECT_SESSION = "pyspark.sql.connect.session"
"""Where Spark Connect's session is; importing it needs packages that need not be there."""


def check_travels(config: TrainConfig, **columns: Any) -> None:
    """Refuse what cannot be sent to other processes, such as a callback that holds a lock.

    Raises:
        ConfigError: names the parameter.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    for name, value in {**values, **columns}.items():
        try:
            travelling(value)
        except Exception as error:  # whatever the user's classes raise when they are pickled
            raise ConfigError(
                f"{name} cannot be sent to the workers: {error}; make such things in the "
                "worker, for example in on_train_begin"
            ) from error


def travelling(value: Any) -> bytes:
    """What other processes get of a value.

    Raises:
        Exception: whatever the user's classes raise when they are pickled.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Also refuses what Spark Connect lets travel, though a worker can do nothing with it."""

    def reducer_override(self, value: Any) -> Any:
        """How to pickle a value; called for each."""
        is_session = isinstance(value, SparkSession) or type(value).__module__ == _CONNECT_SESSION
        if is_session or isinstance(value, DataFrame):
            raise pickle.PicklingError(f"a {type(value).__name__} lives on the driver")
        return super().reducer_override(value)


def check_source(source: Source, request: FitRequest, strategy: SyncStrategy) -> None:
    """Refuse what only spools can do.

    Raises:
        ConfigError: names it.
    """
    name = type(source).__name__
    if isinstance(strategy, PopulationStrategy):
        raise ConfigError(
            f"{type(strategy).__name__} sets rows aside, which {name} cannot; fit on a DataFrame"
        )
    if request.config.group_by_length:
        raise ConfigError(
            f"groupByLength needs the lengths of all rows, which {name} does not know; fit on a "
            "DataFrame"
        )
    if request.config.shuffle_window_bytes is not None:
        raise ConfigError(f"shuffleWindowBytes is for DataFrames; {name} has options of its own")
    check_skipping(source, (*request.specified, *request.labels))
    check_travels(request.config, source=source)


def check_skipping(source: Source, entries: Iterable[Named]) -> None:
    """Refuse to leave rows out of a source.

    Raises:
        ConfigError: an input asks for it.
    """
    if any(entry.specification.skips for entry in entries):
        raise ConfigError(
            f"on_error='skip' changes the number of rows, which {type(source).__name__} must know "
            "before training; mend the images, or use a DataFrame"
        )


def make_module(request: FitRequest) -> tuple[nn.Module, str]:
    """A module of our own, on the CPU, to start from, and the dtype of its floating features.

    Raises:
        ConfigError: it is no module, or the weights are not of this one.
        StorageError: the weights cannot be read.
    """
    import torch
    from torch import nn

    from sparkdl.serialization.initial_weights import load_initial_weights

    if isinstance(request.module, nn.Module):
        module = copy.deepcopy(request.module)
    else:
        with borrowed_generator(request.config.seed):
            module = request.module()
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"module must be a torch.nn.Module or a callable that returns one; it returned "
                f"{type(module).__name__}"
            )
    module = module.cpu()
    if request.initial_weights is not None:
        load_initial_weights(module, request.initial_weights)
    is_double = any(parameter.dtype == torch.float64 for parameter in module.parameters())
    return module, "float64" if is_double else "float32"


def check_training(module: nn.Module, request: FitRequest) -> None:
    """Build once, on a copy of the module, what every worker will build, so that mistakes show now.

    Not the optimizer and its schedule where they are for CUDA, which the driver need not have,
    nor while the module is lazy.

    Raises:
        ConfigError: loss, metrics, optimizer or schedule cannot be used, or the strategy refuses
            the optimizer.
        Exception: what the user's own callables raise.
    """
    import torch
    from torch import nn

    from sparkdl.train.objective.label_losses import loss_of
    from sparkdl.train.objective.metrics import Metrics
    from sparkdl.train.optimizers.optimizers import make_scheduler, resolve_optimizer

    config = request.config
    strategy = sync.resolve(config.sync_strategy)
    with borrowed_generator(config.seed):
        loss = loss_of(config)
        Metrics(config.metrics, config.task, loss.predictions, torch.device("cpu"))
        is_lazy = any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())
        if config.device == "cuda" or is_lazy:
            resolve_optimizer(config, module)
            if isinstance(config.optimizer, str | type):
                stand_in = nn.Parameter(torch.zeros(1))
                strategy.check_optimizer(resolve_optimizer(config)([stand_in]))
        else:
            copied = copy.deepcopy(module)
            make = resolve_optimizer(config, copied)
            optimizer = make(p for p in copied.parameters() if p.requires_grad)
            strategy.check_optimizer(optimizer)
            make_scheduler(config, optimizer, make, steps_per_epoch=1)


def prepare_columns(
    df: DataFrame, request: FitRequest, float_dtype: str
) -> tuple[list[Prepared], SparkColumn | None]:
    """Features, label and weight in this order, and the validation indicator if there is one.

    Raises:
        DataError: a column is missing or of a type of which no tensor can be made.
    """
    from sparkdl.train.objective.label_losses import class_labels

    case = is_case_sensitive(df.sparkSession)
    prepare_column = partial(prepare, df.schema, float_dtype=float_dtype, is_case_sensitive=case)
    prepared = [prepare_column(name, "feature") for name in request.feature_cols]
    prepare_entry = partial(
        prepare_named, df.schema, float_dtype=float_dtype, is_case_sensitive=case
    )
    prepared += [prepare_entry(entry, "feature") for entry in request.specified]
    for entry in request.labels:
        as_classes = entry.argument in class_labels(request.config.loss)
        prepared.append(prepare_entry(entry, "label", as_classes=as_classes))
    if request.label_col is not None:
        as_classes = request.config.task == "classification"
        label = prepare_column(request.label_col, "label", as_classes=as_classes)
        if request.config.task == "regression" and label.dtype == "int64":
            sql = "float" if float_dtype == "float32" else "double"
            label = replace(label, expression=label.expression.cast(sql), dtype=float_dtype)
        prepared.append(label)
    if request.weight_col is not None:
        prepared.append(prepare_column(request.weight_col, "weight"))
    _check_lengths(prepared, request.config)
    _check_apart(prepared)
    validation = None
    if request.validation_col is not None:
        validation = validation_indicator(df.schema, request.validation_col, is_case_sensitive=case)
    return prepared, validation


def _check_apart(prepared: Items[Prepared]) -> None:
    """Refuse a column that is twice an input without a name; a label may be an input too."""
    names = [p.name for p in prepared if p.role == "feature" and p.argument is None]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f'column "{name}" is an input twice; pass inputs as a dict by argument, so that '
                "they can be told apart"
            )


def _check_lengths(prepared: Items[Prepared], config: TrainConfig) -> None:
    """Refuse ``groupByLength`` where rows have no lengths."""
    if config.group_by_length and not any(isinstance(p.specification, Sequence) for p in prepared):
        raise ConfigError("groupByLength needs an input that is a sparkdl.Sequence")


def shaped(
    table: ShardTable | SourceTable, spooled: Items[SpooledShard], request: FitRequest
) -> tuple[Column, ...]:
    """The spool's columns, features reshaped as asked for."""
    if request.validation_col is not None:
        table.check_indicator(request.validation_col, spooled)
    columns = list(table.columns(spooled))
    for index, shape in enumerate(request.input_shapes):
        if shape is not None:
            columns[index] = _reshaped(columns[index], shape)
    return tuple(_as_specified(column) for column in columns)


def _as_specified(column: Column) -> Column:
    """A tensor in the shape that its specification asks for; a sequence that can be padded."""
    if isinstance(column.kind, Sequence):
        column.kind.check_padding(column.dtype)
    shape = column.kind.shape if isinstance(column.kind, Tensor) else None
    return column if shape is None else _reshaped(column, shape)


def _reshaped(column: Column, shape: tuple[int, ...]) -> Column:
    if math.prod(column.shape) != math.prod(shape):
        raise DataError(
            f'column "{column.name}" has {math.prod(column.shape)} values per row (shape '
            f"{column.shape}), which shape {shape} cannot hold"
        )
    return replace(column, shape=shape)


def check_sync_batch_norm(module: nn.Module, config: TrainConfig, num_workers: int) -> None:
    """Refuse ``syncBatchNorm`` with a module or a strategy that it does not fit.

    Raises:
        ConfigError: see `sync_batch_norm.check`.
    """
    from sparkdl.train.modules import sync_batch_norm

    if config.sync_batch_norm:
        sync_batch_norm.check(module, sync.resolve(config.sync_strategy), num_workers)


def check_labels(
    df: DataFrame, label_col: str, num_classes: int, index: int, spooled: Items[SpooledShard]
) -> None:
    """Refuse labels outside the classes; asks Spark for count and example only if there are any.

    Args:
        df: the DataFrame.
        label_col: its label column.
        num_classes: classes of the module's output.
        index: number of the label among the spool's columns.
        spooled: the shards.

    Raises:
        DataError: with count and an example.
    """
    stats = merge_stats([shard.summary.columns[index] for shard in spooled])
    if stats.maximum is None or stats.maximum < num_classes:
        return
    column = F.col(quoted(label_col))
    outside = df.where(column >= num_classes)
    with described(df.sparkSession, "sparkdl: look for labels outside the classes"):
        row, number = outside.first(), outside.count()
    raise DataError(
        f'column "{label_col}" has {number} label(s) outside the {num_classes} classes '
        f"of the module's output, 0 to {num_classes - 1} (example row: {_shown(row)}); "
        "mend the labels or widen the module's output"
    )


def _shown(row: Any) -> str:
    text = str(row)
    return text if len(text) <= 200 else text[:197] + "..."

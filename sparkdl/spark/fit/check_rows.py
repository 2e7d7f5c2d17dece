"""The checks of a fit for which rows are needed, and a run of the module on some of them.

A fit makes them on the first rows that it sees, and again on what all rows have shown. ``explain``
makes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.config import TrainConfig
from sparkdl.data.column_stats import SpooledShard, merge_stats
from sparkdl.data.plan import Column, TrainPlan
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Sequence, Tensor
from sparkdl.mesh import Mesh
from sparkdl.runtime.process import borrowed_generator
from sparkdl.serialization.program.program_state import program_kept
from sparkdl.spark.cluster.cluster_info import check_memory
from sparkdl.spark.fit.check_request import CheckedRequest
from sparkdl.spark.fit.check_training import stepped_schedule
from sparkdl.spark.fit.example import Example, lent_weights, own_copy
from sparkdl.spark.fit.trial import Sink, Trial, failed_layer, try_metrics, try_module
from sparkdl.spark.fit.trial_step import counted_in_steps, try_step
from sparkdl.spark.frames.row_table import ShownRows
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.compat import conf
from sparkdl.train.state import check_monitored

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.serialization.recorded.recipe import RecordedWeights

logger = logging.getLogger(__name__)

_FEWEST_STEPS = 1000
"""So many numbers of a dtype should lie between the least and the greatest label."""
_LONG_ROW = 10_000
"""Values of a row from which on zeros are worth a warning."""
_FEW_VALUES = 0.05


@dataclass(frozen=True, kw_only=True)
class CheckedRows:
    """The facts that the rows, and a trial of the module on some of them, have shown."""

    columns: tuple[Column, ...]
    """The columns in the shapes in which workers use them."""
    trial: Trial


def check_rows(
    checked: CheckedRequest,
    table: ShownRows,
    shards: Items[SpooledShard],
    sink: Sink | None = None,
    earlier: CheckedRows | None = None,
) -> CheckedRows:
    """See that the rows can be used, that the module takes them, and the loss its output.

    ``sink`` gets the graph of what the module did, see `report.module_graph`; None: nobody. What
    was found ``earlier`` on rows of the same form is not tried again. Raises DataError about rows,
    with column, count and an example, and what `try_module` raises.
    """
    request = checked.request
    columns = shaped(table.columns(shards), request.input_shapes)
    is_known = earlier is not None and _form(earlier.columns) == _form(columns)
    if earlier is not None and is_known:
        found = replace(earlier, columns=columns)
    else:
        example, trial = _tried(checked, table, shards, columns, sink)
        found = CheckedRows(columns=columns, trial=trial)
        check_stages(checked.module, request.config.parallelism, columns)
    num_classes = found.trial.num_classes
    if num_classes is not None and request.label_col is not None:
        check_labels(table, request.label_col, num_classes, request.num_inputs, shards)
    if not is_known:
        try_metrics(checked, example, trial)
        if not checked.slots.cluster.gpus_per_executor or checked.config.device == "cpu":
            slots, apart = checked.slots, checked.config.sync_strategy.trains_apart
            several = (slots.max_workers or slots.num_workers) > 1
            adds_up = several and not apart
            read_rows = partial(table.read_rows, columns)
            try_step(checked, example, trial.metrics, read_rows, adds_up=adds_up, several=several)
    return found


def _form(columns: Items[Column]) -> list[Column]:
    """The columns, whatever the lengths of sequences."""
    return [replace(column, longest=0) for column in columns]


def _tried(
    checked: CheckedRequest,
    table: ShownRows,
    shards: Items[SpooledShard],
    columns: tuple[Column, ...],
    sink: Sink | None,
) -> tuple[Example, Trial]:
    """A trial on the rows that are at hand, else on zeros; real rows decide if these fail."""
    example = Example(columns=columns, rows=table.rows_at_hand(columns, shards))
    _warn_of_zeros(example)
    try:
        return example, try_module(checked, example, sink)
    except ConfigError:
        rows = None if example.rows is not None else table.read_rows(columns)
        if rows is None:
            raise
        example = replace(example, rows=rows)
        return example, try_module(checked, example, sink)


def _warn_of_zeros(example: Example) -> None:
    """Say so if long rows hold hardly anything but zeros, which the spool writes down."""
    import torch

    for column in example.columns:
        values = None if example.rows is None else example.rows[column.key]
        if not isinstance(values, torch.Tensor) or values[0].numel() < _LONG_ROW:
            continue
        share = float((values != 0).double().mean())
        if share < _FEW_VALUES:
            logger.warning(
                'column "%s" has %d values in a row, of which %.2g %% are not 0, and each row '
                "takes %.1f MB on the executors' disks; pass the vectors as they are: "
                'inputs={"x": sparkdl.Sparse("%s")}',
                *(column.name, values[0].numel(), 100 * share, values[0].nbytes / 1e6),
                column.name,
            )


def check_stages(module: nn.Module, mesh: Mesh | None, columns: Items[Column]) -> None:
    """See that a module can be computed in the stages of a mesh; raises ConfigError."""
    import torch

    from sparkdl.data.collate import example_arguments
    from sparkdl.sync.divided.stages import Skeleton, cut_layers

    if mesh is not None and mesh.pipeline > 1:
        example = example_arguments([column for column in columns if column.role == "feature"])
        cuts = cut_layers(mesh, module)
        try:
            Skeleton(module, torch.device("cpu")).stages(example, cuts)
        except ConfigError as error:
            if mesh.stages != "auto":
                raise
            raise ConfigError(
                f'{error}; stages="auto" let stages begin with {", ".join(cuts)}, by the sizes of '
                "layers: name the layers of each stage"
            ) from error


def check_labels(
    table: ShownRows, label_col: str, num_classes: int, index: int, shards: Items[SpooledShard]
) -> None:
    """Refuse labels outside the classes, as far as they are known; raises DataError."""
    found = table.labels_outside(label_col, num_classes, index, shards)
    if found is not None:
        number = "some" if found[0] is None else found[0]
        raise DataError(
            f'column "{label_col}" has {number} label(s) outside the {num_classes} classes of '
            f"the module's output, 0 to {num_classes - 1} ({found[1]}); subtract 1 if "
            "labels begin at 1, correct them (StringIndexer numbers whatever they are), or widen "
            "the module's output"
        )


def warn_of_labels(
    checked: CheckedRequest, found: CheckedRows, shards: Items[SpooledShard]
) -> None:
    """Warn of labels that a filter has left of one class, or that rounding makes equal."""
    request = checked.request
    place = request.num_inputs  # no source tells values of its columns
    stats = merge_stats([shard.columns[place] for shard in shards if len(shard.columns) > place])
    if request.label_col is None or stats.minimum is None or stats.maximum is None:
        return
    is_single = stats.minimum == stats.maximum
    if is_single and (found.trial.num_classes or 0) > 1:
        logger.warning(
            'all rows have the label %g in "%s": the model can learn nothing but to give that; '
            "look at what selects the rows",
            *(stats.minimum, request.label_col),
        )
    last = (found.trial.num_classes or 0) - 1
    if stats.minimum == 1 and stats.maximum == last and last > 1:
        logger.warning(
            'the labels in "%s" are from 1 to %d, and the module has outputs for the classes 0 to '
            "%d: if labels begin at 1, subtract 1, and leave one output out",
            *(request.label_col, last, last),
        )
    dtypes = {column.dtype for column in found.columns if column.role == "label"}
    step = float(np.spacing(np.float32(max(abs(stats.minimum), abs(stats.maximum)))))
    if dtypes != {"float32"} or (is_single and step < 1):  # which are all the same, maybe by that
        return
    if stats.maximum - stats.minimum < _FEWEST_STEPS * step:
        logger.warning(
            'the labels in "%s" are from %.10g to %.10g, where float32 has steps of %g, so that '
            "training and evaluate round them; subtract what they have in common, or give a "
            "module in double precision (module.double())",
            *(request.label_col, stats.minimum, stats.maximum, step),
        )


def check_plan(checked: CheckedRequest, plan: TrainPlan, *, has_validation: bool) -> None:
    """See that the plan can be carried out.

    Raises:
        ConfigError: what shall be measured needs validation rows, or the module does not take
            batches that the plan has.
        ClusterError: the replicas do not fit into the executors' containers.
    """
    try:
        check_monitored(checked.config, has_validation=has_validation, has_logs=checked.has_logs)
    except ConfigError as error:
        if has_validation or checked.request.validation is None:
            raise
        raise ConfigError(
            f"{none_for_validation(checked.request, plan.num_rows)}: earlyStopping, metrics and "
            "validationInterval need some"
        ) from error
    check_empty_batches(checked.module, plan, checked.config, checked.weights)
    check_single_rows(checked.module, plan, checked.config, checked.weights)
    check_counted(checked, plan)
    check_schedule(checked, plan)
    if checked.has_logs:
        check_manual_plan(checked.module, plan, apart=checked.strategy.trains_apart)
    module, slots = checked.module, checked.slots
    mesh = checked.config.parallelism
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    if mesh is not None:
        from sparkdl.sync.divided.dividing import trained_bytes

        trained = trained_bytes(mesh, module)
    copied = 2 * trained + (replica_bytes(module) if mesh is None else trained)
    check_memory(
        slots.cluster,
        partial(conf, checked.spark),
        replica_bytes=replica_bytes(module),
        # gradients, two moments as Adam keeps them, and a checkpoint's copy where there is one
        state_bytes=3 * trained + (0 if mesh is not None and mesh.divides_model else copied),
        spool_bytes=plan.largest_spool_bytes,
        num_workers=slots.num_workers,
    )


def check_schedule(checked: CheckedRequest, plan: TrainPlan) -> None:
    """See that the schedule lasts for all steps; raises ConfigError.

    One that needs a GPU is not made, nor one of parameters that are not here. Those of a
    LightningModule may ask for the number of steps.
    """
    from sparkdl.train.optimizers import optimizers
    from sparkdl.train.optimizers.check_optimizer import check_length
    from sparkdl.train.optimizers.without_compiler import without_compiler

    config, module = checked.config, checked.module
    if config.scheduler is None or config.device == "cuda" or checked.weights is not None:
        return
    with (
        borrowed_generator(config.seed),
        without_compiler(),
        program_kept(module, vars(config)) as program,
    ):
        make = optimizers.resolve_optimizer(config, module)
        optimizer = make(module.parameters())
        schedule = optimizers.make_scheduler(config, optimizer, make, plan.steps_per_epoch)
        if schedule is not None:
            stepped = partial(stepped_schedule, module, config, plan.steps_per_epoch)
            again = partial(program.again, stepped)
            check_length(schedule, plan.first_step + plan.total_steps, config, again)


def check_single_rows(
    module: nn.Module,
    plan: TrainPlan,
    config: TrainConfig,
    weights: RecordedWeights | None = None,
) -> None:
    """Refuse steps of a single row where BatchNorm has no batch to look at; raises ConfigError."""
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm

    from sparkdl.sync.frozen_layers import training_mode

    rows = [count for rank in range(plan.world_size) if (count := plan.rows_of(rank))]
    parts = plan.steps_per_epoch * config.gradient_accumulation_steps
    has_norm = any(isinstance(layer, _BatchNorm) for layer in module.modules())
    if not rows or not has_norm or config.sync_batch_norm or min(rows) // parts > 1:
        return
    tried = own_copy(module, weights)
    training_mode(tried, config.frozen_layers)
    try:
        with torch.no_grad(), borrowed_generator(), lent_weights(weights), program_kept(module):
            Example(columns=plan.columns).of("feature", 1).call(tried)
    except Exception as error:  # others were tried before
        failed = failed_layer(error, tried)
        if failed is None or not isinstance(failed.layer, _BatchNorm):
            return
        raise ConfigError(
            f"layer {failed.name} ({type(failed.layer).__name__}) cannot train on a single row, "
            f"and a worker has {min(rows)} rows for the {parts} batches of an epoch; raise "
            "batchSize, use fewer workers or a smaller gradientAccumulationSteps, or set "
            "syncBatchNorm=True"
        ) from error


def none_for_validation(request: FitRequest, num_rows: int) -> str:
    """Return why there are no rows for validation although they were asked for."""
    if request.validation_fraction is None:
        return f'column "{request.validation_col}" marks none of the {num_rows} rows for validation'
    return (
        f"validationFraction={request.validation_fraction:g} has drawn none of the {num_rows} rows "
        "for validation; raise it, or mark rows by validationIndicatorCol"
    )


def check_manual_plan(module: nn.Module, plan: TrainPlan, *, apart: bool) -> None:
    """Refuse rows that manual optimization cannot be trained on; raises ConfigError."""
    from sparkdl.train.objective.lightning import is_overridden
    from sparkdl.train.objective.manual import is_manual

    if not is_manual(module):
        return
    name = f"{type(module).__name__} sets automatic_optimization=False, so"
    if plan.num_validation_rows and not is_overridden(module, "validation_step"):
        raise ConfigError(f"{name} validation rows need a validation_step; write one")
    if not plan.fewest_in_a_step and plan.world_size > 1 and not apart:
        fewest = min(plan.rows_of(rank) for rank in range(plan.world_size))
        raise ConfigError(
            f"{name} each worker needs rows in each of the {plan.steps_per_epoch} steps of an "
            f"epoch, and one has {fewest} rows only; raise batchSize, or use fewer workers"
        )


def replica_bytes(module: nn.Module) -> int:
    """Parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def shaped(
    columns: Items[Column], input_shapes: Items[tuple[int, ...] | None]
) -> tuple[Column, ...]:
    """The spool's columns, features reshaped as asked for; raises DataError."""
    shapes = [*input_shapes, *(None for _ in columns[len(input_shapes) :])]
    found = []
    for column, asked in zip(columns, shapes, strict=True):
        if isinstance(column.kind, Sequence):
            column.kind.check_padding(column.dtype)
        own = column.kind.shape if isinstance(column.kind, Tensor) else None
        shape = own if asked is None else asked
        found.append(column if shape is None else column.reshaped(shape))
    return tuple(found)


def check_counted(checked: CheckedRequest, plan: TrainPlan) -> None:
    """Refuse a module that counts steps, where a worker has no rows in some; raises ConfigError.

    It would not run there, and what it counts would come apart from that of others.
    """
    config, mesh = checked.config, checked.config.parallelism
    steps, parts = plan.steps_per_epoch, config.gradient_accumulation_steps
    rows = [plan.rows_of(rank) for rank in range(plan.world_size)]
    fewest = plan.fewest_in_a_step
    if config.elasticity == "bits":  # each shard has a state of its own
        rows = [shard.num_rows for shard in plan.shards]
        fewest = min(rows) // steps
    all_run = config.sync_batch_norm or (mesh is not None and mesh.num_shards > 1)
    if len(rows) == 1 or fewest >= parts or all_run or checked.strategy.trains_apart:
        return
    if name := counted_in_steps(checked, plan.columns):
        raise ConfigError(
            f"each step changes the {name}, whichever rows it gets, and a worker has {min(rows)} "
            f"rows for the {steps * parts} batches of an epoch, so that it would take part in "
            "fewer of them than others, and come apart from them; raise batchSize, use fewer "
            "workers or a smaller gradientAccumulationSteps"
        )


def check_empty_batches(
    module: nn.Module,
    plan: TrainPlan,
    config: TrainConfig,
    weights: RecordedWeights | None = None,
) -> None:
    """Refuse batches without rows that the module does not take; raises ConfigError."""
    import torch

    from sparkdl.data.collate import example_arguments
    from sparkdl.sync.frozen_layers import evaluating
    from sparkdl.train.validation import validation_batches

    fewest = plan.fewest_in_a_step
    has_empty = plan.world_size > 1 and fewest < config.gradient_accumulation_steps
    gathers = config.parallelism is not None and config.parallelism.num_shards > 1
    if gathers and plan.num_validation_rows:
        has_empty |= len(set(validation_batches(plan))) > 1
    if not has_empty or not (gathers or config.sync_batch_norm):
        return
    features = [column for column in plan.columns if column.role == "feature"]
    try:
        with torch.no_grad(), borrowed_generator(), lent_weights(weights), program_kept(module):
            example_arguments(features, 0).call(evaluating(own_copy(module, weights)))
    except Exception as error:
        what = f"parallelism=Mesh({config.parallelism})" if gathers else "syncBatchNorm"
        raise ConfigError(
            f"with {what} workers whose rows have run out train on batches without rows, "
            f"which the module does not take: {type(error).__name__}: {error}; adapt it, for "
            "example by torch.flatten(x, 1) in place of x.view(len(x), -1), and by "
            "x.unflatten(-1, (-1, 4)) in place of x.view(len(x), -1, 4), or raise batchSize"
        ) from error

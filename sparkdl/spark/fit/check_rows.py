"""The checks of a fit after the spool, when its rows are known. ``explain`` makes the same.

The driver runs the module on rows of zeros: that shows whether it takes the features.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl.config import TrainConfig
from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Column, TrainPlan
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Sequence, Tensor
from sparkdl.mesh import Mesh
from sparkdl.report.record.module_graph import traced
from sparkdl.runtime.process import borrowed_generator
from sparkdl.spark.cluster.cluster_info import check_memory
from sparkdl.spark.fit.check_request import CheckedRequest
from sparkdl.spark.frames.row_table import RowTable
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.compat import conf
from sparkdl.train.state import check_monitored

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.serialization.recorded.recipe import RecordedWeights
    from sparkdl.train.objective.loss import LossFunction, ModuleLoss

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckedRows:
    """What the rows, and a run of the module on zeros, have shown."""

    columns: tuple[Column, ...]
    """The columns in the shapes in which workers use them."""
    num_classes: int | None
    """Of a classifier."""
    prediction_key: str | None
    """Where the module's output has the tensor that loss and prediction mean; None: it is one."""
    metrics: Mapping[str, Any] | None
    """Those of the request, with a metric in place of each name."""


def check_rows(
    checked: CheckedRequest,
    table: RowTable,
    shards: Items[SpooledShard],
    sink: Callable[[Mapping[str, Any]], None] | None = None,
) -> CheckedRows:
    """See that the rows can be used, that the module takes them, and the loss its output.

    ``sink`` gets the graph of what the module did, see `report.module_graph`; None: nobody. Raises
    DataError about rows, with column, count and an example, and what `dry_run` raises.
    """
    request = checked.request
    columns = shaped(table.columns(shards), request.input_shapes)
    objective = checked.objective

    def run(seen: AbstractContextManager[None] | None = None) -> DryRun:
        return dry_run(checked.module, columns, request, objective, checked.weights, seen=seen)

    try:
        found = run() if sink is None else traced_run(run, checked.module, sink)
    except ConfigError as error:
        weights, cause = checked.weights, error.__cause__
        if weights is None or "meta" not in str(cause):
            raise
        # Code beside torch's operations has met a parameter that is not there.
        logger.info("the driver makes the whole module to run it: %s", cause)
        weights.fill(checked.module)
        found = run()
    num_classes, key, metrics = found
    check_stages(checked.module, request.config.parallelism, columns)
    if num_classes is not None and request.label_col is not None:
        check_labels(table, request.label_col, num_classes, request.num_inputs, shards)
    return CheckedRows(
        columns=columns, num_classes=num_classes, prediction_key=key, metrics=metrics
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
    table: RowTable, label_col: str, num_classes: int, index: int, shards: Items[SpooledShard]
) -> None:
    """Refuse labels outside the classes, as far as they are known; raises DataError."""
    found = table.labels_outside(label_col, num_classes, index, shards)
    if found is not None:
        raise DataError(
            f'column "{label_col}" has {found[0]} label(s) outside the {num_classes} classes of '
            f"the module's output, 0 to {num_classes - 1} ({found[1]}); mend the labels or widen "
            "the module's output"
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


def none_for_validation(request: FitRequest, num_rows: int) -> str:
    """What has become of the rows for validation that were asked for, where there are none."""
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


def traced_run(
    run: Callable[[AbstractContextManager[None] | None], T],
    module: nn.Module,
    sink: Callable[[Mapping[str, Any]], None],
) -> T:
    """What ``run`` gives; ``sink`` gets the graph of what the module did in the given block."""
    try:
        return run(traced(module, sink))
    except ConfigError as error:
        # A compiled module, for one, may fail only because it is looked at; a layer of torch's
        # does not, nor does code that raises errors of its own.
        cause = error.__cause__
        failed = None if cause is None else failed_layer(cause, module)
        if not isinstance(cause, RuntimeError) or (failed is not None and failed.is_torchs):
            raise
        return run(None)


DryRun = tuple[int | None, str | None, Mapping[str, Any] | None]


def dry_run(
    module: nn.Module,
    columns: Items[Column],
    request: FitRequest,
    objective: LossFunction,
    weights: RecordedWeights | None = None,
    seen: AbstractContextManager[None] | None = None,
) -> DryRun:
    """Run the module on two rows of zeros: it must take the features, and the loss its output.

    This also initializes lazy modules. ``weights`` are those of parameters on the meta device;
    the module runs in the block of ``seen``.

    Returns:
        The number of classes, if it is a classifier; where its output has the tensor that loss
        and prediction mean (None: the output is one); and the metrics, see `named_metrics`.

    Raises:
        ConfigError: the module does not take the features, its output is not a classifier's, or
            the loss cannot compare it with the label.
    """
    import torch

    from sparkdl.data.collate import example_arguments
    from sparkdl.train.objective.named_metrics import resolved
    from sparkdl.train.objective.training_step import StepLoss, taken

    features = [column for column in columns if column.role == "feature"]
    was_training, config = module.training, request.config
    uses = None
    if config.parallelism is not None:
        from sparkdl.sync.divided.outside_uses import OutsideUses

        uses = OutsideUses(module, config.parallelism)
    try:
        # Lazy modules get their weights now.
        with (
            torch.no_grad(),
            borrowed_generator(config.seed),
            _there(weights),
            uses or nullcontext(),
            seen or nullcontext(),  # after the layout was found: that passes by layers with hooks
        ):
            output = example_arguments(features).call(module.eval())
    except Exception as error:
        raise ConfigError(refusal(error, module, features)) from error
    finally:
        module.train(was_training)
    if uses is not None:
        uses.check()
    meant = taken(objective.shown if isinstance(objective, StepLoss) else objective, output)
    num_classes = _num_classes(meant) if config.task == "classification" else None
    if not isinstance(objective, StepLoss) and (config.task != "custom" or request.labels):
        _try_loss(objective, meant, columns)
    metrics = resolved(config.metrics, objective, meant)
    return num_classes, None if meant is output else "logits", metrics


def _there(weights: RecordedWeights | None) -> AbstractContextManager[None]:
    """Lets a module compute whose parameters may be on the meta device."""
    from sparkdl.serialization.recorded.lending import lent

    return nullcontext() if weights is None else lent(weights)


def _try_loss(loss: LossFunction, output: Any, columns: Items[Column]) -> None:
    """Compare the output for two rows of zeros with two labels of zeros.

    A function of the user's is not tried: it may refuse zeros that the data does not hold.
    """
    from sparkdl.data.collate import example_arguments
    from sparkdl.train.objective.label_losses import LossSum
    from sparkdl.train.objective.loss import ModuleLoss

    labels = [column for column in columns if column.role == "label"]
    if not labels:
        return
    targets = example_arguments([replace(label, argument=None) for label in labels]).values
    if isinstance(loss, ModuleLoss):
        _try_one(loss, output, targets[0], labels[0])
    elif isinstance(loss, LossSum):
        by_label = {name: (part, value) for name, part, value in loss.pairs(output)}
        for label, target in zip(labels, targets, strict=True):
            part, value = by_label[str(label.argument)]
            if isinstance(part, ModuleLoss):
                _try_one(part, value, target, label)


def _try_one(loss: ModuleLoss, output: Any, target: torch.Tensor, label: Column) -> None:
    import torch

    from sparkdl.train.objective.loss import ClassLoss, shape_text

    shape = tuple(output.shape[1:]) if isinstance(output, torch.Tensor) else None
    if isinstance(loss, ClassLoss) and shape in ((), (1,)):
        raise ConfigError(
            f"the module has one output, {shape_text(('batch', *shape))}, but the loss compares "
            "one for each class; give the module two, or use loss='bce_with_logits'"
        )
    try:
        with torch.no_grad():
            loss(output, target, None)
        ones = output.float().sum(dim=1) - 1 if isinstance(loss, ClassLoss) else None
        if ones is not None and (output >= 0).all() and (ones.abs() < 1e-3).all():
            logger.warning(
                "the module seems to end in a softmax, but the loss takes what comes before it "
                "(logits), and learns slowly otherwise; leave the softmax out: transform applies it"
            )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f'the loss cannot compare the module\'s output with "{label.name}" {label.dtype} '
            f"{shape_text(('batch', *label.shape))}: {type(error).__name__}: {error}; adapt "
            "module or loss"
        ) from error


def _num_classes(output: Any) -> int:
    import torch

    if not isinstance(output, torch.Tensor):
        raise ConfigError(
            f"a classifier's module must return a tensor (batch, classes); it returned "
            f"{type(output).__name__}; use TorchEstimator for other outputs"
        )
    return 2 if output.ndim == 1 or output.shape[1] == 1 else int(output.shape[1])


def check_empty_batches(
    module: nn.Module,
    plan: TrainPlan,
    config: TrainConfig,
    weights: RecordedWeights | None = None,
) -> None:
    """Refuse batches without rows that the module does not take; raises ConfigError."""
    import torch

    from sparkdl.data.collate import example_arguments
    from sparkdl.sync.frozen_layers import evaluation_mode

    fewest = plan.fewest_in_a_step
    has_empty = plan.world_size > 1 and fewest < config.gradient_accumulation_steps
    gathers = config.parallelism is not None and config.parallelism.num_shards > 1
    if not (gathers or (config.sync_batch_norm and has_empty)):
        return
    features = [column for column in plan.columns if column.role == "feature"]
    try:
        with torch.no_grad(), borrowed_generator(), evaluation_mode(module), _there(weights):
            example_arguments(features, 0).call(module)
    except Exception as error:
        what = f"parallelism=Mesh({config.parallelism})" if gathers else "syncBatchNorm"
        raise ConfigError(
            f"with {what} workers whose rows have run out train on batches without rows, "
            f"which the module does not take: {type(error).__name__}: {error}; adapt it, for "
            "example by torch.flatten(x, 1) in place of x.view(len(x), -1), or raise batchSize"
        ) from error


ROWS = 2
"""Rows of zeros in a dry run."""
_OF_ROWS = re.compile(rf"(\((?=\d+x)|input(?: of size:? ?)?\[|size: \[){ROWS}(?=x|, |\])")
"""Where torch's messages have the number of rows."""
_TORCHS = (RuntimeError, IndexError, NotImplementedError, TypeError)
"""What torch raises if it cannot use a tensor; other errors are the module's own."""


@dataclass(frozen=True)
class FailedLayer:
    """The innermost layer that was running when a module failed."""

    name: str
    """Its path in the module, empty for the module itself."""
    layer: nn.Module
    given: str
    """The tensors that it got."""

    @property
    def is_torchs(self) -> bool:
        """True if it is a layer of torch's own."""
        return type(self.layer).__module__.startswith("torch.nn.")


def failed_layer(error: BaseException, module: nn.Module) -> FailedLayer | None:
    """The layer in whose ``forward`` an error was raised, by the error's traceback."""
    from torch import nn

    names, found = {part: name for name, part in module.named_modules()}, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, values = frame.f_code, frame.f_locals
        layer = values.get("self")
        if code.co_name == "forward" and isinstance(layer, nn.Module) and layer in names:
            arguments = [values.get(name) for name in code.co_varnames[1 : code.co_argcount]]
            given = ", ".join(shown for value in arguments if (shown := _shown_tensor(value)))
            found = FailedLayer(names[layer], layer, given)
    return found


def _shown_tensor(value: object) -> str:
    import torch

    from sparkdl.train.objective.loss import shape_text

    if not isinstance(value, torch.Tensor):
        return ""
    shape: list[object] = list(value.shape)
    if shape and value.shape[0] == ROWS:
        shape[0] = "batch"
    return f"{str(value.dtype).removeprefix('torch.')} {shape_text(shape)}"


def refusal(error: Exception, module: nn.Module, features: Items[Column]) -> str:
    """One sentence: what the module got, what failed in which layer, and what to do."""
    shown = ", ".join(_shown_input(column) for column in features)
    failed = failed_layer(error, module)
    message = _OF_ROWS.sub(r"\1batch", str(error))
    what = f"{type(error).__name__}: {message}"
    if failed is not None and failed.is_torchs and failed.given:
        place = f"layer {failed.name}, " * bool(failed.name)
        what = f"{place}{failed.layer}, got {failed.given}: {message}"
    if not isinstance(error, _TORCHS):
        return f"the module's forward failed on the features ({shown}): {what}; correct forward"
    whole = [f'"{c.name}" ({c.dtype})' for c in features if not c.dtype.startswith("float")]
    cast = f"call .float() on {', '.join(whole)} in forward, " * bool(whole)
    return (
        f"the module cannot take the features ({shown}): {what}; {cast}adapt the module, or set "
        "inputShape"
    )


def _shown_input(column: Column) -> str:
    from sparkdl.train.objective.loss import shape_text

    is_sequence = isinstance(column.kind, Sequence)
    shape = ("batch", *(("length",) * is_sequence), *column.shape)
    name = "" if column.argument is None else f"{column.argument}="
    return f'{name}"{column.name}" {column.dtype} {shape_text(shape)}'

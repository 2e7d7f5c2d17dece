"""What does the driver see of a module before it trains? It runs it on rows of zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column, TrainPlan
from sparkdl.errors import ConfigError
from sparkdl.inputs import Sequence
from sparkdl.report.module_graph import traced
from sparkdl.runtime.process import borrowed_generator
from sparkdl.spark.run.run import FitRequest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.train.objective.loss import LossFunction, ModuleLoss


@dataclass(frozen=True)
class Shown:
    """What a run on zeros shows of a module."""

    num_classes: int | None
    """Of a classifier."""
    prediction_key: str | None
    """Where the module's output has the tensor that loss and prediction mean; None: it is one."""


def watched_run(
    module: nn.Module,
    columns: Items[Column],
    request: FitRequest,
    sink: Callable[[Mapping[str, Any]], None],
) -> Shown:
    """`dry_run`; ``sink`` gets the graph of what the module did, see `report.graph`."""
    try:
        with traced(module, sink):
            return dry_run(module, columns, request)
    except ConfigError:  # a compiled module, for one, may fail only because it is looked at
        return dry_run(module, columns, request)


def dry_run(module: nn.Module, columns: Items[Column], request: FitRequest) -> Shown:
    """Run the module on two rows of zeros: it must take the features, and the loss its output.

    This also initializes lazy modules.

    Raises:
        ConfigError: the module does not take the features, its output is not a classifier's, or
            the loss cannot compare it with the label.
    """
    import torch

    from sparkdl.data.collate import example_arguments
    from sparkdl.train.objective.label_losses import loss_of
    from sparkdl.train.objective.training_step import StepLoss, objective_of, taken

    features = [column for column in columns if column.role == "feature"]
    was_training = module.training
    try:
        # Lazy modules get their weights now.
        with torch.no_grad(), borrowed_generator(request.config.seed):
            output = example_arguments(features).call(module.eval())
    except Exception as error:
        shown = ", ".join(_shown_input(column) for column in features)
        whole = ", ".join(f'"{c.name}"' for c in features if not c.dtype.startswith("float"))
        raise ConfigError(
            f"the module cannot take the features ({shown}): {type(error).__name__}: {error}; "
            f"adapt the module, {f'cast {whole} to float, ' * bool(whole)}or set inputShape"
        ) from error
    finally:
        module.train(was_training)
    config = request.config
    meant = taken(loss_of(config), output)
    num_classes = _num_classes(meant) if config.task == "classification" else None
    loss = objective_of(config, module)
    if not isinstance(loss, StepLoss) and (config.task != "custom" or request.labels):
        _try_loss(loss, meant, columns)
    return Shown(num_classes, None if meant is output else "logits")


def _shown_input(column: Column) -> str:
    is_sequence = isinstance(column.kind, Sequence)
    shape = ("batch", *(("length",) * is_sequence), *column.shape)
    name = "" if column.argument is None else f"{column.argument}="
    return f'{name}"{column.name}" {column.dtype} {shape}'


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
        for label, target in zip(labels, targets, strict=True):
            name = str(label.argument)
            part = loss.part(name)
            if isinstance(part, ModuleLoss):
                _try_one(part, loss.output_for(name, output), target, label)


def _try_one(loss: ModuleLoss, output: Any, target: torch.Tensor, label: Column) -> None:
    import torch

    from sparkdl.train.objective.loss import ClassLoss

    shape = tuple(output.shape[1:]) if isinstance(output, torch.Tensor) else None
    if isinstance(loss, ClassLoss) and shape in ((), (1,)):
        raise ConfigError(
            f"the module has one output, {('batch', *shape)}, but the loss compares one for each "
            "class; give the module two, or use loss='bce_with_logits'"
        )
    try:
        with torch.no_grad():
            loss(output, target, None)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f'the loss cannot compare the module\'s output with "{label.name}" {label.dtype} '
            f"{('batch', *label.shape)}: {type(error).__name__}: {error}; adapt module or loss"
        ) from error


def _num_classes(output: Any) -> int:
    import torch

    if not isinstance(output, torch.Tensor):
        raise ConfigError(
            f"a classifier's module must return a tensor (batch, classes); it returned "
            f"{type(output).__name__}; use TorchEstimator for other outputs"
        )
    return 2 if output.ndim == 1 or output.shape[1] == 1 else int(output.shape[1])


def check_empty_batches(module: nn.Module, plan: TrainPlan, config: TrainConfig) -> None:
    """With ``syncBatchNorm`` a worker without rows runs the module too: the others wait for it.

    Raises:
        ConfigError: that will happen, and the module does not take a batch without rows.
    """
    import torch

    from sparkdl.data.collate import example_arguments
    from sparkdl.sync.frozen_layers import evaluation_mode

    smallest = min(plan.rows_of(rank) for rank in range(plan.world_size)) // plan.steps_per_epoch
    has_empty = plan.world_size > 1 and smallest < config.gradient_accumulation_steps
    if not (config.sync_batch_norm and has_empty):
        return
    features = [column for column in plan.columns if column.role == "feature"]
    try:
        with torch.no_grad(), borrowed_generator(), evaluation_mode(module):
            example_arguments(features, 0).call(module)
    except Exception as error:
        raise ConfigError(
            "with syncBatchNorm workers whose rows have run out train on batches without rows, "
            f"which the module does not take: {type(error).__name__}: {error}; adapt it, for "
            "example by torch.flatten(x, 1) in place of x.view(len(x), -1), or raise batchSize"
        ) from error

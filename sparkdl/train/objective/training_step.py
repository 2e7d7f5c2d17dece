"""The value to minimize: a loss of what ``forward`` returns, or what a training step gives.

A training step is a function ``(module, inputs, target)``. It may run the module, or parts of it,
as often as it likes, as a GAN does; what it gives is treated as the value of a loss function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batch
from sparkdl.train.objective.label_losses import loss_of
from sparkdl.train.objective.lightning import TrainerStandIn, is_lightning
from sparkdl.train.objective.loss import CallableLoss, LossFunction, ModuleLoss

TrainingStep = Callable[[nn.Module, Any, Any], Any]
"""``(module, inputs, target)`` gives what a loss function of the user's may give; without a label
column ``target`` is None."""


class StepLoss(CallableLoss):
    """The value of a training step, as a loss."""

    def __init__(self, step: TrainingStep, shown: LossFunction) -> None:
        """Take the user's step; ``shown`` says what metrics see of the module's output."""
        super().__init__(lambda value, target: value)
        self.step = step
        self.shown = shown

    def to(self, device: torch.device) -> None:
        self.shown.to(device)

    def predictions(self, output: Any) -> Any:
        return self.shown.predictions(output)


def objective_of(config: TrainConfig, module: nn.Module, *, copies: bool = True) -> LossFunction:
    """Return what a run minimizes: the value of its training step if it has one, else its loss.

    Errors are those of `loss.resolve_loss`, as is ``copies``, and `lightning.check_module`.
    """
    loss = loss_of(config.loss, config.task, config.loss_weights, copies=copies)
    step = TrainerStandIn(module, config) if logs(config, module) else config.training_step
    return loss if step is None else StepLoss(step, loss)


def logs(config: TrainConfig, module: nn.Module) -> bool:
    """True if the module's own training step is used, which may log values for the history."""
    return config.training_step is None and is_lightning(module)


def run(loss: LossFunction, module: nn.Module, batch: Batch) -> Any:
    """Compute what ``loss`` is asked about: the module's output, or the training step's value."""
    if isinstance(loss, StepLoss):
        target = batch.target if batch.has_label else None
        with torch.enable_grad():  # also in evaluation: a penalty may be made of gradients
            return loss.step(module, batch.arguments.packed(), target)
    return taken(loss, batch.arguments.call(module))


def taken(loss: LossFunction, output: Any) -> Any:
    """Return the part of a module's output that a loss compares.

    A loss of torch's kind compares one tensor: of what Hugging Face's models return that is
    ``logits``. A function of the user's gets all.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else None
    return logits if logits is not None and isinstance(loss, ModuleLoss) else output


def output_of(loss: LossFunction, module: nn.Module, batch: Batch, value: Any) -> Any:
    """Return the output for metrics, given what `run` gave: always what ``forward`` returns."""
    if not isinstance(loss, StepLoss):
        return value
    return taken(loss.shown, batch.arguments.call(module))

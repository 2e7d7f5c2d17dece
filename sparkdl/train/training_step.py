"""What is minimized: a loss of what ``forward`` returns, or what a training step of the user's gives?

A training step is a function ``(module, inputs, target)``. It may run the module, or parts of it,
as often as it likes, as a GAN does; what it gives is treated as the value of a loss function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparkdl.data.batches import Batch
from sparkdl.train.loss import CallableLoss, LossFunction

TrainingStep = Callable[[nn.Module, Any, Any], Any]
"""``(module, inputs, target)`` gives what a loss function of the user's may give."""


class StepLoss(CallableLoss):
    """The value of a training step, as a loss."""

    def __init__(self, step: TrainingStep, shown: LossFunction) -> None:
        """Take a step in place of a loss.

        Args:
            step: the user's.
            shown: the loss that says what metrics see of the module's output.
        """
        super().__init__(_its_value)
        self.step = step
        self._shown = shown

    def to(self, device: torch.device) -> None:
        """See `LossFunction.to`."""
        self._shown.to(device)

    def predictions(self, output: Any) -> Any:
        """See `LossFunction.predictions`."""
        return self._shown.predictions(output)


def _its_value(value: Any, target: Any) -> Any:
    return value


def run(loss: LossFunction, module: nn.Module, batch: Batch) -> Any:
    """What ``loss`` is asked about: the module's output, or the value of the training step."""
    if isinstance(loss, StepLoss):
        return loss.step(module, batch.arguments.packed(), batch.target)
    return batch.arguments.call(module)


def output_of(loss: LossFunction, module: nn.Module, batch: Batch, value: Any) -> Any:
    """What metrics see, given what `run` gave: always what ``forward`` returns."""
    return batch.arguments.call(module) if isinstance(loss, StepLoss) else value

"""Those who watch training, and do not change it.

Callbacks are the user's observers, on every rank; the `Observer` is the worker's way to the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import nn

Phase = Literal["setup", "train", "evaluate", "checkpoint", "finish"]


class Observer(Protocol):
    """Where a rank reports what it does. Must be quick: `step` is called at every step."""

    def step(self, *, epoch: int, step: int, loss: float, rows: int) -> None:
        """A step was completed.

        Args:
            epoch: number of the epoch, from 1.
            step: completed steps of the run.
            loss: newest known loss of the global batch.
            rows: samples of this rank in the step.
        """

    def phase(self, name: Phase) -> None:
        """Another phase begins."""

    def clock(self, seconds: Mapping[str, float]) -> None:
        """Training begins; ``seconds`` grow with it, and say what its time is spent on."""

    def epoch(self, record: Mapping[str, float]) -> None:
        """An evaluation, such as that of an epoch's end; ``record`` is its entry in the history."""

    def confusion(self, epoch: float, counts: Sequence[Sequence[int]]) -> None:
        """What a classifier takes for what, after ``epoch``: rows by label and prediction."""


class NullObserver:
    """An observer that does nothing."""

    def step(self, *, epoch: int, step: int, loss: float, rows: int) -> None:
        pass

    def phase(self, name: Phase) -> None:
        pass

    def clock(self, seconds: Mapping[str, float]) -> None:
        pass

    def epoch(self, record: Mapping[str, float]) -> None:
        pass

    def confusion(self, epoch: float, counts: Sequence[Sequence[int]]) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class CallbackState:
    """What a callback sees of training."""

    rank: int
    world_size: int
    epoch: int
    """Completed epochs."""
    step: int
    """Completed steps of the run."""
    loss: float
    """Newest known loss of the global batch; NaN before the first step."""
    model: nn.Module
    """This rank's replica, to look at."""


class Callback:
    """Watches training on every rank; override what you need. It may not change training.

    Example::

        class PrintLoss(Callback):
            def on_epoch_end(self, state, record):
                if state.rank == 0:
                    print(record["epoch"], record["loss"])
    """

    def on_train_begin(self, state: CallbackState) -> None:
        """Training begins, or goes on after a restart."""

    def on_step_end(self, state: CallbackState) -> None:
        """A step was completed."""

    def on_epoch_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
        """An epoch was completed; ``record`` is its entry in the history."""

    def on_train_end(self, state: CallbackState) -> None:
        """Training is over; the model has its final weights."""

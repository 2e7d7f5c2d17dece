"""Those who watch training, and early stopping.

Callbacks are the user's observers, on every rank; the `Observer` is the worker's way to the
driver. Neither changes training. Early stopping does, and decides from values that are equal on
all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import nn

from sparkdl.config import EarlyStopping, TrainConfig
from sparkdl.errors import ConfigError

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
        """An epoch was completed; ``record`` is its entry in the history."""

    def confusion(self, epoch: int, counts: Sequence[Sequence[int]]) -> None:
        """What a classifier takes for what, after ``epoch``: rows by label and prediction."""


class NullObserver:
    """An observer that does nothing."""

    def step(self, *, epoch: int, step: int, loss: float, rows: int) -> None:
        """See `Observer.step`."""

    def phase(self, name: Phase) -> None:
        """See `Observer.phase`."""

    def clock(self, seconds: Mapping[str, float]) -> None:
        """See `Observer.clock`."""

    def epoch(self, record: Mapping[str, float]) -> None:
        """See `Observer.epoch`."""

    def confusion(self, epoch: int, counts: Sequence[Sequence[int]]) -> None:
        """See `Observer.confusion`."""


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


class EarlyStopper:
    """Decides after each epoch whether the monitored value still improves.

    Raises:
        ConfigError: the history has no such value.
    """

    def __init__(self, options: EarlyStopping, history_keys: Sequence[str]) -> None:
        if options.monitor not in history_keys:
            raise ConfigError(
                f"early stopping monitors {options.monitor!r}, but the history has only "
                f"{', '.join(history_keys)}; values that begin with 'val_' need validation rows"
            )
        self._options = options
        self._best: float | None = None
        self._num_epochs_without = 0

    def is_best(self, record: Mapping[str, float]) -> bool:
        """Take note of an epoch; True if it is the best so far. NaN is never an improvement."""
        value = record[self._options.monitor]
        if math.isfinite(value) and (self._best is None or self._gain(value) > 0):
            self._best = value
            self._num_epochs_without = 0
            return True
        self._num_epochs_without += 1
        return False

    @property
    def should_stop(self) -> bool:
        """True if patience is at its end."""
        return self._num_epochs_without >= self._options.patience

    def state_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"best": self._best, "num_epochs_without": self._num_epochs_without}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; an empty dict restores the beginning."""
        self._best = state.get("best")
        self._num_epochs_without = state.get("num_epochs_without", 0)

    def _gain(self, value: float) -> float:
        assert self._best is not None
        change = self._best - value if self._options.mode == "min" else value - self._best
        return change - self._options.min_delta


def make_stopper(config: TrainConfig, *, has_validation: bool) -> EarlyStopper | None:
    """What decides on early stopping, or None.

    Raises:
        ConfigError: what shall be monitored will not be in the history.
    """
    keys = ["loss", "learning_rate"]
    if has_validation:
        keys += ["val_loss", *(f"val_{name}" for name in config.metrics)]
    elif config.metrics:
        raise ConfigError(
            f"metrics {sorted(config.metrics)} are computed on validation rows, and there are "
            "none; name a validation column or fraction, or leave metrics out"
        )
    if config.early_stopping is None:
        return None
    return EarlyStopper(config.early_stopping, keys)

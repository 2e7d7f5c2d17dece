"""The progress of training, and the decisions at an epoch's end: values, equal on all ranks."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sparkdl.config import EarlyStopping, TrainConfig
from sparkdl.data.plan import TrainPlan
from sparkdl.errors import ConfigError, DataError, did_you_mean
from sparkdl.sync.population.population import Competition
from sparkdl.train.objective.divergence import diverged, warn_if_nan
from sparkdl.train.objective.label_losses import loss_record
from sparkdl.train.objective.named_metrics import metric_names

logger = logging.getLogger(__name__)

Record = dict[str, float]


@dataclass
class TrainState:
    """Counters and history of a run."""

    epoch: int = 0
    """Completed epochs, which is the number of the present one, from 0."""
    step: int = 0
    """Completed steps of the run."""
    step_in_epoch: int = 0
    """Completed steps of the present epoch."""
    rows_seen: int = 0
    """Samples that all ranks have used so far."""
    history: list[Record] = field(default_factory=list)
    """One record per evaluation, of which each epoch has one at its end."""
    stopped_early: bool = False
    early_stopping: dict[str, Any] = field(default_factory=dict)
    """``best``: the best value so far; ``num_without``: evaluations since then."""

    def is_complete(self, epochs: int, max_steps: int) -> bool:
        """True if nothing is left to train; ``max_steps`` of -1 is no limit."""
        return self.stopped_early or self.epoch >= epochs or 0 <= max_steps <= self.step

    def exceeds(self, epochs: int, max_steps: int) -> bool:
        """True if training has come further than it shall; ``max_steps`` of -1 is no limit."""
        begun = self.epoch + (self.step_in_epoch > 0)
        return begun > epochs or 0 <= max_steps < self.step

    def add_record(self, record: Record) -> None:
        """Append a record; those that are not before it are of a run that was cut short."""
        self.history = [old for old in self.history if old["epoch"] < record["epoch"]]
        self.history.append(record)

    def is_best(self, record: Record, stopping: EarlyStopping) -> bool:
        """Take note of a record; True if it is the best so far. NaN is never an improvement."""
        value, best = record[stopping.monitor], self.early_stopping.get("best")
        if math.isfinite(value) and (best is None or _gain(value, best, stopping) > 0):
            self.early_stopping = {"best": value, "num_without": 0}
            return True
        num_without = self.early_stopping.get("num_without", 0) + 1
        self.early_stopping = {"best": best, "num_without": num_without}
        self.stopped_early |= num_without >= stopping.patience
        return False

    def begin_epoch_anew(self) -> None:
        """Forget how far the epoch has come: other shards cannot tell which rows were used."""
        if self.step_in_epoch > 0:
            logger.warning(
                "the shards have changed: epoch %d begins anew after %d of its steps, with "
                "the weights of step %d",
                self.epoch + 1,
                self.step_in_epoch,
                self.step,
            )
        self.step_in_epoch = 0

    def state_dict(self) -> dict[str, Any]:
        """A copy as plain values."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> TrainState:
        """Inverse of `state_dict`."""
        return cls(**copy.deepcopy(state))


def _gain(value: float, best: float, stopping: EarlyStopping) -> float:
    return (best - value if stopping.direction == "min" else value - best) - stopping.min_delta


def check_monitored(config: TrainConfig, *, has_validation: bool, has_logs: bool = False) -> None:
    """Refuse metrics without rows for them, and early stopping by a value that is not there.

    Args:
        config: what the user asked for; a competition sets rows aside by itself.
        has_validation: True if there are rows for validation.
        has_logs: True if the module may log values of other names, which training shows.

    Raises:
        ConfigError: with the remedy.
    """
    has_validation |= isinstance(config.sync_strategy, Competition)
    keys, names = ["loss", "learning_rate"], metric_names(config.metrics, config.task)
    if config.training_metrics:
        keys += names
    if has_validation:
        keys += ["val_loss", *(f"val_{name}" for name in names)]
    elif config.metrics and not config.training_metrics:
        raise ConfigError(
            f"metrics {sorted(config.metrics)} are computed on validation rows, and there are "
            "none; name a validation column or fraction, set trainingMetrics, or leave metrics out"
        )
    if config.validation_interval is not None and not has_validation:
        raise ConfigError(
            "validationInterval asks for evaluations within epochs, and there are no validation "
            "rows; set validationFraction, or name a validation column"
        )
    if config.early_stopping is not None and not has_logs:
        check_recorded(config.early_stopping, keys)


def check_recorded(stopping: EarlyStopping, names: Iterable[str]) -> None:
    """Refuse early stopping by a value that is not among ``names``.

    Raises:
        ConfigError: with the names that there are.
    """
    known = list(names)
    if stopping.monitor not in known:
        remedy = "; values that begin with 'val_' need validation rows (validationFraction=0.1)"
        if any(name.startswith("val_") for name in known):
            remedy = did_you_mean(stopping.monitor, known)
        raise ConfigError(
            f"early stopping monitors {stopping.monitor!r}, but the history has only "
            f"{', '.join(known)}{remedy}"
        )


def record_of_weights(
    history: Sequence[Record], stopping: EarlyStopping | None
) -> tuple[Record, str | None] | None:
    """The entry of a run's history whose weights the run gives back, and what it is the best in.

    Returns:
        The entry, and the monitored value's name unless it is just the last one; None if there is
        no entry.
    """
    if not history:
        return None
    if stopping is None or not stopping.restore_best:
        return history[-1], None
    state, found = TrainState(), None
    for record in history:
        if stopping.monitor in record and state.is_best(record, stopping):
            found = record
    return (history[-1], None) if found is None else (found, stopping.monitor)


class EpochBook:
    """Counters, history, early stopping and the best weights of a run.

    A gang's ranks keep equal ones, and the driver of a run in rounds keeps one. The history grows
    by evaluations: one at each epoch's end, and those that ``validation_interval`` asks for, when a
    round is closed. Everything that depends on how good the model is follows from their records.

    Attributes:
        state: what the counters say.
        best_model: weights of the best evaluation, if they are wanted back.
        is_evaluated: the record of the present step was entered.
        is_evaluation_due: an evaluation was due at one of the steps since the last one.
        is_checkpoint_due: a checkpoint was due at one of the steps since the last one.
    """

    def __init__(self, config: TrainConfig, plan: TrainPlan, *, has_logs: bool = False) -> None:
        """Open the book of a run that begins; ``has_logs`` is explained at `check_monitored`.

        Raises:
            ConfigError: what early stopping shall monitor will not be in the history.
        """
        self.state = TrainState()
        self.best_model: dict[str, Any] | None = None
        self.is_evaluated = False
        self.is_evaluation_due = False
        self.is_checkpoint_due = False
        self._plan = plan
        self._stopping = config.early_stopping
        self._interval = config.validation_interval
        self._may_skip_steps = config.precision == "fp16"
        has_validation = plan.num_validation_rows > 0
        check_monitored(config, has_validation=has_validation, has_logs=has_logs)

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to train."""
        return self.state.is_complete(self._plan.end_epoch, self._plan.end_step)

    @property
    def num_steps_left(self) -> int:
        """Steps to the end of the epoch, or to the last step of the run."""
        if self.state.stopped_early:
            return 0
        left = self._plan.steps_per_epoch - self.state.step_in_epoch
        if self._plan.end_step >= 0:
            left = min(left, self._plan.end_step - self.state.step)
        return left

    @property
    def is_epoch_over(self) -> bool:
        """True if the epoch, or the run, has no further step."""
        return self.num_steps_left <= 0

    def count(self, steps: int, rows: int, is_due: Callable[[int], bool] | None) -> None:
        """Count completed steps, and the samples of all ranks in them.

        ``is_due`` tells after which number of completed steps a checkpoint is due; None: never.
        """
        state = self.state
        self.is_evaluated = False
        done = range(state.step + 1, state.step + steps + 1)
        state.step += steps
        state.step_in_epoch += steps
        state.rows_seen += rows
        self.is_checkpoint_due |= is_due is not None and any(map(is_due, done))
        every = self._interval
        self.is_evaluation_due |= every is not None and any(n % every == 0 for n in done)

    def record(
        self,
        sums: Sequence[float],
        labels: tuple[str, ...],
        *,
        learning_rate: float,
        seconds: float,
    ) -> Record:
        """The entry of the present epoch, as far as it has come, without validation rows.

        Its ``epoch`` is the number of the epoch at its end, and within it that of the completed
        ones with a fraction: 1.25 is a quarter of the second epoch. The record of an epoch that the
        end of the run cuts short has the epoch's number, unless an evaluation is due there anyhow:
        if the run is ever continued, that of the whole epoch takes its place.

        Args:
            sums: weighted losses and weights of the epoch's samples so far, then each label's
                losses.
            labels: names of these.
            learning_rate: that of the first parameter group.
            seconds: time that the epoch has taken so far.

        Raises:
            TrainingDiverged: the loss is not finite.
            DataError: the epoch had no row that counts.
        """
        losses = loss_record(list(sums), labels)
        if sums[1] > 0 and not math.isfinite(losses["loss"]):
            raise diverged(losses["loss"], f"in epoch {self.state.epoch + 1}")
        state, num_steps = self.state, self._plan.steps_per_epoch
        is_whole = state.step_in_epoch == num_steps
        if is_whole and sums[1] == 0 and not self._may_skip_steps:
            raise DataError(
                f"no row of epoch {self.state.epoch + 1} counts: all weights are 0, or all labels "
                "are ignored; check weightCol (shares below 1 that were cast to whole numbers are "
                "0) and the labels"
            )
        counts_as_whole = is_whole or (self.is_epoch_over and not self.is_evaluation_due)
        return {
            "epoch": state.epoch + (1 if counts_as_whole else state.step_in_epoch / num_steps),
            "steps": state.step_in_epoch,
            **losses,
            "learning_rate": learning_rate,
            "seconds": seconds,
        }

    def enter(self, record: Record, weights: Callable[[], dict[str, Any]]) -> bool:
        """Enter the record of an evaluation; after an epoch's last step go on to the next epoch.

        ``weights`` gives a copy of the present weights, in case they are the best.

        Returns:
            True if these weights are the result unless better ones come.

        Raises:
            ConfigError: the module has not logged what early stopping monitors.
        """
        state, is_kept = self.state, True
        self.is_evaluated, self.is_evaluation_due = True, False
        state.add_record(record)
        if self._stopping is not None:
            check_recorded(self._stopping, record)
            before = [old.get(self._stopping.monitor, 0.0) for old in state.history[:-1]]
            if not any(map(math.isnan, before)):
                what = "early stopping" if self._stopping.may_stop else "the search"
                warn_if_nan(what, self._stopping.monitor, record)
            is_best = state.is_best(record, self._stopping)
            is_kept = is_best or not self._stopping.restore_best
            if is_best and self._stopping.restore_best:
                self.best_model = weights()
        if state.step_in_epoch == self._plan.steps_per_epoch:
            state.epoch += 1
            state.step_in_epoch = 0
        return is_kept

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint must hold."""
        return {"state": self.state.state_dict(), "best_model": self.best_model}

    def load_state_dict(self, shared: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.state = TrainState.from_state_dict(shared["state"])
        self.best_model = shared["best_model"]

"""How far has training come? Plain values, equal on all ranks, that travel in checkpoints."""

from __future__ import annotations

import copy
import logging
from dataclasses import asdict, dataclass, field
from typing import Any

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
    """One record per epoch."""
    stopped_early: bool = False
    early_stopping: dict[str, Any] = field(default_factory=dict)
    """What `callbacks.EarlyStopper` must remember."""

    def is_complete(self, epochs: int, max_steps: int) -> bool:
        """Whether nothing is left to train; ``max_steps`` of -1 is no limit."""
        return self.stopped_early or self.epoch >= epochs or 0 <= max_steps <= self.step

    def exceeds(self, epochs: int, max_steps: int) -> bool:
        """Whether training has come further than it shall; ``max_steps`` of -1 is no limit."""
        begun = self.epoch + (self.step_in_epoch > 0)
        return begun > epochs or 0 <= max_steps < self.step

    def add_record(self, record: Record) -> None:
        """Append an epoch's record; it replaces the one that an earlier limit cut short."""
        self.history = [old for old in self.history if old["epoch"] != record["epoch"]]
        self.history.append(record)

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

"""The points of a run at which its optional parts are called."""

from __future__ import annotations

from typing import Any

import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.data.batches import Batch


class Part:
    """A part that a run may do without, such as Lightning's hooks, or looks at layers.

    Whoever trains calls the methods in the order in which they stand here. All do nothing.
    """

    def join(self, optimizer: torch.optim.Optimizer, scheduler: Any, comm: Communicator) -> None:
        """Get to know what updates the weights, and the ranks that share gradients."""

    def place(self, rank: int, world_size: int) -> None:
        """Get to know whose rows are trained on."""

    def begin_fit(self) -> None:
        """Begin the run, or go on after a restart."""

    def move_to(self, epoch: int, step: int, step_in_epoch: int) -> None:
        """Get to know where training begins or goes on; see `TrainState` for the numbers."""

    def begin_epoch(self) -> None:
        """Begin an epoch."""

    def begin_step(self, step: int, batch: Batch) -> None:
        """Begin step number ``step`` of the run; the batch may be without samples."""

    def see(self, batch: Batch) -> None:
        """See the batch as the module gets it."""

    def before_clipping(self, optimizer: torch.optim.Optimizer) -> None:
        """See the gradients of all ranks' samples."""

    def before_update(self, step: int) -> None:
        """See the gradients as the optimizer gets them."""

    def after_update(self) -> None:
        """See the weights that the optimizer has changed."""

    def end_step(self, batch: Batch) -> None:
        """End the step, as far as this rank knows."""

    def after_step(self, step: int, observer: Any) -> None:
        """See the weights that the strategy has made of it; tell an `Observer` what was seen."""

    def evaluated(
        self, record: dict[str, float], comm: Communicator, *, is_epoch_over: bool
    ) -> None:
        """Enter values of the epoch into its record. Collective."""

    def end_epoch(self) -> None:
        """End an epoch in which the run ends early."""

    def end_fit(self) -> None:
        """End a run that was completed."""

    def close(self) -> None:
        """End, whatever has happened."""

"""What of a replica must survive a restart, and how does it come back?"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from sparkdl.sync.strategy import Synchronizer
from sparkdl.train.callbacks import EarlyStopper
from sparkdl.train.modules.precision import NumberFormat
from sparkdl.train.objective.divergence import LossWatch
from sparkdl.train.random_state import random_state, seed_everything, set_random_state
from sparkdl.train.state import TrainState


class CheckpointSink(Protocol):
    """Where checkpoints go. Every rank calls `save` at the same steps."""

    def due(self, step: int) -> bool:
        """Whether a checkpoint is wanted after ``step`` completed steps; equal on all ranks."""

    def save(self, step: int, shared: dict[str, Any], rank_state: dict[str, Any]) -> None:
        """Copy all tensors before returning; write them afterwards."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A checkpoint as the training loop sees it. Its tensors may become the replica's own."""

    step: int
    """Completed steps."""
    shared: dict[str, Any]
    """Equal on all ranks; rank 0's is kept."""
    rank_state: dict[str, Any] | None
    """This rank's own; None when the shards are not those of the checkpoint."""


@dataclass(kw_only=True)
class Replica:
    """One worker's copy of everything that training changes."""

    module: nn.Module
    synchronizer: Synchronizer
    number_format: NumberFormat
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    stopper: EarlyStopper | None
    state: TrainState
    epoch_sums: torch.Tensor
    """This rank's weighted losses and weights of the present epoch, and the losses of each label
    where there are several, float64."""
    best_model: dict[str, Any] | None = None
    """Weights of the best epoch, if they are wanted back."""
    watch: LossWatch | None = None
    """What the loss is compared with."""

    def snapshot(self) -> ResumePoint:
        """The present state; its tensors are the replica's own, not copies."""
        return ResumePoint(
            step=self.state.step, shared=self._shared_state(), rank_state=self._rank_state()
        )

    def keep_best(self) -> None:
        """Remember the present weights as the best."""
        self.best_model = copy.deepcopy(self.module.state_dict())

    def restore(self, point: ResumePoint, *, seed: int, rank: int) -> None:
        """Go back to ``point``; bit-exact if it holds this rank's own state.

        Otherwise an epoch that was under way is begun anew with the checkpoint's weights, and
        the rank draws random numbers that no rank has drawn yet.
        """
        shared = point.shared
        self.module.load_state_dict(shared["model"])
        self.synchronizer.optimizer.load_state_dict(shared["optimizer"])
        self.synchronizer.load_state_dict(shared["strategy"])
        self.number_format.load_state_dict(shared["scaler"])
        if self.scheduler is not None and shared["scheduler"] is not None:
            self.scheduler.load_state_dict(shared["scheduler"])
        self.state = TrainState.from_state_dict(shared["state"])
        self.best_model = shared["best_model"]
        if self.stopper is not None:
            self.stopper.load_state_dict(self.state.early_stopping)
        if point.rank_state is not None:
            self._restore_rank(point.rank_state)
            return
        self.state.begin_epoch_anew()
        seed_everything(seed, rank, self.state.step)

    def _restore_rank(self, rank_state: dict[str, Any]) -> None:
        buffers = dict(self.module.named_buffers())
        for name, value in rank_state["buffers"].items():
            buffers[name].detach().copy_(value)
        own = rank_state["own"]
        if own is not None:
            self.number_format.load_state_dict(own["scaler"])
            if self.scheduler is not None and own["scheduler"] is not None:
                self.scheduler.load_state_dict(own["scheduler"])
            if own["optimizer"] is not None:
                self.synchronizer.optimizer.load_state_dict(own["optimizer"])
        if self.watch is not None:
            self.watch.load_state_dict(rank_state["watch"])
        self.synchronizer.load_rank_state_dict(rank_state["strategy"])
        self.epoch_sums.copy_(rank_state["epoch_sums"])
        set_random_state(rank_state["rng"])

    def _shared_state(self) -> dict[str, Any]:
        if self.stopper is not None:
            self.state.early_stopping = self.stopper.state_dict()
        return {
            "model": self.module.state_dict(),
            "optimizer": self.synchronizer.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": self.number_format.state_dict(),
            "strategy": self.synchronizer.state_dict(),
            "state": self.state.state_dict(),
            "best_model": self.best_model,
        }

    def _rank_state(self) -> dict[str, Any]:
        return {
            "rng": random_state(),
            # Running statistics differ between ranks until the epoch ends.
            "buffers": {name: value.detach() for name, value in self.module.named_buffers()},
            "strategy": self.synchronizer.rank_state_dict(),
            "own": self._own_state(),
            "watch": None if self.watch is None else self.watch.state_dict(),
            "epoch_sums": self.epoch_sums,
        }

    def _own_state(self) -> dict[str, Any] | None:
        """What is equal on all ranks unless they train apart (fp16 skips steps on some only)."""
        synchronizer = self.synchronizer
        if not synchronizer.trains_apart:
            return None
        return {
            "scaler": self.number_format.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "optimizer": synchronizer.optimizer.state_dict()
            if synchronizer.keeps_optimizer
            else None,
        }

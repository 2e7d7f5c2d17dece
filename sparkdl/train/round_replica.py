"""How does a process train one shard for one round, as a pure function of state and shard?

Whatever a process did before, the same state, shard and round give the same result: that is what
lets Spark run a lost task again, anywhere. A process keeps its module, optimizer and memory warm
between rounds and shards; everything that matters is overwritten at the start of each.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batch, Batches, Shards, sequential_batches
from sparkdl.data.plan import RoundPart, TrainPlan
from sparkdl.sync.apart import ApartSynchronizer
from sparkdl.sync.frozen_layers import still_names, training_mode
from sparkdl.sync.population.hyperparameters import set_values
from sparkdl.train.callbacks import CallbackState, Observer
from sparkdl.train.modules.memory_format import in_memory_format
from sparkdl.train.modules.precision import NumberFormat
from sparkdl.train.objective.label_losses import part_names
from sparkdl.train.objective.metrics import Metrics
from sparkdl.train.objective.training_step import StepLoss, objective_of
from sparkdl.train.optimizers.optimizers import make_scheduler, resolve_optimizer
from sparkdl.train.random_state import deterministic_algorithms, seed_everything
from sparkdl.train.step import TrainStep
from sparkdl.train.time_spent import Clock
from sparkdl.train.validation import measure


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """What a replica has come to."""

    state: dict[str, Any]
    """``model``, ``optimizer``, ``scheduler``, ``scaler``: the replica's own tensors."""
    loss_sum: float
    """Weighted losses over the samples of the round."""
    weight: float
    """Weights of the samples of the round; their number where there are no weights."""
    rows: int
    seconds: float
    """Time that the steps took."""
    spent: dict[str, float]
    """What that time was spent on, by `clock.SPENT_ON`."""
    label_sums: tuple[float, ...] = ()
    """The losses of each label, where there are several."""


class RoundReplica:
    """A process's replica, kept warm.

    Args:
        module: the module; its weights do not matter, since each round brings its own.
        config: what the user asked for.
        plan: the numbers that follow from it; each shard is a rank of its own.
        device: where this process computes.
    """

    def __init__(
        self, module: nn.Module, config: TrainConfig, plan: TrainPlan, device: torch.device
    ) -> None:
        self._config = config
        self._plan = plan
        self._device = device
        self._module = module.to(device)
        self._loss = objective_of(config, module)
        self._loss.to(device)
        make_optimizer = resolve_optimizer(config, self._module)
        self._synchronizer = ApartSynchronizer(self._module, make_optimizer, LocalCommunicator())
        self._format = NumberFormat(config.precision, device)
        self._schedule = make_scheduler(
            config, self._synchronizer.optimizer, make_optimizer, plan.steps_per_epoch
        )
        self._scheduler = None if self._schedule is None else self._schedule.scheduler
        self._metrics = Metrics(
            config.metrics,
            config.task,
            self._loss.predictions,
            device,
            counts_classes=not isinstance(self._loss, StepLoss),
        )
        self._first = copy.deepcopy(self._state())

    def train(
        self,
        state: dict[str, Any],
        shard_id: int,
        shards: Shards,
        part: RoundPart,
        observer: Observer,
        *,
        hyperparameters: Mapping[str, float] | None = None,
    ) -> RoundOutcome:
        """Train from ``state`` on the steps of ``part``.

        Args:
            state: where the round begins: ``model``, and what an earlier round's outcome held
                besides; an optimizer that is not in it begins anew.
            shard_id: the plan's rank whose shards these are.
            shards: its data.
            part: the steps.
            observer: is told of each step.
            hyperparameters: numbers to give to the optimizer first; see `hyperparameters`.

        Raises:
            TrainingDiverged: the loss is not finite.
            ConfigError: the optimizer has no such hyperparameters.
        """
        self._load(state)
        if hyperparameters:
            set_values(self._synchronizer.optimizer, self._scheduler, hyperparameters)
        training_mode(self._module, self._config.frozen_layers)
        seed_everything(self._config.seed, shard_id, part.step)
        clock = Clock()
        step = self._make_step(clock)
        batches = iter(
            Batches(
                shards,
                self._plan,
                shard_id,
                seed=self._config.seed,
                epoch=part.epoch,
                start_step=part.step_in_epoch,
                num_together=self._config.group_by_length,
                pin_memory=self._device.type == "cuda",
            )
        )
        rows, began = 0, time.perf_counter()
        label_sums = torch.zeros(len(part_names(self._loss)), dtype=torch.float64)
        with (
            contextlib.closing(batches),
            deterministic_algorithms(self._config.deterministic),
            in_memory_format(self._module, self._config.memory_format),
        ):
            for number in range(part.num_steps):
                batch = next(batches)
                clock.lap("data")
                sums = step(self._moved(batch), max(1, batch.num_rows), part.step + number)
                label_sums += sums.local[2:].cpu()
                self._synchronizer.after_step(part.step + number)
                rows += batch.num_rows
                self._tell(observer, step, shard_id, part, number, batch.num_rows)
                clock.lap("other")
        loss_sum, weight = self._synchronizer.round_sums.tolist()
        return RoundOutcome(
            state=self._state(),
            loss_sum=loss_sum,
            weight=weight,
            rows=rows,
            seconds=time.perf_counter() - began,
            spent=clock.seconds,
            label_sums=tuple(label_sums.tolist()),
        )

    def moving(self, state: dict[str, Any]) -> dict[str, Any]:
        """An outcome's state without those weights and buffers that training has left alone."""
        still = still_names(self._module)
        model = {name: value for name, value in state["model"].items() if name not in still}
        return {**state, "model": model}

    def evaluate(
        self, state: dict[str, Any], validation: Shards
    ) -> tuple[tuple[float, ...], bytes]:
        """Measure ``state`` on this shard's validation rows.

        Returns:
            The sums that `train.evaluate.measure` gives, and the metrics' states.
        """
        self._module.load_state_dict(state["model"])
        with in_memory_format(self._module, self._config.memory_format):
            sums = measure(
                self._module,
                sequential_batches(validation, self._plan),
                self._loss,
                self._metrics,
                self._format,
                self._device,
            )
        return tuple(sums.tolist()), self._metrics.states()

    def _state(self) -> dict[str, Any]:
        return {
            "model": self._module.state_dict(),
            "optimizer": self._synchronizer.optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "scaler": self._format.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Overwrite everything that an earlier round has changed."""
        whole = {**self._first, **state}
        self._module.load_state_dict(whole["model"])
        self._synchronizer.optimizer.load_state_dict(whole["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(whole["scheduler"])
        self._format.load_state_dict(whole["scaler"])
        self._synchronizer.close_round()

    def _make_step(self, clock: Clock) -> TrainStep:
        # The driver watches the mean over replicas for an explosion; one replica's loss may jump.
        config = dataclasses.replace(self._config, divergence_factor=None)
        return TrainStep(
            config,
            self._synchronizer,
            self._loss,
            self._format,
            self._schedule,
            self._device,
            clock=clock,
        )

    def _moved(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        return batch.map(lambda value: value.to(self._device, non_blocking=True))

    def _tell(
        self,
        observer: Observer,
        step: TrainStep,
        shard_id: int,
        part: RoundPart,
        number: int,
        rows: int,
    ) -> None:
        done = part.step + number + 1
        observer.step(epoch=part.epoch + 1, step=done, loss=step.loss, rows=rows)
        if self._config.callbacks:
            seen = CallbackState(
                rank=shard_id,
                world_size=self._plan.world_size,
                epoch=part.epoch,
                step=done,
                loss=step.loss,
                model=self._module,
            )
            for callback in self._config.callbacks:
                callback.on_step_end(seen)

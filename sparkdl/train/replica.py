"""A process's replica: everything that training changes, and what computes with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sparkdl import inputs
from sparkdl.comm.communicator import Communicator, LocalCommunicator
from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batch, Batches, copied_ahead
from sparkdl.data.collate import example_arguments
from sparkdl.data.plan import TrainPlan
from sparkdl.data.source import ShardRows
from sparkdl.sync.module_tensors import check_sizes, give_tensors, set_trains, tensors_of, trains
from sparkdl.sync.population.hyperparameters import rescaled, set_present_rate
from sparkdl.sync.strategy import MakeOptimizer, Synchronizer, parameters_for
from sparkdl.train.modules.compiled import compile_in_place
from sparkdl.train.modules.precision import NumberFormat
from sparkdl.train.objective.label_losses import part_names
from sparkdl.train.objective.lightning import TrainerStandIn
from sparkdl.train.objective.loss import LossFunction
from sparkdl.train.objective.manual import ManualBackward
from sparkdl.train.objective.metrics import Metrics
from sparkdl.train.objective.own_states import Kept
from sparkdl.train.objective.part import Part
from sparkdl.train.objective.training_step import StepLoss, objective_of
from sparkdl.train.optimizers.nested_states import begin_states, give_state, plain_state
from sparkdl.train.optimizers.optimizers import Schedule, make_scheduler, resolve_optimizer

MakeSynchronizer = Callable[[nn.Module, MakeOptimizer], Synchronizer]


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One process's copy of the model, with its loss, optimizer and schedule, on one device."""

    config: TrainConfig
    plan: TrainPlan
    device: torch.device
    module: nn.Module
    loss: LossFunction
    metrics: Metrics
    training_metrics: Metrics | None
    """The same ones over training batches, if they are wanted."""
    number_format: NumberFormat
    synchronizer: Synchronizer
    schedule: Schedule | None
    kept: Kept
    """Values that the loss and the like keep from call to call."""

    @property
    def scheduler(self) -> torch.optim.lr_scheduler.LRScheduler | None:
        """That of the schedule, or None."""
        return None if self.schedule is None else self.schedule.scheduler

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels whose losses are kept apart."""
        return part_names(self.loss)

    @property
    def lightning(self) -> TrainerStandIn | None:
        """The caller of a LightningModule's steps and hooks; None: the module is another."""
        step = self.loss.step if isinstance(self.loss, StepLoss) else None
        return step if isinstance(step, TrainerStandIn) else None

    @property
    def manual(self) -> ManualBackward | None:
        """The caller of a training step that updates the weights itself; None: the loop does."""
        return None if self.lightning is None else self.lightning.manual

    @property
    def parts(self) -> list[Part]:
        """What takes part in training besides."""
        return [] if self.lightning is None else [self.lightning]

    @property
    def collector(self) -> TrainerStandIn | Metrics | None:
        """The collector of values over the samples of training; None: nothing notes them."""
        return self.lightning or self.training_metrics

    @property
    def learning_rate(self) -> float:
        """That of the first parameter group; optimizers of the user's own may have none."""
        return float(self.synchronizer.optimizer.param_groups[0].get("lr", math.nan))

    def set_learning_rate(self, rate: float) -> None:
        """Go on with another learning rate; see `CallbackState.set_learning_rate`."""
        groups, scheduler = self.synchronizer.optimizer.param_groups, self.scheduler
        factor = set_present_rate(groups, rate, is_scheduled=scheduler is not None)
        if scheduler is not None:
            scheduler.load_state_dict(rescaled(scheduler.state_dict(), factor))

    def batches(
        self, shards: Sequence[ShardRows], rank: int, *, epoch: int, first_step: int
    ) -> Generator[Batch, None, None]:
        """The rank's training batches of an epoch, from a step of it on; see `on_device`.

        With ``elasticity="bits"`` those of each shard apart, see `Batches.by_shard`.
        """
        is_cuda = self.device.type == "cuda"
        batches = iter(
            Batches(
                shards,
                self.plan,
                rank,
                seed=self.config.seed,
                epoch=epoch,
                start_step=first_step,
                num_together=self.config.group_by_length,
                pin_memory=is_cuda,
                by_shard=self.config.elasticity == "bits",
            )
        )
        return copied_ahead(batches, self.device) if is_cuda else batches

    def on_device(self, batch: Batch) -> Batch:
        """A training batch where the module is."""
        if self.device.type == "cpu":
            return batch
        return batch.map(lambda value: value.to(self.device, non_blocking=True))

    @property
    def own_module(self) -> nn.Module:
        """Holds what of the module lies on this rank: the module, unless it is divided."""
        divided = self.synchronizer.divided
        return self.module if divided is None else divided.module

    def weights(self) -> dict[str, Any]:
        """A copy of the weights and buffers that lie on this rank."""
        return copy.deepcopy(tensors_of(self.own_module))

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Restore what `weights` gave."""
        give_tensors(self.own_module, weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that training has made; the tensors are the replica's own, not copies.

        Of a module that is divided only buffers, and not the optimizer's state: see
        `DividedState.part`.
        """
        model = tensors_of(self.own_module)
        divided = self.synchronizer.divided
        if divided is not None:
            model = {name: value for name, value in model.items() if name not in divided.parameters}
        optimizer = plain_state(self.synchronizer.optimizer) if divided is None else None
        return {
            "model": model,
            "trains": None if divided is not None else trains(self.module),
            "optimizer": optimizer,
            "scheduler": None if self.scheduler is None else plain_state(self.scheduler),
            "scaler": self.number_format.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, or a part of it without model or optimizer."""
        if "model" in state:
            give_tensors(self.own_module, state["model"])
            check_sizes(self.own_module)
        if state.get("trains") is not None and set_trains(self.module, state["trains"]):
            self.synchronizer.follow_freezing()
        if state["optimizer"] is not None:
            give_state(self.synchronizer.optimizer, state["optimizer"])
        self.number_format.load_state_dict(state["scaler"])
        if self.scheduler is not None and state["scheduler"] is not None:
            give_state(self.scheduler, state["scheduler"])


def make_replica(
    module: nn.Module,
    config: TrainConfig,
    plan: TrainPlan,
    device: torch.device,
    synchronize: MakeSynchronizer,
    comm: Communicator | None = None,
    rank: int | None = None,
) -> Replica:
    """Build a replica around ``module``, which moves to ``device``.

    Args:
        module: its weights are where training begins; with parameters on the meta device,
            ``synchronize`` moves it.
        config: what the user asked for; its loss is moved and may keep something from call to call.
        plan: the numbers that follow from it.
        device: where to compute.
        synchronize: makes the synchronizer, which owns the optimizer; see `SyncStrategy.setup`.
        comm: the gang in which replicas share gradients; None: replicas train apart.
        rank: whose shards it trains on; None: on one shard after another.

    Raises:
        ConfigError: loss, metrics, optimizer or schedule cannot be used as they are.
        ClusterError: the module is to be compiled, and there is no compiler.
    """
    loss = objective_of(config, module, copies=False)
    loss.to(device)
    metrics = Metrics.of(config, loss, device)
    training_metrics = Metrics.of(config, loss, device) if config.training_metrics else None
    number_format = NumberFormat(config.precision, device)
    if not any(parameter.is_meta for parameter in module.parameters()):
        module.to(device)
    example, usual_rows, mesh = None, None, config.parallelism
    is_divided = mesh is not None and mesh.num_shards > 1
    if config.compile and not isinstance(loss, StepLoss):
        features = [column for column in plan.columns if column.role == "feature"]
        example = example_arguments(features, max(2, plan.batch_size)).to(device)
        is_whole = config.gradient_accumulation_steps == 1
        has_lengths = any(isinstance(column.kind, inputs.Sequence) for column in features)
        if rank is not None and device.type != "cpu" and is_whole and not has_lengths:
            usual_rows = plan.usual_rows(rank)
    if config.compile and not is_divided:
        compile_in_place(module, device, example, usual_rows=usual_rows)
    if isinstance(loss, StepLoss) and isinstance(loss.step, TrainerStandIn):
        loss.step.attach(plan)
    make_optimizer = resolve_optimizer(config, module)
    synchronizer = synchronize(module, make_optimizer)
    if config.compile and is_divided:
        from sparkdl.sync.divided.dividing import compiled_layers

        compile_in_place(module, device, example, compiled_layers(module))
    begin_states(synchronizer.optimizer)
    try:
        schedule = make_scheduler(
            config, synchronizer.optimizer, make_optimizer, plan.steps_per_epoch
        )
    except BaseException:
        synchronizer.close()
        raise
    replica = Replica(
        config=config,
        plan=plan,
        device=device,
        module=module,
        loss=loss,
        metrics=metrics,
        training_metrics=training_metrics,
        number_format=number_format,
        synchronizer=synchronizer,
        schedule=schedule,
        kept=Kept(config, loss),
    )
    _show_optimizer(replica, comm or LocalCommunicator())
    return replica


def begin_optimizer(replica: Replica) -> Replica:
    """The replica, which trains alone, with optimizer and schedule made of its present weights."""
    config, synchronizer = replica.config, replica.synchronizer
    make = resolve_optimizer(config, replica.module)
    synchronizer.optimizer = make(parameters_for(make, replica.module))
    begin_states(synchronizer.optimizer)
    schedule = make_scheduler(config, synchronizer.optimizer, make, replica.plan.steps_per_epoch)
    replica = replace(replica, schedule=schedule)
    _show_optimizer(replica, LocalCommunicator())
    return replica


def _show_optimizer(replica: Replica, comm: Communicator) -> None:
    """Show a LightningModule what updates its weights."""
    for part in replica.parts:
        part.join(replica.synchronizer.optimizer, replica.scheduler, comm)

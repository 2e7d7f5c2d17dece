"""How does a worker train? The only training loop: epochs of steps, from plan to outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass

import torch
from torch import nn

from sparkdl import sync
from sparkdl.comm.communicator import Communicator
from sparkdl.comm.topology import arrange
from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batch, Batches, sequential_batches
from sparkdl.data.plan import TrainPlan
from sparkdl.data.source import ShardRows
from sparkdl.sync.collective import CollectiveStrategy
from sparkdl.sync.frozen_layers import training_mode
from sparkdl.train.callbacks import CallbackState, Observer, make_stopper
from sparkdl.train.modules.memory_format import in_memory_format
from sparkdl.train.modules.precision import NumberFormat
from sparkdl.train.modules.sync_batch_norm import synchronized
from sparkdl.train.objective.divergence import diverged
from sparkdl.train.objective.label_losses import loss_record, no_sums, part_names
from sparkdl.train.objective.metrics import Metrics
from sparkdl.train.objective.training_step import StepLoss, objective_of
from sparkdl.train.optimizers.optimizers import make_scheduler, resolve_optimizer
from sparkdl.train.random_state import deterministic_algorithms, seed_everything
from sparkdl.train.replica import CheckpointSink, Replica, ResumePoint
from sparkdl.train.state import Record, TrainState
from sparkdl.train.step import TrainStep
from sparkdl.train.time_spent import Clock
from sparkdl.train.validation import evaluate, sync_buffers


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """What one worker knows when training is over. The weights are in the module."""

    history: list[Record]
    """One record per epoch; equal on all ranks but for ``seconds``."""
    steps: int
    """Completed steps of the run, with those before a restart."""
    rows: int
    """Samples that all ranks have used, with those before a restart; not those whose gradients came
    too late."""
    stopped_early: bool
    seconds: dict[str, float]
    """This rank's time in this attempt, by `clock.SPENT_ON`.

    On CUDA, whose work is asynchronous, ``compute`` holds what the others do not wait for.
    """
    bytes_sent: int
    """What this rank's strategy has sent to the others in this attempt."""
    final: ResumePoint
    """The state at the end, for the last checkpoint: ``model`` holds the last weights even if
    the module was given the best ones."""


__all__ = ["CheckpointSink", "ResumePoint", "TrainOutcome", "train"]


def train(
    *,
    module: nn.Module,
    config: TrainConfig,
    plan: TrainPlan,
    shards: ShardRows,
    validation: ShardRows,
    comm: Communicator,
    device: torch.device,
    checkpoints: CheckpointSink | None,
    resume: ResumePoint | None,
    observer: Observer,
) -> TrainOutcome:
    """Train ``module`` in place; every rank calls, with equal weights.

    Args:
        module: the replica; moved to ``device`` and put into training mode. Submodules that shall
            stay in evaluation mode must see to it in ``train()``.
        config: what the user asked for.
        plan: the numbers that follow from it.
        shards: this rank's training shards, in the plan's order.
        validation: this rank's validation shards.
        comm: the gang.
        device: where this rank computes.
        checkpoints: where checkpoints go, except that of the end; None for nowhere.
        resume: where to go on; a run that was complete returns at once.
        observer: is told of phases, steps and epochs.

    Raises:
        ConfigError: loss, optimizer, metrics or early stopping cannot be used as they are.
        TrainingDiverged: the loss is not finite.
        CommunicationError: a peer was lost.
    """
    observer.phase("setup")
    with contextlib.ExitStack() as stack:
        stack.enter_context(deterministic_algorithms(config.deterministic))
        strategy = sync.resolve(config.sync_strategy)
        topology = strategy.topology if isinstance(strategy, CollectiveStrategy) else "auto"
        comm = stack.enter_context(contextlib.closing(arrange(comm, topology, device=device)))
        stack.enter_context(in_memory_format(module, config.memory_format))
        if config.sync_batch_norm:
            stack.enter_context(synchronized(module, comm))
        trainer = _Trainer(
            module, config, plan, shards, validation, comm, device, checkpoints, observer
        )
        try:
            return trainer.run(resume)
        finally:
            trainer.close()


class _Trainer:
    def __init__(
        self,
        module: nn.Module,
        config: TrainConfig,
        plan: TrainPlan,
        shards: ShardRows,
        validation: ShardRows,
        comm: Communicator,
        device: torch.device,
        checkpoints: CheckpointSink | None,
        observer: Observer,
    ) -> None:
        self._config = config
        self._plan = plan
        self._shards = shards
        self._validation = validation
        self._comm = comm
        self._device = device
        self._checkpoints = checkpoints
        self._observer = observer
        self._loss = objective_of(config, module)
        self._loss.to(device)
        self._metrics = Metrics(
            config.metrics,
            config.task,
            self._loss.predictions,
            device,
            counts_classes=not isinstance(self._loss, StepLoss),
        )
        self._rows_by_rank = [plan.rows_of(rank) for rank in range(plan.world_size)]
        self._replica = self._make_replica(module)
        self._clock = Clock(comm)
        self._step = TrainStep(
            config,
            self._replica.synchronizer,
            self._loss,
            self._replica.number_format,
            self._schedule,
            device,
            clock=self._clock,
            talks_within=config.sync_batch_norm and comm.world_size > 1,
        )
        self._replica.watch = self._step.watch
        self._wants_checkpoint = False

    def run(self, resume: ResumePoint | None) -> TrainOutcome:
        """The whole story."""
        self._begin(resume)
        self._observer.clock(self._clock.seconds)
        while not self._is_complete():
            self._train_epoch()
            self._end_epoch()
            self._save_if_due()
        self._observer.phase("finish")
        outcome = self._outcome()
        self._restore_best()
        for callback in self._config.callbacks:
            callback.on_train_end(self._callback_state())
        return outcome

    def close(self) -> None:
        """Release the synchronizer's hooks and buffers."""
        self._replica.synchronizer.close()

    def _begin(self, resume: ResumePoint | None) -> None:
        training_mode(self._replica.module, self._config.frozen_layers)
        seed_everything(self._config.seed, self._comm.rank)
        if resume is not None:
            self._replica.restore(resume, seed=self._config.seed, rank=self._comm.rank)
        for callback in self._config.callbacks:
            callback.on_train_begin(self._callback_state())

    def _train_epoch(self) -> None:
        """Train to the end of the epoch, or to the last step of the run."""
        self._observer.phase("train")
        self._epoch_started = time.perf_counter()
        state = self._replica.state
        batches = iter(
            Batches(
                self._shards,
                self._plan,
                self._comm.rank,
                seed=self._config.seed,
                epoch=state.epoch,
                start_step=state.step_in_epoch,
                num_together=self._config.group_by_length,
                pin_memory=self._device.type == "cuda",
            )
        )
        self._clock.lap("other")
        with contextlib.closing(batches):
            while not self._is_epoch_over():
                batch = next(batches)
                self._clock.lap("data")
                self._train_step(batch)
                if not self._is_epoch_over():
                    self._save_if_due()

    def _train_step(self, batch: Batch) -> None:
        replica, state = self._replica, self._replica.state
        by_rank = self._batch_rows(state.step_in_epoch)
        moved = batch
        if self._device.type != "cpu":
            moved = batch.map(lambda value: value.to(self._device, non_blocking=True))
        sums = self._step(moved, sum(by_rank), state.step)
        if sums.ranks is not None:  # the rows of the others were of no use
            by_rank = [rows * (rank in sums.ranks) for rank, rows in enumerate(by_rank)]
        if by_rank[self._comm.rank]:
            replica.epoch_sums += sums.local
        is_closed = replica.synchronizer.after_step(state.step)
        self._clock.lap("communication")
        state.step += 1
        state.step_in_epoch += 1
        state.rows_seen += sum(by_rank)
        self._observe_step(by_rank[self._comm.rank])
        if self._checkpoints is not None and self._checkpoints.due(state.step):
            self._wants_checkpoint = True
        self._is_round_closed = is_closed
        self._clock.lap("other")

    def _batch_rows(self, step_in_epoch: int) -> list[int]:
        """Each rank's samples in a step; `TrainPlan.bounds` is too slow for every step."""
        num_steps, after = self._plan.steps_per_epoch, step_in_epoch + 1
        return [
            rows * after // num_steps - rows * step_in_epoch // num_steps
            for rows in self._rows_by_rank
        ]

    def _observe_step(self, num_rows: int) -> None:
        state = self._replica.state
        self._observer.step(
            epoch=state.epoch + 1, step=state.step, loss=self._step.loss, rows=num_rows
        )
        if self._config.callbacks:
            seen = self._callback_state()
            for callback in self._config.callbacks:
                callback.on_step_end(seen)

    def _end_epoch(self) -> None:
        replica, state = self._replica, self._replica.state
        self._close_round()
        if not replica.synchronizer.buffers_agree:
            with_rows = [rank for rank, rows in enumerate(self._rows_by_rank) if rows]
            sync_buffers(replica.module, self._comm, with_rows)
            self._clock.lap("communication")
        record = self._make_record()
        state.add_record(record)
        is_kept = True
        if replica.stopper is not None:
            assert self._config.early_stopping is not None
            is_best = replica.stopper.is_best(record)
            if self._config.early_stopping.restore_best:
                is_kept = is_best
                if is_best:
                    replica.keep_best()
            state.stopped_early = replica.stopper.should_stop
        if state.step_in_epoch == self._plan.steps_per_epoch:
            state.epoch += 1
            state.step_in_epoch = 0
            replica.epoch_sums.zero_()
        self._observer.epoch(record)
        if is_kept and self._metrics.confusion is not None:
            self._observer.confusion(int(record["epoch"]), self._metrics.confusion)
        for callback in self._config.callbacks:
            callback.on_epoch_end(self._callback_state(), record)
        self._clock.lap("other")

    def _make_record(self) -> Record:
        replica, state = self._replica, self._replica.state
        sums = replica.epoch_sums.clone()
        self._comm.all_reduce(sums)
        self._clock.lap("communication")
        losses = loss_record(sums.tolist(), part_names(self._loss))
        loss = losses["loss"]
        if sums[1] > 0 and not math.isfinite(loss):
            raise diverged(loss, f"in epoch {state.epoch + 1}")
        record: Record = {
            "epoch": state.epoch + 1,
            "steps": state.step_in_epoch,
            **losses,
            "learning_rate": self._learning_rate(),
            "seconds": time.perf_counter() - self._epoch_started,
        }
        if self._plan.num_validation_rows:
            self._observer.phase("evaluate")
            record.update(self._evaluate())
            self._clock.lap("evaluate")
        return record

    def _learning_rate(self) -> float:
        """That of the first parameter group; optimizers of the user's own may have none."""
        return float(self._replica.synchronizer.optimizer.param_groups[0].get("lr", math.nan))

    def _evaluate(self) -> Record:
        return evaluate(
            self._replica.module,
            sequential_batches(self._validation, self._plan),
            self._loss,
            self._metrics,
            self._replica.number_format,
            self._comm,
            self._device,
        )

    def _save_if_due(self) -> None:
        """Write a checkpoint if one is due, as soon as the round is closed, but not at the end."""
        if not (self._wants_checkpoint and self._is_round_closed) or self._is_complete():
            return
        assert self._checkpoints is not None
        self._wants_checkpoint = False
        self._close_round()
        self._observer.phase("checkpoint")
        point = self._replica.snapshot()
        assert point.rank_state is not None
        self._checkpoints.save(point.step, point.shared, point.rank_state)
        self._clock.lap("checkpoint")
        self._observer.phase("train")

    def _close_round(self) -> None:
        self._clock.lap("other")
        self._replica.synchronizer.close_round()
        self._clock.lap("communication")
        self._is_round_closed = True

    def _outcome(self) -> TrainOutcome:
        state = self._replica.state
        final = self._replica.snapshot()
        if self._replica.best_model is not None:  # the module will change under the snapshot
            model = {name: _copied(value) for name, value in final.shared["model"].items()}
            final = dataclasses.replace(final, shared={**final.shared, "model": model})
        return TrainOutcome(
            history=state.state_dict()["history"],
            steps=state.step,
            rows=state.rows_seen,
            stopped_early=state.stopped_early,
            seconds=dict(self._clock.seconds),
            bytes_sent=self._replica.synchronizer.bytes_sent,
            final=final,
        )

    def _restore_best(self) -> None:
        if self._replica.best_model is not None:
            self._replica.module.load_state_dict(self._replica.best_model)

    def _make_replica(self, module: nn.Module) -> Replica:
        """Build everything that training changes, on the device."""
        config = self._config
        stopper = make_stopper(config, has_validation=self._plan.num_validation_rows > 0)
        number_format = NumberFormat(config.precision, self._device)
        module.to(self._device)
        make_optimizer = resolve_optimizer(config, module)
        synchronizer = sync.resolve(config.sync_strategy).setup(module, make_optimizer, self._comm)
        try:
            self._schedule = make_scheduler(
                config, synchronizer.optimizer, make_optimizer, self._plan.steps_per_epoch
            )
        except BaseException:
            synchronizer.close()
            raise
        return Replica(
            module=module,
            synchronizer=synchronizer,
            number_format=number_format,
            scheduler=None if self._schedule is None else self._schedule.scheduler,
            stopper=stopper,
            state=TrainState(),
            epoch_sums=no_sums(self._loss, self._device),
        )

    def _is_complete(self) -> bool:
        return self._replica.state.is_complete(self._plan.epochs, self._plan.max_steps)

    def _is_epoch_over(self) -> bool:
        state = self._replica.state
        is_last_step = state.step == self._plan.max_steps
        return is_last_step or state.step_in_epoch >= self._plan.steps_per_epoch

    def _callback_state(self) -> CallbackState:
        return CallbackState(
            rank=self._comm.rank,
            world_size=self._comm.world_size,
            epoch=self._replica.state.epoch,
            step=self._replica.state.step,
            loss=self._step.loss,
            model=self._replica.module,
        )


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value

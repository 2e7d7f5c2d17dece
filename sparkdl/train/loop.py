"""The training loop of a gang's worker: epochs of steps, from plan to outcome."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from sparkdl import sync
from sparkdl.comm.communicator import Communicator
from sparkdl.comm.topology import arrange
from sparkdl.config import Looks, TrainConfig
from sparkdl.data.batches import Batch
from sparkdl.data.collate import example_arguments
from sparkdl.data.plan import TrainPlan
from sparkdl.data.source import ShardRows
from sparkdl.errors import TrainingDiverged
from sparkdl.sync.collective import CollectiveStrategy
from sparkdl.sync.frozen_layers import training_mode
from sparkdl.sync.gradients.allreduce import tree_synchronizer
from sparkdl.sync.strategy import Pipelined
from sparkdl.train.callbacks import (
    NO_PLACE,
    OUTSIDE,
    CallbackState,
    Observer,
    Requests,
    agreed,
    call_evaluated,
    called_at_steps,
    steps_between,
)
from sparkdl.train.layer_looks import LayerLooks
from sparkdl.train.modules.memory_format import in_memory_format
from sparkdl.train.modules.sync_batch_norm import synchronized
from sparkdl.train.objective.not_finite import with_columns
from sparkdl.train.objective.part import Part
from sparkdl.train.objective.training_step import logs
from sparkdl.train.optimizers.stepping import set_mode
from sparkdl.train.random_state import deterministic_algorithms, seed_everything
from sparkdl.train.rank_epoch import RankEpoch, WholeRanks
from sparkdl.train.rank_state import (
    DIVIDED,
    CheckpointSink,
    HeldAttributes,
    RankState,
    ResumePoint,
)
from sparkdl.train.replica import MakeSynchronizer, make_replica
from sparkdl.train.shard_states import ShardStates
from sparkdl.train.state import EpochBook, Record
from sparkdl.train.step import TrainStep
from sparkdl.train.time_spent import Clock

if TYPE_CHECKING:
    from sparkdl.sync.divided.mesh_ranks import MeshRanks
    from sparkdl.sync.divided.mesh_synchronizer import Fill


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """The outcome of training on one worker; the weights are in the module."""

    history: list[Record]
    """One record per evaluation; equal on all ranks but for ``seconds``."""
    steps: int
    """Completed steps of the run, with those before a restart."""
    rows: int
    """Samples that all ranks have used, with those before a restart; not those whose gradients came
    too late."""
    stopped_early: bool
    seconds: dict[str, float]
    """This rank's time in this attempt, by `time_spent.SPENT_ON`.

    On CUDA, whose work is asynchronous, ``compute`` holds what the others do not wait for.
    """
    bytes_sent: int
    """Bytes that this rank's strategy has sent to the others in this attempt."""
    pipeline: Pipelined | None
    """Pipeline whose stages the module has, where there is one."""
    final: ResumePoint
    """The state at the end, for the last checkpoint: ``model`` holds the last weights even if
    the module was given the best ones."""


def train(
    *,
    module: nn.Module,
    config: TrainConfig,
    plan: TrainPlan,
    shards: Sequence[ShardRows],
    validation: Sequence[ShardRows],
    comm: Communicator,
    device: torch.device,
    checkpoints: CheckpointSink | None,
    resume: ResumePoint | None,
    observer: Observer,
    looks: Looks | None = None,
    fill: Fill | None = None,
    held: HeldAttributes | None = None,
    parts: Sequence[Part] = (),
) -> TrainOutcome:
    """Train ``module`` in place; every rank calls, with equal weights.

    Args:
        module: the replica; moved to ``device`` and put into training mode. Submodules that shall
            stay in evaluation mode must see to it in ``train()``.
        config: what the user asked for.
        plan: the numbers that follow from it.
        shards: the training rows of this rank's shards, in the plan's order.
        validation: the validation rows of them.
        comm: the gang.
        device: where this rank computes.
        checkpoints: where checkpoints go, except that of the end; None for nowhere.
        resume: where to go on; a run that was complete returns at once.
        observer: gets phases, steps and epochs.
        looks: what rank 0 looks at in its layers for the observer; None: nothing.
        fill: gives the module its weights once it is divided, if its parameters are on the meta
            device.
        held: what the module holds besides parameters and buffers, for checkpoints; None: they do
            without.
        parts: what else is called at each step.

    Raises:
        ConfigError: loss, optimizer, metrics or early stopping cannot be used as they are.
        TrainingDiverged: the loss is not finite.
        CommunicationError: a peer was lost.
    """
    observer.phase("setup")
    book = EpochBook(config, plan, has_logs=logs(config, module))
    with contextlib.ExitStack() as stack:
        stack.enter_context(deterministic_algorithms(config.deterministic))
        strategy = sync.resolve(config.sync_strategy)
        by_shard = config.elasticity == "bits"
        topology = strategy.topology if isinstance(strategy, CollectiveStrategy) else "auto"
        topology = "ring" if by_shard or config.parallelism else topology  # sums nothing then
        comm = stack.enter_context(contextlib.closing(arrange(comm, topology, device=device)))
        ranks, synchronize = _arranged(config, plan, comm, device, shards, fill)
        stack.enter_context(in_memory_format(module, config.memory_format))
        if config.sync_batch_norm:
            stack.enter_context(synchronized(module, comm))
        replica = make_replica(
            module,
            config,
            plan,
            device,
            synchronize,
            comm=None if strategy.trains_apart else comm,
            rank=comm.rank,
        )
        stack.enter_context(contextlib.closing(replica.synchronizer))
        for part in replica.parts:
            stack.enter_context(contextlib.closing(part))
        clock = Clock(comm)
        talks_within = ranks.gathers or (config.sync_batch_norm and comm.world_size > 1)
        others = list(parts)
        if looks is not None and comm.rank == 0 and isinstance(ranks, WholeRanks):
            others.append(LayerLooks(looks, module, plan))
        step = TrainStep(replica, clock=clock, talks_within=talks_within, others=others)
        training = _Training(
            replica=replica,
            book=book,
            held=held,
            epoch=ShardStates(replica, comm) if by_shard else RankEpoch(replica, ranks),
            shards=shards,
            validation=validation,
            gang=comm,
            comm=ranks.readers,
            checkpoints=checkpoints,
            observer=observer,
            step=step,
            clock=clock,
            requests=Requests(refusal=OUTSIDE, no_save=NO_PLACE if checkpoints is None else None),
            # Where time decides, all ranks would have to wait for the slowest.
            acts_every=steps_between(config.callbacks) if strategy.deterministic else None,
        )
        try:
            return training.run(resume)
        except TrainingDiverged as error:
            all_come = strategy.deterministic and not strategy.trains_apart
            told = ranks.readers if all_come else None
            raise with_columns(error, plan.columns, shards, told) from error


def _arranged(
    config: TrainConfig,
    plan: TrainPlan,
    comm: Communicator,
    device: torch.device,
    shards: Sequence[ShardRows],
    fill: Fill | None,
) -> tuple[WholeRanks | MeshRanks, MakeSynchronizer]:
    """Return the ranks by what they share, and what makes this rank's synchronizer. Collective."""
    strategy = sync.resolve(config.sync_strategy)
    if config.elasticity == "bits":
        make_tree = partial(tree_synchronizer, strategy, plan.shards_by_rank)
        return WholeRanks(comm), lambda model, make: make_tree(model, make, comm)
    if config.parallelism is None:
        return WholeRanks(comm), lambda model, make: strategy.setup(model, make, comm)
    # Here, and not above: it imports torch's compiler, which takes seconds.
    from sparkdl.sync.divided.mesh_ranks import MeshRanks
    from sparkdl.sync.divided.mesh_synchronizer import MeshSynchronizer
    from sparkdl.train.modules.layout_check import check_layout_on_rows

    ranks = MeshRanks.of(config.parallelism, comm, device)
    features = [column for column in plan.columns if column.role == "feature"]
    return ranks, partial(
        MeshSynchronizer,
        ranks=ranks,
        strategy=strategy,
        compute_dtype=torch.bfloat16 if config.precision == "bf16" else None,
        example=example_arguments(features, 2).to(device),
        check=partial(check_layout_on_rows, shards=shards, plan=plan, device=device),
        fill=fill,
    )


@dataclass(frozen=True, kw_only=True)
class _Training(RankState):
    """One rank's training: its state, and what it works with."""

    shards: Sequence[ShardRows]
    validation: Sequence[ShardRows]
    gang: Communicator
    comm: Communicator
    """Ranks that have different rows; of a mesh some, else the gang."""
    checkpoints: CheckpointSink | None
    observer: Observer
    clock: Clock
    acts_every: int | None
    """Steps after which the ranks agree on what callbacks ask for; None: when epochs end."""

    def run(self, resume: ResumePoint | None) -> TrainOutcome:
        """Train to the end."""
        replica, book = self.replica, self.book
        self._begin(resume)
        while not book.is_complete:
            began = time.perf_counter()
            self.observer.phase("train")
            for part in self.step.parts:
                part.move_to(book.state.epoch, book.state.step, book.state.step_in_epoch)
                if book.state.step_in_epoch == 0:
                    part.begin_epoch()
            with contextlib.closing(self._batches()) as batches:
                for batch in batches:
                    is_round_closed = self._train_step(batch)
                    if is_round_closed and not book.is_epoch_over:
                        if book.is_evaluation_due:
                            self._evaluate(began)
                        self._save_if_due()
            if not book.is_evaluated:  # unless an evaluation within the epoch has ended the run
                self._evaluate(began)
                self._save_if_due()
        self.observer.phase("finish")
        outcome = self._outcome()
        if book.best_model is not None:
            replica.set_weights(book.best_model)
        for part in self.step.parts:
            part.end_fit()
        self.requests.refusal = OUTSIDE
        for callback in replica.config.callbacks:
            callback.on_train_end(self._callback_state())
        return outcome

    def _begin(self, resume: ResumePoint | None) -> None:
        config = self.replica.config
        training_mode(self.replica.module, config.frozen_layers)
        # stages draw other numbers
        pipeline = self.replica.synchronizer.pipeline
        stage = 0 if pipeline is None else pipeline.comm.rank
        drawn = self.comm.rank + stage * self.comm.world_size
        seed_everything(config.seed, drawn)
        if resume is not None:
            self.restore(resume, seed=config.seed, rank=self.comm.rank)
        for part in self.step.parts:
            part.place(self.comm.rank, self.comm.world_size)
            part.begin_fit()
        with self.replica.synchronizer.callbacks_act():
            for callback in config.callbacks:
                callback.on_train_begin(self._callback_state())
        if not self.book.is_complete:
            self._set_mode(trains=True)
        self.requests.refusal = None
        self.observer.clock(self.clock.seconds)

    def _batches(self) -> Generator[Batch | dict[int, Batch], None, None]:
        """The batches to the end of the epoch, or to the last step of the run; or by shard."""
        state = self.book.state
        batches = self.replica.batches(
            self.shards, self.comm.rank, epoch=state.epoch, first_step=state.step_in_epoch
        )
        self.clock.lap("other")
        with contextlib.closing(batches):
            while not self.book.is_epoch_over:
                batch = self.epoch.batch(batches)
                self.clock.lap("data")
                yield batch

    def _train_step(self, batch: Batch | dict[int, Batch]) -> bool:
        """Train on a batch; True if the round is closed."""
        replica, book = self.replica, self.book
        step = book.state.step
        by_rank = replica.plan.rows_by_rank(book.state.step_in_epoch)
        sums = self.epoch.train(self.step, batch, by_rank, step)
        if sums.ranks is not None:  # the rows of the others were of no use
            by_rank = [rows * (rank in sums.ranks) for rank, rows in enumerate(by_rank)]
        own_rows = by_rank[self.comm.rank]
        if own_rows:
            self.epoch.epoch_sums.add_(sums.local)
        is_closed = replica.synchronizer.after_step(step)
        self.clock.lap("communication")
        for part in self.step.parts:
            part.after_step(step, self.observer)
        book.count(1, sum(by_rank), None if self.checkpoints is None else self.checkpoints.due)
        self.observer.step(
            epoch=book.state.epoch + 1, step=step + 1, loss=self.step.loss, rows=own_rows
        )
        if callbacks := called_at_steps(replica.config.callbacks):
            seen = self._callback_state()
            with replica.synchronizer.callbacks_act():
                for callback in callbacks:
                    callback.on_step_end(seen)
            every, last = self.acts_every, self.requests.taken_at
            if is_closed and every is not None and book.state.step // every > last // every:
                self._act()
        self.clock.lap("other")
        return is_closed

    def _act(self) -> None:
        """Do what callbacks have asked for; the round is closed."""
        book = self.book
        own = self.requests.take(book.state.step)
        asked = agreed(own, self.gang, self.replica.device, book.state.step)
        if asked.learning_rate is not None:
            self.replica.set_learning_rate(asked.learning_rate)
        book.is_checkpoint_due |= asked.save
        book.state.stopped_early |= asked.stop

    def _close_round(self) -> None:
        self.clock.lap("other")
        self.replica.synchronizer.close_round()
        self.clock.lap("communication")

    def _evaluate(self, began: float) -> None:
        """Close the round, measure the model, and do what follows from that.

        Within an epoch each rank then goes on with its own buffers, as if nobody had looked.
        """
        self._close_round()
        self._set_mode(trains=False)
        is_epoch_over = self.book.is_epoch_over
        self.epoch.average_buffers(for_good=is_epoch_over)
        self.clock.lap("communication")
        self._enter(self._record(began))
        if not is_epoch_over and not self.book.is_complete:
            self.epoch.put_back()
        if not self.book.is_complete:
            self._set_mode(trains=True)

    def _set_mode(self, *, trains: bool) -> None:
        """Have the weights for training, or for evaluation, where the optimizer knows both."""
        set_mode(self.replica.synchronizer.optimizer, trains=trains)

    def _record(self, began: float) -> Record:
        """The epoch's entry in the history so far, over all ranks, with validation rows."""
        both = self.epoch.totals(self.step.gradient_norms)
        sums, (norm_sum, num_norms) = both[:-2].tolist(), both[-2:].tolist()
        self.clock.lap("communication")
        record = self.book.record(
            sums,
            self.replica.labels,
            learning_rate=self.replica.learning_rate,
            seconds=time.perf_counter() - began,
        )
        if num_norms > 0:
            record["gradient_norm"] = norm_sum / num_norms
        record.update(self.epoch.training_metrics())
        self.clock.lap("communication")
        if self.replica.plan.num_validation_rows:
            self.observer.phase("evaluate")
            record.update(self.epoch.evaluate(self.validation))
            self.clock.lap("evaluate")
        for part in self.step.parts:
            part.evaluated(record, self.comm, is_epoch_over=self.book.is_epoch_over)
        return record

    def _enter(self, record: Record) -> None:
        replica, book = self.replica, self.book
        is_epoch_over = book.is_epoch_over
        is_kept = book.enter(record, replica.weights)
        if book.state.step_in_epoch == 0:
            self.epoch.begin_epoch()
            self.step.gradient_norms.zero_()
            if replica.collector is not None:
                replica.collector.forget()
        if replica.schedule is not None:
            replica.schedule.evaluated(record)
        self.observer.epoch(record)
        if is_kept and replica.metrics.confusion is not None:
            self.observer.confusion(record["epoch"], replica.metrics.confusion)
        if book.is_complete and not is_epoch_over:
            for part in self.step.parts:
                part.end_epoch()
        if replica.config.callbacks:
            with replica.synchronizer.callbacks_act():
                call_evaluated(
                    replica.config.callbacks,
                    self._callback_state,
                    record,
                    self._act,
                    lambda: is_epoch_over or book.is_complete,
                )
        if self.held is not None:
            self.held.check_shared()
        if not is_epoch_over:
            self.observer.phase("train")
        self.clock.lap("other")

    def _save_if_due(self) -> None:
        """Write a checkpoint if one is due, but not at the end; the round is closed by now."""
        if not self.book.is_checkpoint_due or self.book.is_complete:
            return
        assert self.checkpoints is not None
        self.book.is_checkpoint_due = False
        self._close_round()
        self._set_mode(trains=False)
        self.observer.phase("checkpoint")
        point = self.snapshot()
        assert point.rank_state is not None
        self.checkpoints.save(point.step, point.shared, point.rank_state)
        self._set_mode(trains=True)
        self.clock.lap("checkpoint")
        self.observer.phase("train")

    def _outcome(self) -> TrainOutcome:
        book, final = self.book, self.snapshot()
        if book.best_model is not None:  # the module will change under the snapshot
            assert final.rank_state is not None
            model = copy.deepcopy(final.shared["model"])
            own = dict(final.rank_state)
            if DIVIDED in own:
                own[DIVIDED] = copy.deepcopy(own[DIVIDED])
            shared = {**final.shared, "model": model}
            final = ResumePoint(step=final.step, shared=shared, rank_state=own)
        return TrainOutcome(
            history=book.state.state_dict()["history"],
            steps=book.state.step,
            rows=book.state.rows_seen,
            stopped_early=book.state.stopped_early,
            seconds=dict(self.clock.seconds),
            bytes_sent=self.replica.synchronizer.bytes_sent,
            pipeline=self.replica.synchronizer.pipeline,
            final=final,
        )

    def _callback_state(self) -> CallbackState:
        return CallbackState(
            rank=self.gang.rank,
            world_size=self.gang.world_size,
            epoch=self.book.state.epoch,
            step=self.book.state.step,
            loss=self.step.loss,
            model=self.replica.module,
            learning_rate=self.replica.learning_rate,
            requests=self.requests,
        )

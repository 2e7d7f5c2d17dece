"""What does the driver do in every run in rounds, whatever the replicas bring back?

One plain Spark job per round, again if Spark gave up; counters, history, early stopping,
checkpoints and callbacks between the rounds. What a round trains from and what becomes of its
results is left to `rounds` (one state for all) and `populations` (each replica its own).
"""

from __future__ import annotations

import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from sparkdl.data.plan import RoundPart
from sparkdl.report.live.progress import Progress
from sparkdl.runtime.process import tuned_allocator
from sparkdl.runtime.versions import versions
from sparkdl.serialization.packed_module import pack_blank
from sparkdl.spark.cluster.supervisor import Limits, Rows, supervise
from sparkdl.spark.rounds.round_checkpoints import RoundCheckpoints
from sparkdl.spark.rounds.round_stages import PATH, run_stage
from sparkdl.spark.rounds.round_totals import RoundDone, Totals
from sparkdl.spark.run.run import Run, Trained
from sparkdl.storage.checkpoint_format import encode
from sparkdl.storage.tensor_tree import Snapshot, snapshot
from sparkdl.sync.averaging.period import Period, RoundReport
from sparkdl.train.callbacks import CallbackState, make_stopper
from sparkdl.train.objective.divergence import LossWatch, diverged
from sparkdl.train.objective.label_losses import loss_record, part_names
from sparkdl.train.objective.loss import LossFunction
from sparkdl.train.objective.metrics import Metrics
from sparkdl.train.objective.training_step import objective_of
from sparkdl.train.state import Record, TrainState
from sparkdl.train.validation import record as evaluation_record
from sparkdl.worker import round_task
from sparkdl.worker.round_task import RoundOrder

logger = logging.getLogger(__name__)

_PATIENCE = 6
"""How many heartbeat time-outs a task may be silent: Spark itself replaces lost ones meanwhile."""

Stage = Callable[[RoundOrder], Rows]
"""Runs one job, given what all its tasks need to know."""


class RoundsDriver(ABC):
    """The driver's side of a run. ``_round`` says what one round is."""

    def __init__(self, run: Run, period: Period) -> None:
        self._run = run
        self._period = period
        config = run.config
        self._watch = LossWatch(config.divergence_factor)
        self._progress = TrainState()
        self._stopper = make_stopper(config, has_validation=run.plan.num_validation_rows > 0)
        self._best: dict[str, Any] | None = None
        self._sent: Snapshot | None = None
        self._confusion: list[list[int]] | None = None
        self._restarts = 0
        self._num_jobs = 0
        self._fingerprints = [shard.fingerprint for shard in run.plan.shards]
        num_shards = run.plan.world_size
        self._totals = Totals(
            rows=[0] * num_shards,
            seconds=[0.0] * num_shards,
            bytes_sent=[0] * num_shards,
            epoch_sums=self._no_sums(),
            tell=run.recorder.spent,
        )
        blank = pack_blank(run.module)
        self._payload = round_task.pack_payload(config, blank.skeleton, blank.tensors)
        self.checkpoints = RoundCheckpoints(run)

    def train(self) -> Trained:
        """The whole story."""
        self._resume()
        self._run.view.attempt(0, self._progress.step)
        self._totals.began = time.perf_counter()
        for callback in self._run.config.callbacks:
            callback.on_train_begin(self._callback_state())
        while not self._is_complete():
            self._train_epoch()
            self._end_epoch()
            self._save_if_due()
        self.checkpoints.final(self._progress.step, self._shared_state())
        self._run.module.load_state_dict(self._best or self._model())
        for callback in self._run.config.callbacks:
            callback.on_train_end(self._callback_state())
        return self._outcome()

    # --- what a run is about ------------------------------------------------------------------

    @abstractmethod
    def _round(self, part: RoundPart) -> RoundDone:
        """Train the steps of ``part`` on all shards, and keep what comes of it."""

    @abstractmethod
    def _model(self) -> dict[str, Any]:
        """The ``state_dict`` that would be the result if the run ended now."""

    @abstractmethod
    def _learning_rate(self) -> float:
        """That of the first parameter group, at the end of the newest round."""

    @abstractmethod
    def _evaluate(self) -> Record:
        """Measure on the validation rows of all shards what `_model` gives."""

    @abstractmethod
    def _states(self) -> dict[str, Any]:
        """What a checkpoint must hold besides counters and history."""

    @abstractmethod
    def _load_states(self, states: dict[str, Any]) -> None:
        """Restore what `_states` gave."""

    # --- rounds -------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        self._epoch_began = time.perf_counter()
        while not self._is_epoch_over():
            self._train_round()
            if not self._is_epoch_over():
                self._save_if_due()

    def _train_round(self) -> None:
        progress = self._progress
        began = time.perf_counter()
        part = RoundPart(
            epoch=progress.epoch,
            step_in_epoch=progress.step_in_epoch,
            step=progress.step,
            num_steps=self._num_steps(),
        )
        done = self._round(part)
        progress.step += part.num_steps
        progress.step_in_epoch += part.num_steps
        progress.rows_seen += done.rows
        self.checkpoints.note(part.step, progress.step)
        self._totals.add(done)
        loss_sum, weight, *_ = done.sums
        loss = loss_sum / weight if weight > 0 else math.nan
        if weight > 0:
            self._watch.look(loss, progress.step)
        overhead = time.perf_counter() - began - done.seconds
        self._totals.steps += done.seconds
        self._totals.overhead += overhead
        self._totals.spend_round(done, overhead)
        self._period.observe(
            RoundReport(
                steps=part.num_steps,
                step_seconds=done.seconds,
                merge_seconds=overhead,
                loss=loss,
                learning_rate=done.learning_rate,
            )
        )
        self._show(loss)

    def _num_steps(self) -> int:
        """Steps of the next round: no longer than what is left of the epoch and the run."""
        progress, plan = self._progress, self._run.plan
        steps = min(
            self._period.steps(progress.step), plan.steps_per_epoch - progress.step_in_epoch
        )
        if plan.max_steps >= 0:
            steps = min(steps, plan.max_steps - progress.step)
        return steps

    def _job(self, part: RoundPart | None, stage: Stage) -> Rows:
        """Run one job over all shards, as often as `max_restarts` allows in the whole run."""
        run, settings = self._run, self._run.settings
        result = supervise(
            run.spark,
            partial(self._submit, part, stage),
            world_size=run.plan.world_size,
            hub=run.link.hub,
            limits=Limits(
                max_restarts=run.max_restarts - self._restarts,
                heartbeat_timeout_seconds=_PATIENCE * settings.heartbeat_timeout_seconds,
                start_timeout_seconds=math.inf,  # tasks may wait for each other's slots
                queue_timeout_seconds=settings.queue_timeout_seconds,
            ),
            view=run.view,
            run_id=run.run_id,
            is_watched=run.link.channel is not None,
            first_attempt=self._num_jobs,
            recorder=run.recorder,
            what="evaluate" if part is None else f"train from step {part.step}",
        )
        self._restarts += result.restarts
        self._num_jobs += result.restarts + 1
        run.table.note({data.decode() for _, kind, data in result.rows if kind == PATH})
        return [row for row in result.rows if row[1] != PATH]

    def _submit(self, part: RoundPart | None, stage: Stage, attempt: int) -> Callable[[], Rows]:
        run = self._run
        if attempt > self._num_jobs:
            number = self._restarts + attempt - self._num_jobs
            run.recorder.begun_again(number, self._progress.step)
            run.table.rebuild()  # whatever was lost: all shards are written anew
            logger.info("running the round again from its beginning")
        order = RoundOrder(
            run_id=run.run_id,
            attempt=attempt,
            plan=run.plan,
            payload=self._payload,
            part=part,
            threads=run.slots.threads,
            versions=versions(),
            source=run.table.reader,
        )
        return partial(stage, order)

    def _job_over_all(self, part: RoundPart | None, state: Any, *, depth: int = 1) -> Rows:
        """Run one job in which all shards begin from the same ``state``."""
        run = self._run
        self._sent = snapshot(state, self._sent)
        data = b"".join(encode(self._sent))

        def stage(order: RoundOrder) -> Rows:
            return run_stage(
                run.table.df,
                order,
                data,
                depth=depth,
                channel=run.link.channel,
                profile=run.slots.profile,
            )

        return self._job(part, stage)

    # --- epochs -------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        run, progress = self._run, self._progress
        record = self._make_record()
        progress.add_record(record)
        is_kept = True
        if self._stopper is not None:
            assert run.config.early_stopping is not None
            is_best = self._stopper.is_best(record)
            if run.config.early_stopping.restore_best:
                is_kept = is_best
                if is_best:
                    self._best = self._model()
            progress.stopped_early = self._stopper.should_stop
        if progress.step_in_epoch == run.plan.steps_per_epoch:
            progress.epoch += 1
            progress.step_in_epoch = 0
            self._totals.epoch_sums = self._no_sums()
        run.view.epoch(record)
        if is_kept and self._confusion is not None:
            run.recorder.confusion(int(record["epoch"]), self._confusion)
        if run.config.callbacks:
            run.module.load_state_dict(self._model())
            for callback in run.config.callbacks:
                callback.on_epoch_end(self._callback_state(), record)

    def _no_sums(self) -> list[float]:
        return [0.0] * (2 + len(part_names(self._objective())))

    def _make_record(self) -> Record:
        losses = loss_record(self._totals.epoch_sums, part_names(self._objective()))
        loss = losses["loss"]
        if self._totals.epoch_sums[1] > 0 and not math.isfinite(loss):
            raise diverged(loss, f"in epoch {self._progress.epoch + 1}")
        record: Record = {
            "epoch": self._progress.epoch + 1,
            "steps": self._progress.step_in_epoch,
            **losses,
            "learning_rate": self._learning_rate(),
            "seconds": time.perf_counter() - self._epoch_began,
        }
        if self._run.plan.num_validation_rows:
            began = time.perf_counter()
            record.update(self._evaluate())
            self._totals.spend("evaluate", time.perf_counter() - began)
        return record

    def _evaluate_model(self, model: dict[str, Any]) -> Record:
        """Measure one model on the validation rows of all shards."""
        rows = self._job_over_all(None, {"model": model})
        reports = [json.loads(data) for _, kind, data in rows if kind == "result"]
        return self._combined(reports, [data for _, kind, data in rows if kind == "metrics"])

    def _objective(self) -> LossFunction:
        return objective_of(self._run.config, self._run.module)

    def _combined(self, reports: Iterable[Any], metrics: Sequence[bytes]) -> Record:
        """The history's entries of an evaluation, from what the shards report of it."""
        config = self._run.config
        loss = self._objective()
        sums = torch.zeros(2 + len(part_names(loss)), dtype=torch.float64)
        for report in reports:
            values = (report["loss_sum"], report["weight"], *report["label_sums"])
            sums += torch.tensor(values, dtype=torch.float64)
        over_all = Metrics(config.metrics, config.task, loss.predictions, torch.device("cpu"))
        record = evaluation_record(sums, over_all.compute_over(metrics), part_names(loss))
        self._confusion = over_all.confusion
        return record

    def _is_complete(self) -> bool:
        plan = self._run.plan
        return self._progress.is_complete(plan.epochs, plan.max_steps)

    def _is_epoch_over(self) -> bool:
        progress, plan = self._progress, self._run.plan
        return progress.step == plan.max_steps or progress.step_in_epoch >= plan.steps_per_epoch

    # --- what stays ---------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        if self.checkpoints.is_wanted and not self._is_complete():
            began = time.perf_counter()
            self.checkpoints.save(self._progress.step, self._shared_state())
            self._totals.spend("checkpoint", time.perf_counter() - began)

    def _shared_state(self) -> dict[str, Any]:
        if self._stopper is not None:
            self._progress.early_stopping = self._stopper.state_dict()
        return {
            "states": self._states(),
            "period": self._period.state_dict(),
            "watch": self._watch.state_dict(),
            "epoch_sums": self._totals.epoch_sums,
            "state": self._progress.state_dict(),
            "best_model": self._best,
            "shards": self._fingerprints,
        }

    def _resume(self) -> None:
        """Go on from the newest checkpoint of the same run, if there is one."""
        shared = self.checkpoints.newest()
        if shared is None:
            return
        self._load_states(shared["states"])
        self._period.load_state_dict(shared["period"])
        self._watch.load_state_dict(shared["watch"])
        self._totals.epoch_sums = list(shared["epoch_sums"])
        self._progress = TrainState.from_state_dict(shared["state"])
        self._best = shared["best_model"]
        if self._stopper is not None:
            self._stopper.load_state_dict(self._progress.early_stopping)
        if shared.get("shards") != self._fingerprints:
            self._progress.begin_epoch_anew()
            self._totals.epoch_sums = self._no_sums()

    def _callback_state(self) -> CallbackState:
        progress = self._progress
        return CallbackState(
            rank=0,
            world_size=self._run.plan.world_size,
            epoch=progress.epoch,
            step=progress.step,
            loss=progress.history[-1]["loss"] if progress.history else math.nan,
            model=self._run.module,
        )

    def _show(self, loss: float) -> None:
        progress = Progress(
            phase="train",
            epoch=self._progress.epoch + 1,
            step=self._progress.step,
            loss=loss,
            rows=self._totals.rows[0],
        )
        self._run.view.progress(0, progress)

    def _outcome(self) -> Trained:
        totals = self._totals
        return Trained(
            history=self._progress.state_dict()["history"],
            steps=self._progress.step,
            restarts=self._restarts,
            seconds=totals.phases(),
            throughput_by_rank=totals.throughput(),
            bytes_sent_by_rank=totals.bytes_sent,
        )


def run_rounds(rounds: RoundsDriver) -> Trained:
    """Train, and give the weights to the run's module.

    Raises:
        WorkerError: the user's code failed in a task.
        TrainingDiverged: the loss is not finite or has exploded.
        TrainingFailed: jobs failed more than ``max_restarts`` times.
    """
    try:
        with tuned_allocator():  # states of the same size come and go, round after round
            trained = rounds.train()
    except BaseException:
        rounds.checkpoints.close(abort=True)
        raise
    rounds.checkpoints.close(abort=False)
    return trained

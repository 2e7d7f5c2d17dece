"""How does a run train in rounds? One plain Spark job per round; the driver merges in between.

Deeplearning4j's shape: the state goes to every shard, each shard trains a round of steps from it,
the states come back as their weighted mean, summed in the order of shards. No gang is needed: slots
may be fewer than shards, come and go, and run a task twice. A lost task is run again by Spark, and
gives the same bits.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from sparkdl import roundworker
from sparkdl.checkpoint.format import encode
from sparkdl.checkpoint.tree import snapshot
from sparkdl.environment import versions
from sparkdl.packing import PackedModule, pack
from sparkdl.plan import RoundPart
from sparkdl.roundworker import RoundOrder
from sparkdl.spark.roundcheckpoints import RoundCheckpoints
from sparkdl.spark.run import Run, Trained
from sparkdl.spark.stages import STATE, merge_states, run_stage
from sparkdl.spark.supervise import Limits, Rows, supervise
from sparkdl.sync.averaging import AveragingStrategy
from sparkdl.sync.period import RoundReport
from sparkdl.train.callbacks import CallbackState, make_stopper
from sparkdl.train.divergence import LossWatch, diverged
from sparkdl.train.evaluate import record as evaluation_record
from sparkdl.train.loss import resolve_loss
from sparkdl.train.metrics import Metrics
from sparkdl.train.state import Record, TrainState

logger = logging.getLogger(__name__)

_PATIENCE = 6
"""How many heartbeat time-outs a task may be silent: Spark itself replaces lost ones meanwhile."""


def train_in_rounds(run: Run, strategy: AveragingStrategy) -> Trained:
    """Train, and give the weights to the run's module.

    Raises:
        WorkerError: the user's code failed in a task.
        TrainingDiverged: the loss is not finite or has exploded.
        TrainingFailed: jobs failed more than ``max_restarts`` times.
    """
    rounds = _Rounds(run, strategy)
    try:
        trained = rounds.train()
    except BaseException:
        rounds.checkpoints.close(abort=True)
        raise
    rounds.checkpoints.close(abort=False)
    return trained


@dataclass(kw_only=True)
class _Totals:
    """What the tasks have reported, by shard."""

    rows: list[int]
    seconds: list[float]
    bytes_sent: list[int]
    steps: float = 0.0
    """Seconds of the slowest task of each round, summed."""
    overhead: float = 0.0
    """The rest of the rounds' seconds."""
    evaluate: float = 0.0
    checkpoint: float = 0.0
    epoch_sums: list[float] = field(default_factory=lambda: [0.0, 0.0])


class _Rounds:
    """The driver's side of a run."""

    def __init__(self, run: Run, strategy: AveragingStrategy) -> None:
        self._run = run
        self._strategy = strategy
        config = run.config
        self._period = strategy.make_period()
        self._outer = strategy.make_outer(run.plan.world_size)
        self._watch = LossWatch(config.divergence_factor)
        self._progress = TrainState()
        self._stopper = make_stopper(config, has_validation=run.plan.num_validation_rows > 0)
        self._state: dict[str, Any] = {"model": copy.deepcopy(run.module.state_dict())}
        self._trained = [n for n, p in run.module.named_parameters() if p.requires_grad]
        self._best: dict[str, Any] | None = None
        self._restarts = 0
        self._num_jobs = 0
        num_shards = run.plan.world_size
        self._totals = _Totals(
            rows=[0] * num_shards, seconds=[0.0] * num_shards, bytes_sent=[0] * num_shards
        )
        blank = _blank(run.module)
        self._payload = roundworker.pack_payload(config, blank.skeleton, blank.tensors)
        self.checkpoints = RoundCheckpoints(run)

    def train(self) -> Trained:
        """The whole story."""
        self._resume()
        self._run.view.attempt(0, self._progress.step)
        for callback in self._run.config.callbacks:
            callback.on_train_begin(self._callback_state())
        while not self._is_complete():
            self._train_epoch()
            self._end_epoch()
            self._save_if_due()
        self.checkpoints.final(self._progress.step, self._shared_state())
        self._run.module.load_state_dict(self._best or self._state["model"])
        for callback in self._run.config.callbacks:
            callback.on_train_end(self._callback_state())
        return self._outcome()

    # --- rounds -------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        self._epoch_began = time.perf_counter()
        while not self._is_epoch_over():
            self._train_round()
            if not self._is_epoch_over():
                self._save_if_due()

    def _train_round(self) -> None:
        progress, plan = self._progress, self._run.plan
        began = time.perf_counter()
        part = RoundPart(
            epoch=progress.epoch,
            step_in_epoch=progress.step_in_epoch,
            step=progress.step,
            num_steps=self._num_steps(),
        )
        rows = self._job(part)
        reports = {rank: json.loads(data) for rank, kind, data in rows if kind == "result"}
        payloads = [data for _, kind, data in rows if kind == STATE]
        learning_rate = self._merge(payloads) if payloads else self._learning_rate()
        progress.step += part.num_steps
        progress.step_in_epoch += part.num_steps
        progress.rows_seen += sum(report["rows"] for report in reports.values())
        self.checkpoints.note(part.step, progress.step)
        slowest = self._take(reports, rows)
        losses = sum(report["loss_sum"] for report in reports.values())
        weights = sum(report["weight"] for report in reports.values())
        loss = losses / weights if weights > 0 else math.nan
        if weights > 0:
            self._watch.look(loss, progress.step)
        overhead = time.perf_counter() - began - slowest
        self._totals.steps += slowest
        self._totals.overhead += overhead
        assert plan.world_size == len(reports)
        self._period.observe(
            RoundReport(
                steps=part.num_steps,
                step_seconds=slowest,
                merge_seconds=overhead,
                loss=loss,
                learning_rate=learning_rate,
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

    def _merge(self, payloads: list[bytes]) -> float:
        """Take the mean of the replicas, and what the strategy makes of it."""
        _, mean = merge_states(payloads)
        learning_rate = float(mean["optimizer"]["param_groups"][0].get("lr", math.nan))
        if self._outer is not None:
            anchor = [self._state["model"][name] for name in self._trained]
            self._outer.step(anchor, [mean["model"][name] for name in self._trained], learning_rate)
        if self._strategy.optimizer_state == "reset":
            mean["optimizer"]["state"] = {}
        self._state = mean
        return learning_rate

    def _take(self, reports: dict[int, Any], rows: Rows) -> float:
        """Add up what the tasks report; returns the seconds of the slowest."""
        totals = self._totals
        for rank, report in reports.items():
            totals.rows[rank] += report["rows"]
            totals.seconds[rank] += report["seconds"]
            totals.epoch_sums[0] += report["loss_sum"]
            totals.epoch_sums[1] += report["weight"]
        for rank, kind, data in rows:
            if kind == STATE:
                totals.bytes_sent[rank] += len(data)
        return max(float(report["seconds"]) for report in reports.values())

    def _job(self, part: RoundPart | None) -> Rows:
        """Run one job over all shards, as often as `max_restarts` allows in the whole run."""
        run, settings = self._run, self._run.settings
        data = b"".join(encode(snapshot(self._state)))
        result = supervise(
            run.spark,
            partial(self._submit, part, data),
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
        )
        self._restarts += result.restarts
        self._num_jobs += result.restarts + 1
        return result.rows

    def _submit(self, part: RoundPart | None, data: bytes, attempt: int) -> Callable[[], Rows]:
        run = self._run
        if attempt > self._num_jobs:
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
        )
        depth = getattr(self._strategy, "aggregation_depth", 1) if part is not None else 1
        return partial(
            run_stage,
            run.table.df,
            order,
            data,
            depth=depth,
            channel=run.link.channel,
            profile=run.slots.profile,
        )

    # --- epochs -------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        run, progress = self._run, self._progress
        record = self._make_record()
        progress.add_record(record)
        if self._stopper is not None:
            assert run.config.early_stopping is not None
            if self._stopper.is_best(record) and run.config.early_stopping.restore_best:
                self._best = self._state["model"]
            progress.stopped_early = self._stopper.should_stop
        if progress.step_in_epoch == run.plan.steps_per_epoch:
            progress.epoch += 1
            progress.step_in_epoch = 0
            self._totals.epoch_sums = [0.0, 0.0]
        run.view.epoch(record)
        if run.config.callbacks:
            run.module.load_state_dict(self._state["model"])
            for callback in run.config.callbacks:
                callback.on_epoch_end(self._callback_state(), record)

    def _make_record(self) -> Record:
        loss_sum, weight = self._totals.epoch_sums
        loss = loss_sum / weight if weight > 0 else math.nan
        if weight > 0 and not math.isfinite(loss):
            raise diverged(loss, f"in epoch {self._progress.epoch + 1}")
        record: Record = {
            "epoch": self._progress.epoch + 1,
            "steps": self._progress.step_in_epoch,
            "loss": loss,
            "learning_rate": self._learning_rate(),
            "seconds": time.perf_counter() - self._epoch_began,
        }
        if self._run.plan.num_validation_rows:
            began = time.perf_counter()
            record.update(self._evaluate())
            self._totals.evaluate += time.perf_counter() - began
        return record

    def _evaluate(self) -> Record:
        """Measure the present state on the validation rows of all shards."""
        rows = self._job(None)
        sums = torch.zeros(2, dtype=torch.float64)
        for _, kind, data in rows:
            if kind == "result":
                report = json.loads(data)
                sums += torch.tensor([report["loss_sum"], report["weight"]], dtype=torch.float64)
        config = self._run.config
        predictions = resolve_loss(config.loss, config.task).predictions
        metrics = Metrics(config.metrics, config.task, predictions, torch.device("cpu"))
        seen = [data for _, kind, data in rows if kind == "metrics"]
        return evaluation_record(sums, metrics.compute_over(seen))

    def _learning_rate(self) -> float:
        """That of the first parameter group, at the end of the newest round."""
        if "optimizer" not in self._state:
            return math.nan
        return float(self._state["optimizer"]["param_groups"][0].get("lr", math.nan))

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
            self._totals.checkpoint += time.perf_counter() - began

    def _shared_state(self) -> dict[str, Any]:
        if self._stopper is not None:
            self._progress.early_stopping = self._stopper.state_dict()
        return {
            "round": self._state,
            "strategy": {
                "period": self._period.state_dict(),
                "outer": None if self._outer is None else self._outer.state_dict(),
            },
            "watch": self._watch.state_dict(),
            "epoch_sums": self._totals.epoch_sums,
            "state": self._progress.state_dict(),
            "best_model": self._best,
        }

    def _resume(self) -> None:
        """Go on from the newest checkpoint of the same run, if there is one."""
        shared = self.checkpoints.newest()
        if shared is None:
            return
        self._state = shared["round"]
        self._period.load_state_dict(shared["strategy"]["period"])
        if self._outer is not None:
            self._outer.load_state_dict(shared["strategy"]["outer"])
        self._watch.load_state_dict(shared["watch"])
        self._totals.epoch_sums = list(shared["epoch_sums"])
        self._progress = TrainState.from_state_dict(shared["state"])
        self._best = shared["best_model"]
        if self._stopper is not None:
            self._stopper.load_state_dict(self._progress.early_stopping)

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
        body = {
            "phase": "train",
            "epoch": self._progress.epoch + 1,
            "step": self._progress.step,
            "loss": loss,
            "rows": self._totals.rows[0],
        }
        self._run.view.heartbeat(0, body)

    def _outcome(self) -> Trained:
        totals = self._totals
        return Trained(
            history=self._progress.state_dict()["history"],
            steps=self._progress.step,
            restarts=self._restarts,
            seconds={
                "rounds: slowest task": totals.steps,
                "rounds: everything else": totals.overhead,
                "evaluate": totals.evaluate,
                "checkpoint": totals.checkpoint,
            },
            throughput_by_rank=[
                rows / seconds if seconds > 0 else 0.0
                for rows, seconds in zip(totals.rows, totals.seconds, strict=True)
            ],
            bytes_sent_by_rank=totals.bytes_sent,
        )


def _blank(module: nn.Module) -> PackedModule:
    """The module with zeros where every round brings its own weights."""
    blank = copy.deepcopy(module)
    for tensor in blank.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            tensor.detach().zero_()
    return pack(blank)

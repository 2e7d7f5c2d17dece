"""The driver's loop of a run in rounds, whatever the strategy trains in them: see `Replicas`.

One plain Spark job per round; counters, history, early stopping, checkpoints and callbacks between
the rounds. Without a ``checkpointDir`` the driver holds the state of the newest round.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch

from sparkdl.comm.channel import Hub
from sparkdl.data.plan import RoundPart
from sparkdl.report.live.progress import Progress
from sparkdl.report.summary import TrainingSummary
from sparkdl.runtime.process import cpu_model, tuned_allocator
from sparkdl.runtime.versions import versions
from sparkdl.serialization.program.program_state import ProgramState, read_by_steps
from sparkdl.serialization.travel.attributes import Attributes
from sparkdl.spark.rounds.round_jobs import RoundEvaluation, RoundJobs, logged
from sparkdl.spark.run.resume import find_checkpoint, patiently
from sparkdl.spark.run.run import Run, Trained
from sparkdl.storage.checkpoint_format import Writer, load_shared
from sparkdl.storage.checkpoint_writer import CheckpointManager
from sparkdl.storage.lease import Lease
from sparkdl.sync.averaging.period import Period, RoundReport
from sparkdl.sync.module_tensors import give_tensors, is_same, tensors_of
from sparkdl.train.callbacks import (
    NO_PLACE,
    OUTSIDE,
    CallbackState,
    Requests,
    call_evaluated,
    give_states,
    states_of,
)
from sparkdl.train.objective.divergence import LossWatch
from sparkdl.train.objective.logs import fill
from sparkdl.train.objective.metric_states import added
from sparkdl.train.objective.metrics import Metrics
from sparkdl.train.objective.training_step import logs
from sparkdl.train.round_replica import check_held
from sparkdl.train.state import EpochBook, Record, TrainState
from sparkdl.train.training_state import left_by

logger = logging.getLogger(__name__)

_PHASES = ("rounds: slowest task", "rounds: everything else", "evaluate", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class RoundDone:
    """The results of a round."""

    reports: dict[int, Any]
    """Shard -> what its task reports: ``rows``, ``seconds``, ``loss_sum``, ``weight``,
    ``label_sums``."""
    bytes_sent: dict[int, int]
    """Shard -> bytes of the states that its task has sent."""

    @property
    def rows(self) -> int:
        """Samples of the round."""
        return sum(report["rows"] for report in self.reports.values())

    @property
    def sums(self) -> tuple[float, ...]:
        """Weighted losses and weights of the samples of the round, then each label's losses."""
        reports = list(self.reports.values())
        # A replica that has diverged reports nothing of its labels.
        labels = [r["label_sums"] for r in reports if r["label_sums"]]
        return (
            sum(r["loss_sum"] for r in reports),
            sum(r["weight"] for r in reports),
            *(sum(values) for values in zip(*labels, strict=True)),
        )

    @property
    def seconds(self) -> float:
        """The seconds of the slowest task's steps."""
        return max(float(report["seconds"]) for report in self.reports.values())


class Replicas(Protocol):
    """The states that a strategy trains in rounds: one that all shards share, or one per member."""

    @property
    def learning_rate(self) -> float:
        """That of the first parameter group, at the end of the newest round."""

    def set_learning_rate(self, rate: float) -> None:
        """Go on with another learning rate; raises ConfigError if the strategy decides on it."""

    def train(self, part: RoundPart) -> RoundDone:
        """Train the steps of ``part`` on all shards, and keep what comes of it."""

    def model(self) -> dict[str, Any]:
        """The ``state_dict`` that would be the result if the run ended now."""

    def attributes(self) -> dict[str, Any] | None:
        """Return what the module holds besides tensors that is not as it came; None: nothing."""

    def set_attributes(self, attributes: dict[str, Any]) -> None:
        """Go on with other ones; raises ConfigError if the strategy cannot."""

    def set_tensors(self, tensors: dict[str, Any]) -> None:
        """Go on with other weights and buffers, by name; raises ConfigError, likewise."""

    def evaluate(self, state: TrainState) -> RoundEvaluation:
        """Measure on the validation rows of all shards what `model` gives."""

    def follow_freezing(self) -> None:
        """Train what callbacks have left the run's module to train; ConfigError if it cannot."""

    def notes(self) -> list[Record]:
        """Return what was seen of each member of a population."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides counters and history."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; of an earlier fit it has no weights."""


def run_rounds(
    run: Run,
    period: Period,
    make: Callable[[RoundJobs], Replicas],
    *,
    watch: LossWatch | None = None,
) -> Trained:
    """Train, and give the weights to the run's module; ``make`` makes the strategy's part.

    ``watch`` judges the mean loss of each round; None: by the configuration. Raises
    TrainingDiverged, and as `RoundJobs.run`.
    """
    rounds = _Rounds(run, period, make, watch or LossWatch(run.config.divergence_factor))
    with contextlib.ExitStack() as stack:
        if run.link.url is not None:
            assert run.link.checkpoints is not None
            rounds.lease = stack.enter_context(Lease(run.link.checkpoints, run.run_key, run.run_id))
            rounds.checkpoints = stack.enter_context(_checkpoints(run))
        stack.enter_context(tuned_allocator())  # states of the same size come and go
        return rounds.train()


def _checkpoints(run: Run) -> CheckpointManager:
    """Writes checkpoints on the driver, as the only rank."""
    assert run.link.checkpoints is not None
    return CheckpointManager(
        run.link.checkpoints,
        run.config.checkpoint,
        rank=0,
        world_size=1,
        writer=Writer(run_key=run.run_key, run_id=run.run_id, attempt=0),
        environment={
            **versions(),
            "cpu": cpu_model(),
            "threads": str(run.slots.threads),
            "shards": str(run.plan.world_size),
            **run.plan.notes(),
        },
        signal=Hub(),
        timeout_seconds=run.settings.collective_timeout_seconds,
    )


class _Rounds:
    """A run in rounds; what changes is in its parts."""

    def __init__(
        self, run: Run, period: Period, make: Callable[[RoundJobs], Replicas], watch: LossWatch
    ) -> None:
        self.run = run
        self.period = period
        self.watch = watch
        self.book = EpochBook(run.config, run.plan, has_logs=logs(run.config, run.module))
        self.jobs = RoundJobs(run, self.book)
        self.replicas = make(self.jobs)
        self.held = Attributes(run.module, resets=True, shared=run.shared)
        self.totals = Totals(run.plan.world_size, self.jobs.labels, run.view.spent)
        self.checkpoints: CheckpointManager | None = None
        self.lease: Lease | None = None
        self.requests = Requests(refusal=OUTSIDE)
        self.metrics: Metrics | None = None
        """Metrics of the training batches, if they are wanted."""
        if run.config.training_metrics:
            self.metrics = Metrics.of(run.config, run.objective, torch.device("cpu"))
        self.logs = b""
        """Packed states of what tasks saw of the epoch's samples; see `objective.metric_states`."""
        self.read_by_tasks: ProgramState | None = None
        """What the code of module and loss reads outside of them, where callbacks may change it."""
        if run.config.callbacks:
            self.read_by_tasks = read_by_steps(run.module, vars(run.config), with_objects=True)

    def train(self) -> Trained:
        run, book, totals = self.run, self.book, self.totals
        callbacks = run.config.callbacks
        self._resume()
        first_step = book.state.step
        run.view.attempt(0, first_step)
        totals.began = time.perf_counter()
        with self._followed():
            for callback in callbacks:
                callback.on_train_begin(self._callback_state())
        self.requests.refusal = None
        self.requests.no_save = NO_PLACE if self.checkpoints is None else None
        while not book.is_complete:
            began = time.perf_counter()
            while not book.is_epoch_over:
                self._train_round()
                if not book.is_epoch_over:
                    if book.is_evaluation_due:
                        self._evaluate(began)
                    self._save_if_due()
            if not book.is_evaluated:
                self._evaluate(began)
                self._save_if_due()
        if self.checkpoints is not None:
            self.checkpoints.final(book.state.step, self._shared_state(), {})
        give_tensors(run.module, book.best_model or self.replicas.model())
        self.held.load_state_dict(self.replicas.attributes())
        self.requests.refusal = OUTSIDE
        for callback in callbacks:
            callback.on_train_end(self._callback_state())
        summary = TrainingSummary(
            history=book.state.state_dict()["history"],
            steps=book.state.step,
            first_step=first_step,
            restarts=self.jobs.restarts,
            phase_seconds=totals.phases(),
            throughput_by_rank=totals.throughput(),
            bytes_sent_by_rank=totals.bytes_sent,
            population=self.replicas.notes(),
        )
        left = left_by(self._shared_state()) if run.keeps_state else None
        return Trained(summary=summary, was_stopped=book.state.stopped_early, left=left)

    def _train_round(self) -> None:
        state, totals = self.book.state, self.totals
        began = time.perf_counter()
        part = RoundPart(
            epoch=state.epoch,
            step_in_epoch=state.step_in_epoch,
            step=state.step,
            num_steps=min(self.period.steps(state.step), self.book.num_steps_left),
        )
        done = self.replicas.train(part)
        is_due = None if self.checkpoints is None else self.checkpoints.due
        self.book.count(part.num_steps, done.rows, is_due)
        totals.add(done)
        if parts := logged(done.reports[shard] for shard in sorted(done.reports)):
            find = self.run.module.get_submodule if self.metrics is None else self.metrics.metric
            self.logs = added([self.logs, *parts] if self.logs else parts, find)
        loss_sum, weight, *_ = done.sums
        loss = loss_sum / weight if weight > 0 else math.nan
        if weight > 0:
            self.watch.look(loss, state.step)
        overhead = time.perf_counter() - began - done.seconds
        totals.spend_round(done, overhead)
        self.period.observe(
            RoundReport(
                steps=part.num_steps,
                step_seconds=done.seconds,
                merge_seconds=overhead,
                loss=loss,
                learning_rate=self.replicas.learning_rate,
            )
        )
        rows = totals.rows[0]
        progress = Progress(
            phase="train", epoch=state.epoch + 1, step=state.step, loss=loss, rows=rows
        )
        self.run.view.progress(0, progress)

    def _evaluate(self, began: float) -> None:
        """Measure the model of this moment, and do what follows from that."""
        run, book = self.run, self.book
        record = book.record(
            self.totals.epoch_sums,
            self.jobs.labels,
            learning_rate=self.replicas.learning_rate,
            seconds=time.perf_counter() - began,
        )
        if self.metrics is not None:
            record.update(self.metrics.compute_over([self.logs]))
        evaluation = None
        if run.plan.num_validation_rows:
            started = time.perf_counter()
            evaluation = self.replicas.evaluate(book.state)
            self.totals.spend("evaluate", time.perf_counter() - started)
        is_epoch_over = book.is_epoch_over
        if evaluation is not None:
            record.update(evaluation.record)
        if self.metrics is None:
            fill(record, [self.logs] if self.logs else [], run.module)
        is_kept = book.enter(record, self.replicas.model)
        if book.state.step_in_epoch == 0:
            self.totals.begin_epoch()
            self.logs = b""
        run.view.epoch(record)
        if is_kept and evaluation is not None and evaluation.confusion is not None:
            counts = evaluation.confusion
            run.view.fact(0, {"kind": "confusion", "epoch": record["epoch"], "counts": counts})
        if run.config.callbacks:
            with self._followed():
                call_evaluated(
                    run.config.callbacks,
                    self._callback_state,
                    record,
                    self._act,
                    lambda: is_epoch_over or book.is_complete,
                )
            self.held.check_shared()
            self._warn_of_globals()
            self.replicas.follow_freezing()

    def _warn_of_globals(self) -> None:
        """Warn once of what a callback has changed where tasks do not see it."""
        changed = [] if self.read_by_tasks is None else self.read_by_tasks.changed()
        if changed:
            self.read_by_tasks = None
            logger.warning(
                "a callback has changed %r, which the module or the loss reads, and in rounds "
                "callbacks run on the driver, whose globals and objects tasks do not see: they go "
                "on with its first value; keep it in a buffer of the module, which a callback "
                "finds at state.model, or set executionMode='gang'",
                changed[0],
            )

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        """Have the run's module be as the replicas' are, and these as callbacks leave it within."""
        module, model = self.run.module, self.replicas.model()
        if self.run.config.callbacks:
            give_tensors(module, model)
        self.held.load_state_dict(self.replicas.attributes())
        before, names = Attributes(module), tensors_of(module).keys()
        yield
        if self.run.config.callbacks:
            held = tensors_of(module).items()
            found = {n: v for n, v in held if v is None or isinstance(v, torch.Tensor)}
            changed = [
                name
                for name, value in found.items()
                if not (is_same(value, model[name]) if name in model else name in names)
            ]
            if changed:
                copied = copy.deepcopy(found)  # all at once, so that tied weights stay tied
                self.replicas.set_tensors({name: copied[name] for name in changed})
        if before.has_changed() or before.changed_layers():
            attributes = self.held.state_dict()
            check_held(attributes)
            self.replicas.set_attributes(attributes)

    def _act(self) -> None:
        asked = self.requests.take(self.book.state.step)
        if asked.learning_rate is not None:
            self.replicas.set_learning_rate(asked.learning_rate)
        self.book.is_checkpoint_due |= asked.save
        self.book.state.stopped_early |= asked.stop

    def _save_if_due(self) -> None:
        book = self.book
        if not book.is_checkpoint_due or book.is_complete:
            return
        assert self.checkpoints is not None
        book.is_checkpoint_due = False
        began = time.perf_counter()
        self.checkpoints.save(book.state.step, self._shared_state(), {})
        self.totals.spend("checkpoint", time.perf_counter() - began)

    def _shared_state(self) -> dict[str, Any]:
        return {
            "states": self.replicas.state_dict(),
            "period": self.period.state_dict(),
            "watch": self.watch.state_dict(),
            "epoch_sums": self.totals.epoch_sums,
            "logs": self.logs,
            "shards": self._fingerprints(),
            **self.book.state_dict(),
            "callbacks": states_of(self.run.config.callbacks),
        }

    def _resume(self) -> None:
        """Go on from the newest checkpoint of the same run, or else from an earlier fit."""
        link, begins_from, found = self.run.link, self.run.begins_from, None
        if link.url is not None and link.checkpoints is not None:
            found = find_checkpoint(self.run, link.checkpoints)
        if found is not None:
            if self.lease is not None:
                self.lease.begin(0, found.path)
            shared = patiently(partial(load_shared, found))
        elif begins_from is not None:
            shared = copy.deepcopy(begins_from.shared())  # rules change theirs in place
        else:
            return
        self.replicas.load_state_dict(shared["states"])
        self.period.load_state_dict(shared["period"])
        self.book.load_state_dict(shared)
        if found is None:
            return
        self.watch.load_state_dict(shared["watch"])
        self.totals.epoch_sums = list(shared["epoch_sums"])
        self.logs = shared["logs"]
        give_states(self.run.config.callbacks, shared["callbacks"])
        if shared.get("shards") != self._fingerprints():
            self.book.state.begin_epoch_anew()
            self.totals.begin_epoch()
            self.logs = b""

    def _fingerprints(self) -> list[str]:
        return [shard.fingerprint for shard in self.run.plan.shards]

    def _callback_state(self) -> CallbackState:
        state = self.book.state
        return CallbackState(
            rank=0,
            world_size=self.run.plan.world_size,
            epoch=state.epoch,
            step=state.step,
            loss=state.history[-1]["loss"] if state.history else math.nan,
            model=self.run.module,
            learning_rate=self.replicas.learning_rate,
            requests=self.requests,
        )


class Totals:
    """Sums of what tasks have reported so far, by shard; ``report`` gets what time was spent on."""

    def __init__(
        self,
        num_shards: int,
        labels: Sequence[str],
        report: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        self.rows = [0] * num_shards
        self.seconds = [0.0] * num_shards
        self.bytes_sent = [0] * num_shards
        self.epoch_sums = [0.0] * (2 + len(labels))
        """Weighted losses and weights of the samples of the epoch, and each label's losses."""
        self.began = time.perf_counter()
        """Time at which training began, by `time.perf_counter`."""
        self._report = report
        self._phases = dict.fromkeys(_PHASES, 0.0)
        self._spent: list[dict[str, float]] = [{} for _ in range(num_shards)]

    def add(self, done: RoundDone) -> None:
        """Take note of a round."""
        for shard_id, report in done.reports.items():
            self.rows[shard_id] += report["rows"]
            self.seconds[shard_id] += report["seconds"]
        for shard_id, num_bytes in done.bytes_sent.items():
            self.bytes_sent[shard_id] += num_bytes
        for position, value in enumerate(done.sums):
            self.epoch_sums[position] += value

    def begin_epoch(self) -> None:
        """Forget the sums of the epoch that has ended."""
        self.epoch_sums = [0.0] * len(self.epoch_sums)

    def spend_round(self, done: RoundDone, overhead: float) -> None:
        """Take note of what a round's time was spent on, by shard.

        A shard waits from its own end to that of the slowest. What the round has taken besides,
        for Spark's scheduling, for states on their way and their mean, is communication.
        """
        self._phases["rounds: slowest task"] += done.seconds
        self._phases["rounds: everything else"] += overhead
        for shard_id, spent in enumerate(self._spent):
            report = done.reports.get(shard_id, {"spent": {}})
            own = dict(report["spent"])
            own["waiting"] = max(0.0, done.seconds - sum(own.values()))
            own["communication"] = max(0.0, overhead)
            _add(spent, own)
        self._report_all()

    def spend(self, what: Literal["evaluate", "checkpoint"], seconds: float) -> None:
        """Take note of what the driver did while all shards waited for it."""
        for spent in (self._phases, *self._spent):
            _add(spent, {what: seconds})
        self._report_all()

    def _report_all(self) -> None:
        """Report all times; other things get the rest, such as that of callbacks on the driver."""
        elapsed = time.perf_counter() - self.began
        for shard_id, own in enumerate(self._spent):
            rest = max(0.0, elapsed - sum(own.values()))
            self._report(shard_id, {**own, "other": own.get("other", 0.0) + rest})

    def phases(self) -> dict[str, float]:
        """Phase -> seconds."""
        return dict(self._phases)

    def throughput(self) -> list[float]:
        """Samples per second of each shard while it was trained on."""
        return [
            rows / seconds if seconds > 0 else 0.0
            for rows, seconds in zip(self.rows, self.seconds, strict=True)
        ]


def _add(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    for what, value in seconds.items():
        total[what] = total.get(what, 0.0) + value

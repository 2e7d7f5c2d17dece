"""The Spark jobs of a run in rounds, each of which trains or measures.

Spark alone runs lost tasks again. A job that has failed comes back here, and all shards are made
anew before it is run again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sparkdl.comm.file_chunks import JobResults, gathered
from sparkdl.data.plan import RoundPart
from sparkdl.runtime.versions import versions
from sparkdl.serialization.travel.packed_module import pack_blank
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.supervisor import supervise
from sparkdl.spark.rounds.round_stages import PATH, Merge, run_stage
from sparkdl.spark.run.run import Run
from sparkdl.spark.session.compat import is_connect
from sparkdl.storage.checkpoint_format import encode
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.train.objective.label_losses import part_names
from sparkdl.train.objective.logs import fill, from_text
from sparkdl.train.objective.metrics import Metrics
from sparkdl.train.state import EpochBook, Record
from sparkdl.train.validation import record as evaluation_record
from sparkdl.worker import population_member
from sparkdl.worker.round_task import RoundOrder, RoundWork, pack_payload, train_or_evaluate

logger = logging.getLogger(__name__)

_PATIENCE = 3
"""Heartbeat time-outs that a task may be silent on Spark Connect, which does not say which ones
Spark has lost: it replaces them meanwhile."""

Stage = Callable[[RoundOrder], JobResults]
"""Runs one job, given what all its tasks need to know."""


@dataclass(frozen=True, kw_only=True)
class RoundEvaluation:
    """The results of a model on the validation rows of all shards."""

    record: Record
    """Its entries of the history."""
    confusion: list[list[float]] | None
    """A classifier's rows by label and prediction, or None."""


def logged(reports: Iterable[Any]) -> list[bytes]:
    """Return what several tasks report besides losses; see `train.objective.metric_states`."""
    return [from_text(report["logs"]) for report in reports if report.get("logs")]


def encoded(state: Any) -> bytes:
    """A state that all shards share, as `train_or_evaluate` takes it."""
    return gathered(encode(snapshot(state, copies=False)))


class RoundJobs:
    """Runs the jobs of one run."""

    def __init__(self, run: Run, book: EpochBook, *, first_attempt: int = 0) -> None:
        """Prepare the jobs of a run, of which the first has the number ``first_attempt``."""
        self.restarts = 0
        """Number of times that a job was run again."""
        self._run = run
        self._book = book
        self._next_attempt = first_attempt
        self.labels = part_names(run.objective)
        """Labels whose losses are kept apart."""
        blank = pack_blank(run.module)
        self._payload = pack_payload(
            run.config, blank.skeleton, blank.tensors, run.link.values, run.shared
        )

    def run(self, part: RoundPart | None, work: RoundWork, stage: Stage) -> JobResults:
        """Run one job, which measures if there is no part; raises what `supervise` raises."""
        run, settings = self._run, self._run.settings
        if is_connect(run.spark):
            seconds = _PATIENCE * settings.heartbeat_timeout_seconds
            settings = replace(settings, heartbeat_timeout_seconds=seconds)
        result = supervise(
            replace(run, settings=settings),
            partial(self._submit, part, work, stage),
            first_attempt=self._next_attempt,
            needs_all=False,
            what="evaluate" if part is None else f"train from step {part.step}",
            once_there="waiting for the first round",
        )
        self.restarts += result.restarts
        self._next_attempt += result.restarts + 1
        run.table.note({data.decode() for _, kind, data in result.rows if kind == PATH})
        return [row for row in result.rows if row[1] != PATH]

    def run_on_all(
        self,
        part: RoundPart | None,
        state: Callable[[], bytes],
        *,
        work: RoundWork = train_or_evaluate,
        merge: Merge | None = None,
    ) -> JobResults:
        """Run one job in which all shards get the same state; see `run` and `run_stage`."""
        if merge is not None:
            work = partial(train_or_evaluate, pieces=merge.pieces)
        return self.run(part, work, lambda order: run_stage(self._run, order, state, merge))

    def measure(self, model: dict[str, Any], attributes: dict[str, Any] | None) -> RoundEvaluation:
        """Measure one model on the validation rows of all shards."""
        state = {"model": model, "attributes": attributes}
        rows = self.run_on_all(None, partial(encoded, state))
        reports = [json.loads(data) for _, kind, data in rows if kind == "result"]
        return self.evaluation(reports, [data for _, kind, data in rows if kind == "metrics"])

    def evaluation(self, reports: Iterable[Any], metrics: Sequence[bytes]) -> RoundEvaluation:
        """Combine what the shards report of one model."""
        config, cpu = self._run.config, torch.device("cpu")
        sums = torch.zeros(2 + len(self.labels), dtype=torch.float64)
        reports = list(reports)
        for report in reports:
            values = (report["loss_sum"], report["weight"], *report["label_sums"])
            sums += torch.tensor(values, dtype=torch.float64)
        over_all = Metrics.of(config, self._run.objective, cpu)
        record = evaluation_record(sums, over_all.compute_over(metrics), self.labels)
        fill(record, logged(reports), self._run.module)
        return RoundEvaluation(record=record, confusion=over_all.confusion)

    def _submit(
        self, part: RoundPart | None, work: RoundWork, stage: Stage, attempt: Attempt
    ) -> Callable[[], JobResults]:
        run = self._run
        if attempt.number > self._next_attempt:
            number = self.restarts + attempt.number - self._next_attempt
            run.view.begun_again(number, self._book.state.step)
            run.table.forget()  # whatever was lost: all shards are written anew
            logger.info("running the round again from its beginning")
        order = RoundOrder(
            run_id=run.run_id,
            attempt=attempt.number,
            plan=run.plan,
            payload=self._payload,
            part=part,
            threads=run.slots.threads,
            versions=versions(),
            work=work,
            heartbeat_timeout_seconds=run.settings.heartbeat_timeout_seconds,
            source=run.table.reader,
            # Of a population every round has another member on the first shard.
            looks=run.looks if work is not population_member.work else None,
        )
        return partial(stage, order)

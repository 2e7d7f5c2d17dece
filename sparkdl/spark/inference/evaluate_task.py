"""The tasks of ``evaluate`` and ``scores``.

Each task evaluates its partition and gives one row, which holds its `evaluate_rows.Part`. This file
imports nothing of Spark's machine learning, which takes a Python worker most of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import torch
from pyspark import TaskContext

from sparkdl.data.collate import arguments
from sparkdl.data.plan import SpoolColumn
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference import evaluate_rows
from sparkdl.inference.outputs import Output, check_rows, pick
from sparkdl.inference.predict import ModuleTask, RowRange, ready, runs
from sparkdl.worker.watcher import ended_when_hung


@dataclass(frozen=True, kw_only=True)
class EvaluateTask(ModuleTask):
    """All that a task of ``evaluate`` or ``scores`` needs to know."""

    measures: evaluate_rows.Measures
    predicted: Output
    """The module's output of which ``transform`` makes the prediction."""
    labels: tuple[SpoolColumn, ...]
    """One, several with an argument each, or none: then the loss compares with the inputs."""
    weight: SpoolColumn | None
    heartbeat_timeout_seconds: float = 60.0
    """Time after which a task's process is ended if it neither runs Python nor uses the CPU."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Evaluate one partition's rows, in the columns inputs, labels, weight."""
        with ended_when_hung(self.heartbeat_timeout_seconds):
            rows = list(_as_row(partial(self._part, batches)))
        yield from rows

    def _part(self, batches: Iterator[pa.RecordBatch]) -> evaluate_rows.Part:
        evaluator: evaluate_rows.Evaluator | None = None
        with ready(self) as (module, device):
            for batch in batches:
                if evaluator is None:  # a partition without rows makes none
                    evaluator = evaluate_rows.Evaluator(self.measures, device)
                for run, output, target, weight in self.compared(module, device, batch.columns):
                    if run.arguments is not None:
                        num_rows = run.arguments.num_rows
                        predicted = self._predicted(output, num_rows)
                        evaluator.update(output, predicted, target, weight, num_rows)
                evaluator.check()
        return evaluate_rows.Part() if evaluator is None else evaluator.part()

    def compared(
        self, module: Any, device: torch.device, arrays: Sequence[pa.Array]
    ) -> Iterator[tuple[RowRange, Any, Any, torch.Tensor | None]]:
        """Run by run: its inputs, output, target, weight; all None if none of its rows is kept."""
        others = iter(arrays[len(self.columns) :])
        labels = [evaluate_rows.read_labels(next(others), asked) for asked in self.labels]
        columns = [column for column, _ in labels]
        weights: Any = None
        if self.weight is not None:
            _, weights = evaluate_rows.read_labels(next(others), self.weight)
        start = 0
        for run in runs(arrays[: len(self.columns)], self.columns, self.batch_size, device):
            rows = slice(start, start + run.num_rows)
            start += run.num_rows
            if run.arguments is None:
                yield run, None, None, None
                continue
            output = self.forward.module_output(module, run.arguments)
            kept = [run.chosen(values[rows]) for _, values in labels]
            target = arguments(columns, kept).to(device) if labels else run.arguments
            weight: Any = None if weights is None else run.chosen(weights[rows])
            yield run, output, target.packed(), weight

    def _predicted(self, output: Any, num_rows: int) -> Any:
        if not self.measures.task.has_one_label:
            return None
        after = self.forward.postprocessing
        found = pick(after(output) if after else output, self.predicted.path, self.predicted)
        return check_rows(found, num_rows, self.predicted).detach()


@dataclass(frozen=True)
class AddTask:
    """Adds up the parts in a partition, in the order of their numbers; passes errors on."""

    measures: evaluate_rows.Measures
    heartbeat_timeout_seconds: float = 60.0

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        payloads = (payload for batch in batches for payload in batch["payload"])
        # One at a time, so that one part only is copied.
        parts = (evaluate_rows.Part.from_bytes(payload.as_py()) for payload in payloads)
        with ended_when_hung(self.heartbeat_timeout_seconds):
            rows = list(_as_row(lambda: evaluate_rows.united(parts, self.measures)))
        yield from rows


def _as_row(work: Callable[[], evaluate_rows.Part]) -> Iterator[pa.RecordBatch]:
    """One row: a part, with the error of ours that kept it from being made; none without rows.

    Spark would run a task that raises several times, and hide what it says among its own words.
    """
    try:
        part = work()
    except (ConfigError, DataError) as error:
        part = evaluate_rows.Part(error=(type(error).__name__, str(error)))
    if part.sums or part.error:
        context = TaskContext.get()
        number = context.partitionId() if context is not None else 0
        yield pa.RecordBatch.from_pydict(
            {"part": pa.array([number], pa.int32()), "payload": [part.to_bytes()]}
        )


def losses(task: EvaluateTask, batches: Iterator[Sequence[pa.Array]]) -> Iterator[pa.Array]:
    """Each row's loss; null for rows that are skipped."""
    with ready(task) as (module, device):
        loss = task.measures.make_loss(device)
        for arrays in batches:
            for run, output, target, _ in task.compared(module, device, arrays):
                if run.arguments is None:
                    yield pa.nulls(run.num_rows, pa.float64())
                else:
                    yield run.spread(evaluate_rows.row_losses(loss, output, target, task.measures))

"""A model's evaluation on Spark: one pass over the rows, and a stage that adds up.

Each task evaluates its partition and gives one row, which holds its `evaluate_rows.Part`. A second
stage adds up the parts, so that the driver gets few of them, however many partitions there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import torch
from pyspark import TaskContext
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import types as T
from torch import nn

from sparkdl.config import Task
from sparkdl.data.collate import Arguments, arguments
from sparkdl.data.plan import SpoolColumn
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference.evaluate_rows import (
    Evaluator,
    Measures,
    Part,
    evaluation,
    read_labels,
    row_losses,
    united,
)
from sparkdl.inference.outputs import Forward, Output, check_rows, pick
from sparkdl.inference.predict import ModuleTask, Run, class_logits, ready, runs
from sparkdl.inference.scores import BUILT_IN, Evaluation
from sparkdl.spark.inference.arrow_udf import with_columns
from sparkdl.spark.inference.output_columns import Wanted, plan_outputs
from sparkdl.spark.session.compat import conf, described
from sparkdl.spark.session.interrupts import interruptible
from sparkdl.spark.session.settings import read_settings
from sparkdl.worker.watcher import ended_when_hung

_ADDING_TASKS = 16
_SCHEMA = "part int, payload binary"


@dataclass(frozen=True, kw_only=True)
class EvaluateTask(ModuleTask):
    """All that a task of ``evaluate`` or ``scores`` needs to know."""

    measures: Measures
    predicted: Output
    """Of which of the module's outputs ``transform`` makes the prediction."""
    labels: tuple[SpoolColumn, ...]
    """One, several with an argument each, or none: then the loss compares with the inputs."""
    weight: SpoolColumn | None
    heartbeat_timeout_seconds: float = 60.0
    """How long a task may neither run Python nor use the CPU, before its process is ended."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Evaluate one partition's rows, in the columns inputs, labels, weight."""
        with ended_when_hung(self.heartbeat_timeout_seconds):
            rows = list(_as_row(partial(self._part, batches)))
        yield from rows

    def _part(self, batches: Iterator[pa.RecordBatch]) -> Part:
        evaluator: Evaluator | None = None
        with ready(self) as (module, device):
            for batch in batches:
                if evaluator is None:  # a partition without rows makes none
                    evaluator = Evaluator(self.measures, device)
                for run, output, target, weight in self.compared(module, device, batch.columns):
                    if run.arguments is not None:
                        num_rows = run.arguments.num_rows
                        predicted = self._predicted(output, num_rows)
                        evaluator.update(output, predicted, target, weight, num_rows)
                evaluator.check()
        return Part() if evaluator is None else evaluator.part()

    def compared(
        self, module: Any, device: torch.device, arrays: Sequence[pa.Array]
    ) -> Iterator[tuple[Run, Any, Any, torch.Tensor | None]]:
        """Run by run: its inputs, output, target, weight; all None if none of its rows is kept."""
        others = iter(arrays[len(self.columns) :])
        labels = [read_labels(next(others), asked) for asked in self.labels]
        columns = [column for column, _ in labels]
        weights: Any = None
        if self.weight is not None:
            _, weights = read_labels(next(others), self.weight)
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
        if self.measures.task == "custom":
            return None
        after = self.forward.postprocessing
        found = pick(after(output) if after else output, self.predicted.path, self.predicted)
        return check_rows(found, num_rows, self.predicted)


@dataclass(frozen=True)
class AddTask:
    """Adds up the parts in a partition, in the order of their numbers; passes errors on."""

    measures: Measures

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row."""
        yield from _as_row(lambda: united(_parts_in(batches), self.measures))


def _parts_in(batches: Iterable[pa.RecordBatch]) -> Iterator[Part]:
    for batch in batches:
        for payload in batch["payload"]:
            yield Part.from_bytes(payload.as_py())  # which copies one part only


def _as_row(work: Callable[[], Part]) -> Iterator[pa.RecordBatch]:
    """One row: a part, with the error of ours that kept it from being made; none without rows.

    Spark would run a task that raises several times, and hide what it says among its own words.
    """
    try:
        part = work()
    except (ConfigError, DataError) as error:
        part = Part(error=(type(error).__name__, str(error)))
    if part.sums or part.error:
        context = TaskContext.get()
        number = context.partitionId() if context is not None else 0
        yield pa.RecordBatch.from_pydict(
            {"part": pa.array([number], pa.int32()), "payload": [part.to_bytes()]}
        )


def evaluate(task: EvaluateTask, dataset: DataFrame, columns: Sequence[SparkColumn]) -> Evaluation:
    """Evaluate all rows; see `TorchModel.evaluate`.

    Args:
        task: what to do.
        dataset: the rows.
        columns: inputs, labels and weight, as the task takes them.
    """
    measures = task.measures
    for name in measures.metrics:
        if name in BUILT_IN:
            raise ConfigError(f"a metric cannot be called {name!r}: evaluate has that name itself")
    measures.make_metrics(measures.make_loss())  # as the tasks will
    spark = dataset.sparkSession
    seconds = read_settings(partial(conf, spark)).heartbeat_timeout_seconds
    task = replace(task, heartbeat_timeout_seconds=seconds)
    named = [column.alias(f"_{number}") for number, column in enumerate(columns)]
    added = dataset.select(*named).mapInArrow(task, _SCHEMA)
    # States of metrics may be large: then the driver gets one part.
    for num_tasks in (_ADDING_TASKS, 1) if measures.metrics else (_ADDING_TASKS,):
        together = added.repartition(num_tasks, "part").sortWithinPartitions("part")
        added = together.mapInArrow(AddTask(measures), _SCHEMA)
    with interruptible(spark), described(spark, "sparkdl: evaluate"):
        rows = sorted(added.collect(), key=lambda row: int(row["part"]))
    parts = (Part.from_bytes(row["payload"]) for row in rows)
    return evaluation(united(parts, measures), measures)


def row_scores(
    task: EvaluateTask, dataset: DataFrame, columns: Sequence[SparkColumn], name: str
) -> DataFrame:
    """The rows with the loss of each in column ``name``; see `TorchModel.scores`."""
    task.measures.make_loss()  # as the tasks will
    prefix = f"sparkdl_{task.digest[:16]}"
    made = {name: lambda loss: loss}
    return with_columns(dataset, prefix, columns, partial(_losses, task), T.DoubleType(), made)


def _losses(task: EvaluateTask, batches: Iterator[Sequence[pa.Array]]) -> Iterator[pa.Array]:
    """Each row's loss; null for rows that are skipped."""
    with ready(task) as (module, device):
        loss = task.measures.make_loss(device)
        for arrays in batches:
            for run, output, target, _ in task.compared(module, device, arrays):
                if run.arguments is None:
                    yield pa.nulls(run.num_rows, pa.float64())
                else:
                    yield run.spread(row_losses(loss, output, target, task.measures))


def num_classes(
    module: nn.Module, inputs: Arguments, forward: Forward, predicted: Wanted, task: Task
) -> int:
    """The classes that a classifier tells apart, seen by running it on zeros; otherwise 0.

    Raises:
        ConfigError: the prediction is nothing that a model of this task can give.
    """
    if task == "custom":
        return 0
    if predicted.output.layer is not None:
        raise ConfigError(
            "evaluate needs a predictionOutput of what the module returns; set it without layer"
        )
    found = plan_outputs(module, inputs, forward, [predicted]).found[None]
    if task == "regression":
        return 0
    return class_logits(pick(found, predicted.output.path, predicted.output)).shape[1]

"""A model's evaluation on Spark: one pass over the rows, and a stage that adds up.

Each task evaluates its partition and gives one row, which holds its `evaluate_rows.Part`. A second
stage adds up the parts, so that the driver gets few of them, however many partitions there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark import TaskContext
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from torch import nn

from sparkdl.config import Task
from sparkdl.data.collate import Arguments
from sparkdl.data.plan import SpoolColumn
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference.evaluate_rows import (
    Evaluator,
    Measures,
    Part,
    evaluation,
    row_losses,
    united,
)
from sparkdl.inference.evaluation_labels import padded, read_label
from sparkdl.inference.outputs import Forward, Output, check_rows, pick
from sparkdl.inference.predict import ModuleTask, Run, class_logits, input_rows, ready
from sparkdl.inference.scores import BUILT_IN, Evaluation
from sparkdl.spark.frames.columns import quoted
from sparkdl.spark.inference.arrow_udf import with_column
from sparkdl.spark.inference.output_columns import Wanted, by_rows, plan_outputs
from sparkdl.spark.session.compat import described
from sparkdl.spark.session.interrupts import interruptible
from sparkdl.train.objective.training_step import taken

_ADDING_TASKS = 16
_SCHEMA = "part int, kind string, payload binary"
_ERRORS: dict[str, type[Exception]] = {"ConfigError": ConfigError, "DataError": DataError}


@dataclass(frozen=True, kw_only=True)
class EvaluateTask(ModuleTask):
    """All that a task of ``evaluate`` or ``scores`` needs to know."""

    measures: Measures
    predicted: Output
    """Of which of the module's outputs ``transform`` makes the prediction."""
    labels: tuple[SpoolColumn, ...]
    """One, several with an argument each, or none: then the loss compares with the inputs."""
    weight: SpoolColumn | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Evaluate one partition's rows, in the columns inputs, labels, weight."""
        yield from _as_row(partial(self._part, batches))

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
        num_inputs = len(self.columns)
        inputs = input_rows(arrays[:num_inputs], self.columns)
        columns = (*self.labels, *([] if self.weight is None else [self.weight]))
        pairs = zip(columns, arrays[num_inputs:], strict=True)
        values: list[Any] = [read_label(column, array) for column, array in pairs]
        start = 0
        for run in inputs.runs(self.batch_size, device):
            kept = [run.chosen(rows[start : start + run.num_rows]) for rows in values]
            start += run.num_rows
            if run.arguments is None:
                yield run, None, None, None
                continue
            output = self.forward.module_output(module, run.arguments)
            weight = None if self.weight is None else kept.pop()
            yield run, output, self._target(run.arguments, kept, device), weight

    def _target(self, inputs: Arguments, rows: Sequence[Any], device: torch.device) -> Any:
        """What the loss compares with."""
        pairs = zip(self.labels, rows, strict=True)
        by_argument = {label.argument: padded(label, values).to(device) for label, values in pairs}
        if not by_argument:
            return inputs.packed()
        return by_argument.get(None, by_argument)

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
        yield from _as_row(lambda: _sum(_rows_of(batches), self.measures))


def _rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, bytes]]:
    for batch in batches:
        for kind, payload in zip(batch["kind"], batch["payload"], strict=True):
            yield kind.as_py(), payload.as_py()  # which copies one part only


def _sum(rows: Iterable[tuple[str, bytes]], measures: Measures) -> Part:
    """The sum of parts, given as kinds and payloads, which are unpacked one by one.

    Raises:
        SparkDLError: what went wrong in the first that failed, or they are too large in all.
    """

    def parts() -> Iterator[Part]:
        for kind, payload in rows:
            if kind in _ERRORS:
                raise _ERRORS[kind](bytes(payload).decode())
            yield Part.from_bytes(payload)

    return united(parts(), measures)


def _as_row(work: Callable[[], Part]) -> Iterator[pa.RecordBatch]:
    """One row: a part, or the error of ours that kept it from being made; none without rows.

    Spark would run a task that raises several times, and hide what it says among its own words.
    """
    try:
        part = work()
        if not part.rows:
            return
        kind, payload = "part", part.to_bytes()
    except (ConfigError, DataError) as error:
        kind = "DataError" if isinstance(error, DataError) else "ConfigError"
        payload = str(error).encode()
    context = TaskContext.get()
    number = context.partitionId() if context is not None else 0
    yield pa.RecordBatch.from_pydict(
        {"part": pa.array([number], pa.int32()), "kind": [kind], "payload": [payload]}
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
    named = [column.alias(f"_{number}") for number, column in enumerate(columns)]
    added = dataset.select(*named).mapInArrow(task, _SCHEMA)
    # States of metrics may be large: then the driver gets one part.
    for num_tasks in (_ADDING_TASKS, 1) if measures.metrics else (_ADDING_TASKS,):
        together = added.repartition(num_tasks, "part").sortWithinPartitions("part")
        added = together.mapInArrow(AddTask(measures), _SCHEMA)
    spark = dataset.sparkSession
    with interruptible(spark), described(spark, "sparkdl: evaluate"):
        rows = sorted(added.collect(), key=lambda row: int(row["part"]))
    return evaluation(_sum(((row["kind"], row["payload"]) for row in rows), measures), measures)


def row_scores(
    task: EvaluateTask,
    dataset: DataFrame,
    columns: Sequence[SparkColumn],
    keys: Sequence[str],
    name: str,
) -> DataFrame:
    """The loss of each row, next to the columns ``keys``; see `TorchModel.scores`."""
    task.measures.make_loss()  # as the tasks will
    packed, marker = (f"sparkdl_{task.digest[:16]}_{part}" for part in ("loss", "partition"))
    rows, pinned = by_rows(dataset, dataset.schema, marker)
    computed = with_column(rows, packed, columns, _loss_udf(task), T.DoubleType())
    scored = computed.withColumn(name, pinned(F.col(quoted(packed))))
    return scored.select(*map(quoted, keys), quoted(name))


def _loss_udf(task: EvaluateTask) -> Callable[..., Iterator[pa.Array]]:
    """The function of an iterator ``arrow_udf`` that gives each row's loss."""

    def losses_of(batches: Iterator[Sequence[pa.Array]]) -> Iterator[pa.Array]:
        with ready(task) as (module, device):
            loss = task.measures.make_loss(device)
            for arrays in batches:
                for run, output, target, _ in task.compared(module, device, arrays):
                    if run.arguments is None:
                        yield pa.nulls(run.num_rows, pa.float64())
                    else:
                        meant = taken(loss, output)
                        yield run.spread(_row_losses(loss, meant, target, task.measures))

    def losses_of_inputs(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        return losses_of((array,) for array in batches)

    def losses_of_columns(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return losses_of(batches)

    is_one = len(task.columns) == 1 and not task.labels
    return losses_of_inputs if is_one else losses_of_columns


def _row_losses(loss: Any, output: Any, target: Any, measures: Measures) -> pa.Array:
    """The loss of a batch of each row alone; null where the row counts for nothing."""
    found = row_losses(loss, output, target, measures)
    if found is None:
        raise ConfigError(
            "the loss gives one number for a whole batch, so single rows have no loss; let it "
            "return the loss of each sample, (batch,)"
        )
    losses, counts = (values.numpy() for values in found)
    counts = np.broadcast_to(counts, losses.shape)
    alone = np.divide(losses, counts, out=np.full_like(losses, np.nan), where=counts > 0)
    return pa.array(alone, mask=counts == 0)


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
    plan_outputs(module, inputs, forward, [predicted])
    if task == "regression":
        return 0
    with torch.inference_mode():
        output = forward.outputs(module, inputs)[None]
    return class_logits(pick(output, predicted.output.path, predicted.output)).shape[1]

"""How does a model's evaluation run on Spark? One pass over the rows, and a stage that adds up.

Each task evaluates its partition and gives one row: its `measure.Part`. A second stage adds up
groups of parts, so that the driver gets few of them, however many partitions there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference.evaluate_rows import (
    Evaluator,
    Measures,
    Part,
    alone,
    check_listed,
    evaluation,
    row_losses,
    united,
)
from sparkdl.inference.evaluation_labels import Beside, NamedLabel
from sparkdl.inference.outputs import Forward, Output, check_rows, pick
from sparkdl.inference.predict import ModuleTask, Run, class_logits, input_rows, ready
from sparkdl.inference.scores import BUILT_IN, Evaluation
from sparkdl.spark.frames.columns import quoted
from sparkdl.spark.inference.arrow_udf import with_column
from sparkdl.spark.inference.output_columns import Wanted, by_rows, plan_outputs
from sparkdl.spark.session.compat import described
from sparkdl.spark.session.interrupts import interruptible
from sparkdl.train.objective.training_step import taken

_GROUPS = 16
"""Groups in which parts are added up."""
_SCHEMA = "part int, kind string, listed map<string, bigint>, payload binary"
_ARROW_SCHEMA = pa.schema(
    [
        ("part", pa.int32()),
        ("kind", pa.string()),
        ("listed", pa.map_(pa.string(), pa.int64())),
        ("payload", pa.binary()),
    ]
)
_ERRORS: dict[str, type[Exception]] = {"ConfigError": ConfigError, "DataError": DataError}


@dataclass(frozen=True, kw_only=True)
class EvaluateTask(ModuleTask):
    """All that a task of ``evaluate`` or ``scores`` needs to know."""

    measures: Measures
    predicted: Output
    """Of which of the module's outputs ``transform`` makes the prediction."""
    label: Beside | None
    """None: there are several, or the loss compares with the inputs."""
    labels: tuple[NamedLabel, ...] = ()
    """Several labels."""
    weight: Beside | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Evaluate one partition's rows, in the columns inputs, label, weight."""
        yield from _told(partial(self._part, batches))

    def _part(self, batches: Iterator[pa.RecordBatch]) -> Part:
        evaluator: Evaluator | None = None
        with ready(self) as (module, device):
            for batch in batches:
                if evaluator is None:  # a partition without rows makes none
                    evaluator = Evaluator(self.measures, device)
                for run, output, target, weight in self.compared(module, device, batch.columns):
                    if run.arguments is None:
                        continue
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
        others = self._others(arrays[num_inputs:])
        start = 0
        for run in inputs.runs(self.batch_size, device):
            stop = start + run.num_rows
            beside = [run.chosen(values[start:stop]) for values in others]
            start = stop
            if run.arguments is None:
                yield run, None, None, None
                continue
            output = self.forward.module_output(module, run.arguments)
            target = self._target(run.arguments, beside, device)
            yield run, output, target, beside[-1] if self.weight is not None else None

    def _target(self, inputs: Arguments, beside: Sequence[Any], device: torch.device) -> Any:
        """What the loss compares with."""
        if self.labels:
            pairs = zip(self.labels, beside, strict=False)  # the weight may come behind them
            return {label.name: label.tensor(rows).to(device) for label, rows in pairs}
        return inputs.packed() if self.label is None else beside[0].to(device)

    def _others(self, arrays: Sequence[pa.Array]) -> list[Any]:
        values: list[Any] = [] if self.label is None else [self.label.read(arrays[0])]
        values += [label.read(array) for label, array in zip(self.labels, arrays, strict=False)]
        return values if self.weight is None else [*values, self.weight.read_weights(arrays[-1])]

    def _predicted(self, output: Any, num_rows: int) -> Any:
        if self.measures.task == "custom":
            return None
        after = self.forward.postprocessing
        found = pick(after(output) if after else output, self.predicted.path, self.predicted)
        return check_rows(found, num_rows, self.predicted)


@dataclass(frozen=True)
class AddTask:
    """Adds up the parts of each group, in the order of the partitions; passes errors on."""

    measures: Measures
    num_groups: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row per group."""
        groups: dict[int, list[Mapping[str, Any]]] = {}
        for batch in batches:
            heads = batch.select(["part", "kind", "listed"]).to_pylist()
            for head, payload in zip(heads, batch["payload"], strict=True):  # not copied yet
                groups.setdefault(head["part"] % self.num_groups, []).append(
                    {**head, "payload": payload}
                )
        for group in sorted(groups):
            yield from _told(partial(_sum, groups.pop(group), self.measures), group)


def _sum(rows: Sequence[Mapping[str, Any]], measures: Measures) -> Part:
    """The sum of parts as rows.

    Raises:
        SparkDLError: what went wrong in the first that failed, or they are too large in all.
    """
    rows = sorted(rows, key=lambda row: row["part"])
    for row in rows:
        if row["kind"] in _ERRORS:
            raise _ERRORS[row["kind"]](_bytes(row["payload"]).decode())
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes.update(dict(row["listed"]))  # a map is pairs in Arrow
    check_listed(sizes)  # before any of them is unpacked
    return united([Part.from_bytes(_bytes(row["payload"])) for row in rows], measures)


def _bytes(payload: Any) -> bytes:
    return bytes(payload.as_py() if isinstance(payload, pa.Scalar) else payload)


def _told(work: Callable[[], Part], number: int | None = None) -> Iterator[pa.RecordBatch]:
    """One row: a part, or the error of ours that kept it from being made.

    Spark would run a task that raises several times, and hide what it says among its own words.
    """
    listed: dict[str, int] = {}
    try:
        part = work()
        kind, listed, payload = "part", part.listed_bytes(), part.to_bytes()
        if not part.rows:
            return
    except (ConfigError, DataError) as error:
        kind, payload = type(error).__name__, str(error).encode()
        kind = kind if kind in _ERRORS else "ConfigError"
    if number is None:
        context = TaskContext.get()
        number = context.partitionId() if context is not None else 0
    row = {"part": number, "kind": kind, "listed": list(listed.items()), "payload": payload}
    yield pa.RecordBatch.from_pylist([row], schema=_ARROW_SCHEMA)


def evaluate(task: EvaluateTask, dataset: DataFrame, columns: Sequence[SparkColumn]) -> Evaluation:
    """Evaluate all rows; see `TorchModel.evaluate`.

    Args:
        task: what to do.
        dataset: the rows.
        columns: inputs, label and weight, as the task takes them.
    """
    measures = task.measures
    for name in measures.metrics:
        if name in BUILT_IN:
            raise ConfigError(f"a metric cannot be called {name!r}: evaluate has that name itself")
    measures.make_metrics(measures.make_loss())  # as the tasks will
    named = [column.alias(f"_{number}") for number, column in enumerate(columns)]
    parts = dataset.select(*named).mapInArrow(task, _SCHEMA)
    added = _added(parts, measures, _GROUPS)
    if measures.metrics:  # whose states may be large: the driver gets one part
        added = _added(added, measures, 1)
    spark = dataset.sparkSession
    with interruptible(spark), described(spark, "sparkdl: evaluate"):
        rows = [row.asDict() for row in added.collect()]
    return evaluation(_sum(rows, measures), measures)


def _added(parts: DataFrame, measures: Measures, num_groups: int) -> DataFrame:
    rows = parts.repartition(num_groups, F.col("part") % num_groups)
    return rows.mapInArrow(AddTask(measures, num_groups), _SCHEMA)


def row_scores(
    task: EvaluateTask,
    dataset: DataFrame,
    columns: Sequence[SparkColumn],
    keys: Sequence[str],
    name: str,
) -> DataFrame:
    """The loss of each row, beside the columns ``keys``; see `TorchModel.scores`."""
    task.measures.make_loss()  # as the tasks will
    packed, marker = (f"sparkdl_{task.digest[:16]}_{part}" for part in ("loss", "partition"))
    rows, seal = by_rows(dataset, dataset.schema, marker)
    computed = with_column(rows, packed, columns, _loss_udf(task), T.DoubleType())
    scored = computed.withColumn(name, seal(F.col(quoted(packed))))
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

    is_one = len(task.columns) == 1 and task.label is None and not task.labels
    return losses_of_inputs if is_one else losses_of_columns


def _row_losses(loss: Any, output: Any, target: Any, measures: Measures) -> pa.Array:
    rows = row_losses(loss, output, target, measures)
    if rows is None:
        raise ConfigError(
            "the loss gives one number for a whole batch, so single rows have no loss; let it "
            "return the loss of each sample, (batch,)"
        )
    losses = alone(*rows)
    return pa.array(losses, mask=np.isnan(losses) & (rows[1] == 0))


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

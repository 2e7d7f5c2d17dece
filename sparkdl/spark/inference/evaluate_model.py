"""A model's evaluation on Spark: one pass over the rows, and a stage that adds up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import types as T
from torch import nn

from sparkdl.data.collate import Arguments
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.inference.evaluate_rows import Measures, Part, evaluation, united
from sparkdl.inference.outputs import Forward, pick
from sparkdl.inference.scores import BUILT_IN, Evaluation
from sparkdl.spark.inference.arrow_udf import with_columns
from sparkdl.spark.inference.evaluate_task import AddTask, EvaluateTask, losses
from sparkdl.spark.inference.output_columns import WantedColumn, plan_outputs
from sparkdl.spark.session.compat import described, run_workers_here
from sparkdl.spark.session.failures import LOST_REMEDY, loss_reason, raise_unless_loss
from sparkdl.spark.session.interrupts import interruptible
from sparkdl.spark.session.settings import session_settings
from sparkdl.spark.session.stage_progress import working
from sparkdl.sync.frozen_layers import evaluation_mode
from sparkdl.train.objective.named_metrics import check_names, flat, resolved
from sparkdl.train.objective.training_step import taken

_ADDING_TASKS = 16
"""Tasks that add up parts, where Spark does not choose their number by the parts' size."""
_SCHEMA = "part int, payload binary"


def evaluate(task: EvaluateTask, dataset: DataFrame, columns: Sequence[SparkColumn]) -> Evaluation:
    """Evaluate all rows; see `TorchModel.evaluate`; raises ClusterError."""
    measures = task.measures
    for name in measures.metrics:
        if name in BUILT_IN:
            raise ConfigError(f"a metric cannot be called {name!r}: evaluate has that name itself")
    measures.make_metrics(measures.make_loss())  # as the tasks will
    spark = dataset.sparkSession
    run_workers_here(spark)
    seconds = session_settings(spark).heartbeat_timeout_seconds
    task = replace(task, heartbeat_timeout_seconds=seconds)
    named = [column.alias(f"_{number}") for number, column in enumerate(columns)]
    added = dataset.select(*named).mapInArrow(task, _SCHEMA)
    is_adaptive = spark.conf.get("spark.sql.adaptive.enabled") == "true"
    spread = added.repartition("part") if is_adaptive else added.repartition(_ADDING_TASKS, "part")
    add = AddTask(measures, seconds)
    added = spread.sortWithinPartitions("part").mapInArrow(add, _SCHEMA)
    if measures.metrics:  # their states may be large: then the driver gets one part
        together = added.repartition(1).sortWithinPartitions("part")
        added = together.mapInArrow(add, _SCHEMA)
    shown = working(spark, "evaluating", has_lines=False)
    with interruptible(spark), described(spark, "sparkdl: evaluate"), shown:
        try:
            rows = sorted(added.collect(), key=lambda row: int(row["part"]))
        except Exception as error:
            raise_unless_loss(error)
            reason = f"evaluate failed: {loss_reason(error)}; {LOST_REMEDY}"
            raise ClusterError(reason) from error
    parts = (Part.from_bytes(row["payload"]) for row in rows)
    return evaluation(united(parts, measures), measures)


def row_scores(
    task: EvaluateTask, dataset: DataFrame, columns: Sequence[SparkColumn], name: str
) -> DataFrame:
    """The rows with the loss of each in column ``name``; see `TorchModel.scores`."""
    task.measures.make_loss()  # as the tasks will
    prefix = f"sparkdl_{task.digest[:16]}"
    made = {name: lambda loss: loss}
    return with_columns(dataset, prefix, columns, partial(losses, task), T.DoubleType(), made)


def classes_and_metrics(
    module: nn.Module,
    inputs: Arguments,
    forward: Forward,
    predicted: WantedColumn,
    measures: Measures,
    labels: Sequence[str] = (),
) -> tuple[int, Mapping[str, Any]]:
    """The classes that a classifier tells apart, else 0; and the metrics; raises ConfigError.

    ``labels`` are the names of several.
    """
    loss, task = measures.make_loss(), measures.task
    check_names(measures.metrics, task, loss)
    metrics = measures.metrics
    if any(isinstance(metric, str) for _, _, metric in flat(metrics)):
        with torch.no_grad(), evaluation_mode(module):
            output = forward.module_output(module, inputs)
        metrics = resolved(metrics, loss, taken(loss, output), labels) or {}
    if not task.has_one_label:
        return 0, metrics
    if predicted.output.layer is not None:
        raise ConfigError(
            "evaluate needs a predictionOutput of what the module returns; set it without layer"
        )
    found = plan_outputs(module, inputs, forward, [predicted]).found[None]
    return task.num_classes(pick(found, predicted.output.path, predicted.output)), metrics

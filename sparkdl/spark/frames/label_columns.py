"""Labels and weights of rows, cast for training and for evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql import types as T

from sparkdl.config import Task
from sparkdl.inputs import Named
from sparkdl.spark.frames.columns import Prepared, prepare
from sparkdl.spark.frames.specified_columns import prepare_named
from sparkdl.train.objective.label_losses import class_labels


def prepare_labels(
    schema: T.StructType,
    task: Task,
    loss: Any,
    *,
    labels: Sequence[Named],
    label_col: str | None,
    weight_col: str | None,
    float_dtype: str,
    weight_dtype: str,
    is_case_sensitive: bool,
) -> list[Prepared]:
    """Several labels, the only label, and the weight, as far as there are any, in this order.

    Args:
        schema: schema of the DataFrame.
        task: what is learnt: a classifier's label is a class number, a regression's a float.
        loss: what compares with the labels, which says which of several are class numbers.
        labels: several labels.
        label_col: the column of the only label.
        weight_col: the column of the rows' weights.
        float_dtype: dtype of floating labels.
        weight_dtype: dtype of the weights.
        is_case_sensitive: see `columns.find`.

    Raises:
        DataError: a column is missing, or of a type of which no tensor can be made.
    """
    by_name = partial(prepare, schema, is_case_sensitive=is_case_sensitive)
    classes = class_labels(loss) if labels else set()
    prepared = [
        prepare_named(
            schema,
            entry,
            "label",
            float_dtype=float_dtype,
            as_classes=entry.argument in classes,
            is_case_sensitive=is_case_sensitive,
        )
        for entry in labels
    ]
    if label_col is not None:
        is_class = task == "classification"
        label = by_name(label_col, "label", float_dtype=float_dtype, as_classes=is_class)
        if task == "regression" and label.dtype == "int64":
            sql = "float" if float_dtype == "float32" else "double"
            label = replace(label, expression=label.expression.cast(sql), dtype=float_dtype)
        prepared.append(label)
    if weight_col is not None:
        prepared.append(by_name(weight_col, "weight", float_dtype=weight_dtype))
    return prepared

"""What comes beside the inputs when a model is evaluated, and how is it cast?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql import Column as SparkColumn
from pyspark.sql import types as T

from sparkdl.config import Task
from sparkdl.errors import ConfigError
from sparkdl.inference.evaluation_labels import Beside, NamedLabel
from sparkdl.inputs import Named
from sparkdl.spark.frames.columns import Prepared, prepare
from sparkdl.spark.frames.specified_columns import prepare_named
from sparkdl.train.objective.label_losses import class_labels


def _label_and_weight(
    schema: T.StructType,
    label_col: str | None,
    weight_col: str | None,
    task: Task,
    *,
    float_dtype: str,
    is_case_sensitive: bool,
) -> tuple[Prepared | None, Prepared | None]:
    """Label and weight, cast as `fit` casts them.

    Raises:
        DataError: one is missing, or of a type of which no tensor can be made.
    """
    by_name = partial(prepare, schema, float_dtype=float_dtype, is_case_sensitive=is_case_sensitive)
    label = weight = None
    if label_col is not None:
        label = by_name(label_col, "label", as_classes=task == "classification")
        if task == "regression" and label.dtype == "int64":
            sql = "float" if float_dtype == "float32" else "double"
            label = replace(label, expression=label.expression.cast(sql), dtype=float_dtype)
    elif task != "custom":
        raise ConfigError("labelCol is not set; name the column to compare predictions with")
    if weight_col is not None:
        weight = prepare(
            schema,
            weight_col,
            "weight",
            float_dtype="float64",
            is_case_sensitive=is_case_sensitive,
        )
    return label, weight


def read_beside(
    schema: T.StructType,
    task: Task,
    columns: tuple[str | None, str | None],
    entries: Sequence[Named],
    loss: Any,
    **types: Any,
) -> tuple[dict[str, Any], list[SparkColumn]]:
    """What comes beside the inputs: the fields of an `scoring.EvaluateTask`, and the columns.

    Args:
        schema: schema of the DataFrame.
        task: what the model has learnt.
        columns: names of the columns with the only label and the weight.
        entries: several labels.
        loss: what compares with them.
        types: how a column is cast; see `prepare`.
    """
    label, weight = _label_and_weight(schema, *columns, task, **types)
    several, labels = _several_labels(schema, entries, task, loss, **types)
    fields = {
        "label": None if label is None else Beside(label.name, label.dtype, label.as_classes),
        "labels": labels,
        "weight": None if weight is None else Beside(weight.name, weight.dtype),
    }
    return fields, [e.expression for e in (label, *several, weight) if e is not None]


def _several_labels(
    schema: T.StructType,
    entries: Sequence[Named],
    task: Task,
    loss: Any,
    *,
    float_dtype: str,
    is_case_sensitive: bool,
) -> tuple[list[Prepared], tuple[NamedLabel, ...]]:
    """Several labels, cast as `fit` casts them, and how tasks read them.

    Raises:
        DataError: one is missing, or of a type of which no tensor can be made.
        ConfigError: the model has a single label by its kind.
    """
    if entries and task != "custom":
        raise ConfigError(f"a model for {task} has one label; set labelCol, not labels")
    classes = class_labels(loss)
    prepared = [
        prepare_named(
            schema,
            entry,
            "label",
            float_dtype=float_dtype,
            as_classes=entry.argument in classes,
            is_case_sensitive=is_case_sensitive,
        )
        for entry in entries
    ]
    labels = tuple(
        NamedLabel(
            name=str(p.argument),
            specification=entry.specification,
            dtype=p.dtype,
            as_classes=p.as_classes,
        )
        for p, entry in zip(prepared, entries, strict=True)
    )
    return prepared, labels

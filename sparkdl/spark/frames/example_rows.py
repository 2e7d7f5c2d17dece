"""Rows that cannot be used, in words: by the values in them, since Spark numbers no rows."""

from __future__ import annotations

import ast
import datetime
import decimal
import math
from collections.abc import Mapping
from typing import Any

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, NumericType

from sparkdl.data.arrow_arrays import Findings
from sparkdl.data.column_stats import ColumnStats
from sparkdl.data.plan import SpoolColumn
from sparkdl.spark.frames.columns import resolve
from sparkdl.spark.session.compat import described, is_case_sensitive

_PLAIN = (bool, int, float, str, decimal.Decimal, datetime.date)
_MOST_VALUES, _MOST_CHARACTERS = 4, 40


def in_words(row: Row, first: str | None = None) -> str:
    """The plain values of a row with their columns, ``first`` before the others."""
    values = row.asDict()
    ordered = {first: values[first], **values} if first in values else values
    told = [
        f"{name}={_shortened(repr(value))}"
        for name, value in ordered.items()
        if isinstance(value, _PLAIN)
    ]
    return ", ".join(told[:_MOST_VALUES])


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def with_example(findings: Findings, df: DataFrame, name: str) -> None:
    """Name a null or uneven row of a column by its values, if it has plain ones.

    Args:
        findings: what is wrong with the column, where there is something.
        df: the rows of the user.
        name: of the column.
    """
    field, column = resolve(df.schema, name, is_case_sensitive=is_case_sensitive(df.sparkSession))
    is_array = isinstance(field.dataType, ArrayType)
    if findings.nulls:
        bad = column.isNull()
        if is_array:
            bad |= F.exists(column, lambda value: value.isNull())
    elif is_array and (usual := _usual_length(findings.shapes)) is not None:
        bad = F.size(column) != usual
    else:
        return
    if example := _first(df, bad, name):
        findings.first_null = example
        findings.first_of_shape = dict.fromkeys(findings.first_of_shape, findings.first_null)


def with_bad_value(stats: ColumnStats, df: DataFrame, column: SpoolColumn) -> None:
    """Name a row with a bad label or weight by its values; see `column_rules.bad_values`."""
    field, value = resolve(
        df.schema, column.name, is_case_sensitive=is_case_sensitive(df.sparkSession)
    )
    if not isinstance(field.dataType, NumericType):
        return
    value = value.cast("double")
    bad = F.isnan(value) | (F.abs(value) == math.inf)
    if column.as_classes or column.role == "weight":
        bad |= value < 0
    if column.as_classes:
        bad |= F.floor(value) != value
    stats.first_bad = _first(df, bad, column.name) or stats.first_bad


def _first(df: DataFrame, bad: SparkColumn, name: str) -> str:
    """The first row for which ``bad`` is true, in words; empty if it has no plain values."""
    with described(df.sparkSession, f"sparkdl: look for a row that cannot be used, by {name}"):
        row = df.where(bad).first()
    words = "" if row is None else in_words(row, name)
    return f"the row with {words}" * bool(words)


def _usual_length(shapes: Mapping[str, Any]) -> int | None:
    """The length of most rows, if each is a list of numbers and all others are of one length."""
    if len(shapes) != 2:
        return None
    usual = max(shapes, key=lambda shape: shapes[shape])
    try:
        shape = ast.literal_eval(usual)
    except (ValueError, SyntaxError):  # lists of different lengths inside
        return None
    return int(shape[0]) if isinstance(shape, tuple) and len(shape) == 1 else None

"""Rows that cannot be used are named by their values."""

from __future__ import annotations

import datetime
import logging
from typing import Any

import pytest
from pyspark.logger import PySparkLogger
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from sparkdl.errors import DataError
from sparkdl.spark.frames import example_rows
from sparkdl.spark.frames.example_rows import finite_rows, in_words, showing_filter

USED = {"F": F, "vector_to_array": vector_to_array}


def test_plain_values_name_a_row() -> None:
    row = Row(features=[1.0] * 99, id=7, name="x" * 99, day=datetime.date(2026, 1, 2), label=None)
    assert in_words(row) == f"id=7, name='{'x' * 36}..., day=datetime.date(2026, 1, 2)"
    assert in_words(Row(a=1, b=2, c=3, d=4, label=9), "label") == "label=9, a=1, b=2, c=3"
    assert in_words(Row(features=[1.0])) == ""


def test_pyspark_can_log_errors_after_its_logger_was_silenced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a logger of another class each of its errors would end in a TypeError."""
    name = "DataFrameQueryContextLogger"
    monkeypatch.setattr(logging.Logger.manager, "loggerDict", {})
    functions: Any = type("Functions", (), {"format_string": staticmethod(lambda *_: "numbered")})
    frame: Any = type("Frame", (), {"select": lambda *_: type("Rows", (), {"schema": None})})()
    monkeypatch.setattr(example_rows, "F", functions)
    assert example_rows._origin(frame) == "numbered"
    assert isinstance(logging.getLogger(name), PySparkLogger)
    assert not logging.getLogger(name).disabled


@pytest.mark.spark
def test_the_way_to_keep_finite_rows_keeps_them(spark: SparkSession) -> None:
    """As it is printed, for each kind of column and name."""
    bad = [float("nan"), float("inf"), float("-inf")]
    values: list[float] = [1.0, *bad, -2.0]
    rows = [
        (x, x, [1.0, x], [[x], [1.0, 2.0]], Vectors.dense([x, 1.0]), Row(f=x), [1.0, x], i)
        for i, x in enumerate(values)
    ]
    names = ["plain", "a.b", "arr", "nested", "vec", "u", "my arr", "id"]
    df = spark.createDataFrame(rows, names)
    for name in ("plain", "a.b", "arr", "nested", "vec", "u.f", "my arr"):
        shown = finite_rows(df, name)
        assert shown is not None
        kept = eval(f"df.{shown.partition(', with')[0]}", {"df": df, **USED})
        assert sorted(row.id for row in kept.collect()) == [0, 4], name
    assert finite_rows(df, "nothing") is finite_rows(df, "u") is None
    told = 'Among the 8 rows NaN or infinite values are in: feature "arr" of 3; drop these rows'
    shown = r'drop these rows, as by df.where\("forall\(arr, '
    with pytest.raises(DataError, match=shown), showing_filter(df):
        raise DataError(told)
    with pytest.raises(DataError, match=r"these rows of others$"), showing_filter(df):
        raise DataError(f"{told} of others")

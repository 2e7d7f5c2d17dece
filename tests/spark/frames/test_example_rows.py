"""Rows that cannot be used are named by their values."""

from __future__ import annotations

import datetime

from pyspark.sql import Row

from sparkdl.spark.frames.example_rows import in_words


def test_plain_values_name_a_row() -> None:
    row = Row(features=[1.0] * 99, id=7, name="x" * 99, day=datetime.date(2026, 1, 2), label=None)
    assert in_words(row) == f"id=7, name='{'x' * 36}..., day=datetime.date(2026, 1, 2)"
    assert in_words(Row(a=1, b=2, c=3, d=4, label=9), "label") == "label=9, a=1, b=2, c=3"
    assert in_words(Row(features=[1.0])) == ""

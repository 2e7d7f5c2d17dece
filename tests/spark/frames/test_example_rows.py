"""Rows that cannot be used are named by their values."""

from __future__ import annotations

import datetime
import logging
from typing import Any

import pytest
from pyspark.logger import PySparkLogger
from pyspark.sql import Row

from sparkdl.spark.frames import example_rows
from sparkdl.spark.frames.example_rows import in_words


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

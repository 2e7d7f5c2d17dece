"""Spark's errors are told apart by type."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    PySparkException,
    PySparkPicklingError,
    PythonException,
    UnknownException,
)

from sparkdl.errors import DataError
from sparkdl.spark.failures import is_loss, told_by


@pytest.mark.parametrize(
    "error", [Py4JError("x"), Py4JNetworkError("x"), PySparkException("x"), UnknownException("x")]
)
def test_what_starting_again_may_heal(error: Exception) -> None:
    assert is_loss(error)


@pytest.mark.parametrize(
    "error",
    [
        AnalysisException("no such table"),
        ArithmeticException("division by zero"),
        PythonException("their UDF"),
        PySparkPicklingError("their object"),
        DataError("null"),
        ValueError("x"),
        ConnectionRefusedError("x"),
    ],
)
def test_what_would_come_again(error: Exception) -> None:
    assert not is_loss(error)


def test_the_telling_lines() -> None:
    error = PySparkException(
        "Job aborted:\n\n  Lost task 0.0\n\tat org.apache.Spark\n... 3 more\ncause\nfourth\nfifth"
    )
    assert told_by(error) == "Job aborted: | Lost task 0.0 | cause | fourth"
    assert told_by(PySparkException("")) == "PySparkException"
    assert told_by(PySparkException("x" * 1000)) == "x" * 597 + "..."

"""Does an error of Spark mean that a worker was lost, or would it come again?"""

from __future__ import annotations

from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    IllegalArgumentException,
    NumberFormatException,
    PySparkPicklingError,
    PythonException,
    SparkNoSuchElementException,
    SparkRuntimeException,
    SparkUpgradeException,
    UnsupportedOperationException,
)

_WOULD_COME_AGAIN = (
    AnalysisException,
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    IllegalArgumentException,
    NumberFormatException,
    PySparkPicklingError,
    PythonException,
    SparkNoSuchElementException,
    SparkRuntimeException,
    SparkUpgradeException,
    UnsupportedOperationException,
)
"""Errors of Spark that are mistakes in the DataFrame's own query, not the loss of a worker."""


class TaskLost(Exception):
    """A task found nothing to work on, several times; running the job again may heal it."""


def is_loss(error: Exception) -> bool:
    """Whether a job failed for what starting it again may heal, as far as its type tells.

    Spark's errors have no common, documented base class. A barrier stage that fails, for
    whatever reason, gives a bare ``Py4JJavaError`` or its Spark Connect counterpart.
    """
    if isinstance(error, TaskLost):
        return True
    if isinstance(error, _WOULD_COME_AGAIN):
        return False
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j", "grpc")


def told_by(error: Exception) -> str:
    """What Spark says of a failure, without the stacks: its first lines, joined."""
    java = getattr(error, "java_exception", None)
    text = str(java.getMessage() if java is not None else error)
    lines = [line.strip() for line in text.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("at ", "..."))][:4]
    shown = " | ".join(telling) or type(error).__name__
    return shown if len(shown) <= 600 else shown[:597] + "..."

"""The errors of Spark, sorted into losses that a restart heals and mistakes that come again."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from typing import Any

from py4j.java_gateway import is_instance_of
from pyspark import SparkContext
from pyspark import errors as spark_errors
from pyspark.sql import SparkSession

from sparkdl.data.spool.local_disk import DISK_REMEDY
from sparkdl.errors import ClusterError, DataError, SparkDLError, StorageError, TrainingFailed
from sparkdl.spark.session.compat import has_ended

_WOULD_COME_AGAIN = (
    spark_errors.AnalysisException,
    spark_errors.ArithmeticException,
    spark_errors.ArrayIndexOutOfBoundsException,
    spark_errors.DateTimeException,
    spark_errors.IllegalArgumentException,
    spark_errors.NumberFormatException,
    spark_errors.PySparkPicklingError,
    spark_errors.PythonException,
    spark_errors.SparkNoSuchElementException,
    spark_errors.SparkRuntimeException,
    spark_errors.SparkUpgradeException,
    spark_errors.UnsupportedOperationException,
)
"""Errors of Spark that are mistakes in the DataFrame's own query, not the loss of a worker."""
_CANCELLED = ("SPARK_JOB_CANCELLED", "OPERATION_CANCELED")
_CANNOT_READ = "FAILED_READ_FILE"
_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""Java has no type for a full disk: it hands on what the C library says."""
_WAITED = "Exception thrown in awaitResult"
_TOO_LARGE = {
    "spark.driver.maxResultSize": (
        "the results of a job do not fit into the driver; raise spark.driver.maxResultSize, and "
        "spark.driver.memory with it"
    ),
    "spark.rpc.message.maxSize": (
        "a task is larger than Spark sends; raise spark.rpc.message.maxSize, or make smaller what "
        "travels in tasks: callbacks, functions and what they refer to, rows made in the driver"
    ),
}
"""Entries that Spark names where it refuses something for its size; Spark has no type for that."""
_KILLED = re.compile(
    r"exit(?:ed)?(?: with)?(?: status| code)?:? *137\b|OOMKilled|container OOM|"
    r"Container killed by YARN|(?:physical|virtual) memory (?:limits|used)|Out of memory",
    re.IGNORECASE,
)
"""What YARN, Kubernetes and Spark's own master say of what was killed, mostly for memory."""
_TERMINATED = re.compile(r"exit(?:ed)?(?: with)?(?: status| code)?:? *143\b", re.IGNORECASE)
"""What they say of what SIGTERM has ended."""

LOST = "a worker or executor was lost"
SILENT = "its process has ended without a word"
"""Of a worker that was lost and an executor that was not."""
LOST_REMEDY = (
    "a process that ends without a word was mostly killed for lack of memory: look into the "
    "executor's log, then lower batchSize, raise gradientAccumulationSteps or "
    "spark.executor.memoryOverhead; where executors come and go, raise maxRestarts"
)
"""What to do about `LOST`, if it goes on."""
_ENDED = (
    "an executor was ended by SIGTERM: its node was drained, its slots were taken back, or, on "
    "YARN, its container had too little memory"
)


class TaskLost(Exception):
    """A task found nothing to work on, several times; running the job again may heal it."""


def raise_unless_loss(error: Exception) -> None:
    """Return if a job failed for what starting it again may heal; else raise what the user sees.

    That is `TrainingFailed` if somebody cancelled it, an error of ours whose cause Spark names
    (`_meant_by`), or the error itself, if it would come again.
    """
    found = _meant_by(error)
    if found is not None:
        raise found from error
    if not is_loss(error):
        raise error


def raise_if_ended(spark: SparkSession, error: Exception | None = None) -> None:
    """Raise ClusterError if the session has ended, of which ``error`` is a consequence."""
    if has_ended(spark):
        raise ClusterError(
            "the Spark session has ended: the program or the cluster manager has stopped it, or "
            "its JVM was killed, mostly for lack of memory (spark.driver.memory); let the session "
            "live until the result is there, and start again: with a checkpointDir the same fit "
            "goes on from its checkpoints"
        ) from error


def loss_reason(error: Exception) -> str:
    """What a job was lost by, in a short sentence, with the remedy if memory was short."""
    if _KILLED.search(_text_of(error)):
        return (
            "an executor was killed, as it seems because its container had too little memory "
            f"({_cause_of(error)}); raise spark.executor.memoryOverhead or "
            "gradientAccumulationSteps, or lower batchSize"
        )
    if _TERMINATED.search(_text_of(error)):
        return f"{_ENDED} ({_cause_of(error)})"
    return f"{LOST} ({_cause_of(error)})"


def has_crashed(error: Exception) -> bool:
    """True if a Python worker has ended by itself, as far as Spark can tell."""
    return is_spark_error(error) and "Python worker exited unexpectedly" in _text_of(error)


def is_loss(error: Exception) -> bool:
    """True if a job failed for what starting it again may heal, as far as its type shows.

    A barrier stage that fails, for whatever reason, gives a bare ``Py4JJavaError``, or Connect's.
    """
    if isinstance(error, TaskLost):
        return True
    if isinstance(error, _WOULD_COME_AGAIN):
        return False
    return is_spark_error(error)


def is_spark_error(error: Exception) -> bool:
    """True if Spark, or the way to it, raised this; its errors have no common base class."""
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j", "grpc")


def _meant_by(error: Exception) -> SparkDLError | None:
    """Our error in place of Spark's, where its condition says what is wrong."""
    if is_spark_error(error) and any(text in _text_of(error) for text in _DISK_FULL):
        return StorageError(
            f"a local disk of Spark's is full, where it keeps its own files and the spools "
            f"({spark_message(error)}); {DISK_REMEDY}"
        )
    for entry, told in _TOO_LARGE.items():
        if is_spark_error(error) and entry in _text_of(error):
            return ClusterError(f"{told} ({spark_message(error)})")
    if isinstance(error, spark_errors.PythonException) and (other := _other_python(error)):
        return other
    condition = condition_of(error) or ""
    if condition in _CANCELLED:
        return TrainingFailed(
            f"the Spark job was cancelled, so it was not started again ({spark_message(error)})"
        )
    if condition.partition(".")[0] == _CANNOT_READ:
        return DataError(
            f"the source of the DataFrame cannot be read ({spark_message(error)}); see that "
            "its files are of the format that they are read as, restore them, or read the source "
            "anew if they were replaced"
        )
    return None


def python_cause(error: spark_errors.PythonException) -> str:
    """The last line of the traceback of a Python worker, which says what was raised."""
    traceback, _, _ = str(error).partition("\n\nJVM stacktrace:")
    return traceback.strip().rpartition("\n")[2].strip()


def _other_python(error: spark_errors.PythonException) -> ClusterError | None:
    """What to say where a function of the user's fails because workers run another Python."""
    cause, named = python_cause(error), os.environ.get("PYSPARK_PYTHON")
    if not cause.startswith("ModuleNotFoundError") and "PYTHON_VERSION_MISMATCH" not in cause:
        return None
    theirs: str = shutil.which(named or "python3") or named or "python3"
    how = "which PYSPARK_PYTHON names" if named else "since PYSPARK_PYTHON was not set"
    if "connect" in type(error).__module__:
        theirs, how = "the Python", "that PYSPARK_PYTHON named where the server was started"
    elif theirs == sys.executable:
        return None
    return ClusterError(
        f"a Python function that the DataFrame's rows need fails on a worker: {cause}; its worker "
        f"runs {theirs}, {how}, and this program runs {sys.executable}; set "
        f"PYSPARK_PYTHON={sys.executable} before the session and the function are made, or install "
        "there what is missing"
    )


def condition_of(error: Exception) -> str | None:
    """The name that Spark gives to an error in its list of error conditions, if it has one."""
    java: Any = getattr(error, "java_exception", None)
    if java is None:
        tell = getattr(error, "getCondition", lambda: None)
        return None if (condition := tell()) is None else str(condition)
    context: Any = SparkContext
    if not is_instance_of(context._gateway, java, "org.apache.spark.SparkThrowable"):
        return None
    condition = context._jvm.PythonErrorUtils.getCondition(java)
    return None if condition is None else str(condition)


def _message_of(java: Any) -> str:
    """The message of a Java exception, or of its cause where it only says that it waited for it."""
    while str(java.getMessage()).startswith(_WAITED) and java.getCause() is not None:
        java = java.getCause()
    return str(java.getMessage())


def _text_of(error: Exception) -> str:
    java = getattr(error, "java_exception", None)
    return str(error) if java is None else _message_of(java)


_OF_STACKS = ("at ", "...", "Driver stacktrace:")
"""How lines begin that show where in Spark's own code something happened."""


def spark_message(error: Exception) -> str:
    """What Spark says of a failure, without the stacks: its first lines, joined."""
    return _shortened(" | ".join(_telling_lines(error)[:4]) or type(error).__name__, 600)


def _cause_of(error: Exception) -> str:
    """The sentence of Spark's that says what has happened to a task."""
    lines = _telling_lines(error) or [type(error).__name__]
    causes = [line for line in lines if not line.startswith("Job aborted")]
    sentence = _EXCEPTION.sub("", (causes or lines)[0]).partition(". ")[0]
    return _shortened(sentence, 160)


_EXCEPTION = re.compile(r"^[\w.$]+(?:Exception|Error): ")
"""How Java begins the message of an exception."""


def _telling_lines(error: Exception) -> list[str]:
    lines = (line.strip() for line in _text_of(error).splitlines())
    return [line for line in lines if line and not line.startswith(_OF_STACKS)]


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."

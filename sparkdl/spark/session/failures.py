"""The errors of Spark, sorted into losses that a restart heals and mistakes that come again."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
from collections.abc import Sequence

from py4j.protocol import Py4JError
from pyspark.errors import (
    PySparkAttributeError,
    PySparkNotImplementedError,
    PySparkPicklingError,
    PySparkTypeError,
    PySparkValueError,
    PythonException,
)
from pyspark.sql import SparkSession

from sparkdl import errors
from sparkdl.data.spool.local_disk import DISK_REMEDY
from sparkdl.errors import ClusterError, DataError, SparkDLError, StorageError, TrainingFailed
from sparkdl.serialization.trust import is_users_own
from sparkdl.spark.session.causes import Cause, Kind, causes_of, judged, lacks_memory
from sparkdl.spark.session.compat import has_ended

_OF_THE_DRIVER = (
    *(PySparkAttributeError, PySparkNotImplementedError, PySparkPicklingError, PySparkTypeError),
    PySparkValueError,
)
"""Errors that pyspark raises of itself about what it is called with; no stage has failed."""
_CANNOT_READ = "FAILED_READ_FILE"
_UDF = "FAILED_EXECUTE_UDF"
_OWNER = re.compile(r"User defined function \(`?(?:\w+ \()?([\w.]+)")
"""The class that has made a function of the JVM, which Scala writes before its ``$$Lambda``."""
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')
_OF_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|^<")
_SQLSTATE = re.compile(r"\.? ?\bSQLSTATE: .*", re.DOTALL)
"""And what follows: an excerpt of the query."""
_IN_PROGRAM = re.compile(r"== DataFrame ==\n(\"\S+\") was called from\n(\S+)")
_IN_SQL = re.compile(r"== SQL.* ==\n(.+)")
"""Pattern of Spark's text that shows the expression that failed."""
_OF_QUERIES = ("0A", "3F", "42")
"""Classes of SQLSTATEs of what Spark finds before it reads a row."""
_OF_ROWS = ("21", "22", "23")
"""Classes of SQLSTATEs that are about values."""
_LONGEST = 400
"""Characters of one cause that are shown."""
_FAILED = "a stage before sparkdl's failed on the rows of the DataFrame"
_ALONE = "df.write.format('noop').mode('overwrite').save() runs the query alone"
_HANDLE_INVALID = 'drop or fill such rows, or set handleInvalid="skip" of that stage'
_MEMORY = (
    "give executors more memory (spark.executor.memory) or fewer spark.executor.cores, or have "
    "the rows in more partitions"
)
_INNER = (
    "Spark calls this an error of its own: write the rows to files first and read those, or try "
    "another version of Spark"
)
_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""Java has no type for a full disk: it hands on what the C library says."""
_LOCAL_FILE = re.compile(
    r"(?:NoSuchFile|FileNotFound)Exception: \S*[/\\]blockmgr-[0-9a-f]{8}-\S*"
    r"|Failed to create local dir in \S*"
)
"""Messages of Java and Spark about a file that is missing where Spark keeps its own."""
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
"""Messages of YARN, Kubernetes and Spark's own master about what was killed, mostly for memory."""
_TERMINATED = re.compile(r"exit(?:ed)?(?: with)?(?: status| code)?:? *143\b", re.IGNORECASE)
"""Messages of theirs about what SIGTERM has ended."""

LOST = "a worker or executor was lost"
SILENT = "its process has ended without a word"
"""Words about a worker that was lost while its executor was not."""
LOST_REMEDY = (
    "a process that ends without a word was mostly killed for lack of memory: look into the "
    "executor's log, then lower batchSize, raise gradientAccumulationSteps or "
    "spark.executor.memoryOverhead; where executors come and go, raise maxRestarts"
)
"""Remedy for `LOST`, if it goes on."""
_ENDED = (
    "an executor was ended by SIGTERM: its node was drained, its slots were taken back, or, on "
    "YARN, its container had too little memory"
)


class TaskLost(Exception):
    """A task found nothing to work on, several times; running the job again may heal it."""


def raise_unless_loss(error: Exception) -> None:
    """Return if a job failed for what starting it again may heal; else raise what the user sees.

    That is `TrainingFailed` if somebody cancelled it, an error of ours with the innermost cause
    that Spark names, or the error itself if Spark has not raised it, or a task of ours has raised
    what the user's own module did.
    """
    if isinstance(error, TaskLost):
        return
    if not is_spark_error(error):
        raise error
    found = _meant_by(error)
    if found is not None:
        raise found from error
    if not is_loss(error):
        raise error


def raise_if_ended(spark: SparkSession, error: Exception | None = None) -> None:
    """Raise ClusterError if the session has ended, of which ``error`` is a consequence."""
    if has_ended(spark):
        other = None
        with contextlib.suppress(Py4JError, OSError):  # what ended may be the JVM of all sessions
            other = SparkSession.getActiveSession()
        if other is not None and other is not spark and not has_ended(other):
            raise ClusterError(
                "the Spark session of this DataFrame has ended, and another one runs now; make the "
                "DataFrame again with that one"
            ) from error
        raise ClusterError(
            "the Spark session has ended: the program or the cluster manager has stopped it, or "
            "its JVM was killed, mostly for lack of memory (spark.driver.memory); let the session "
            "live until the result is there, and start again: with a checkpointDir the same fit "
            "goes on from its checkpoints"
        ) from error


def loss_reason(error: Exception) -> str:
    """Return why a job was lost, in a short sentence, with the remedy if memory was short."""
    if is_spark_error(error) and (gone := _lost_directory(causes_of(error))):
        return gone
    if _KILLED.search(_text_of(error)):
        return (
            "an executor was killed, as it seems because its container had too little memory "
            f"({_cause_of(error)}); raise spark.executor.memoryOverhead or "
            "gradientAccumulationSteps, or lower batchSize"
        )
    if _TERMINATED.search(_text_of(error)):
        return f"{_ENDED} ({_cause_of(error)})"
    return f"{LOST} ({_cause_of(error)})"


def _lost_directory(causes: Sequence[Cause]) -> str | None:
    """Return the message if Spark does not find files of its own; None: that is not so."""
    for cause in causes:
        if found := _LOCAL_FILE.search(f"{cause.type}: {cause.message}"):
            return (
                f"a local directory of Spark's is gone, without which its session cannot go on "
                f"({found[0]}); make a new session, and keep what tidies up away from "
                "spark.local.dir"
            )
    return None


def has_crashed(error: Exception) -> bool:
    """True if a Python worker has ended by itself, as far as Spark can tell."""
    return is_spark_error(error) and "Python worker exited unexpectedly" in _text_of(error)


def is_loss(error: Exception) -> bool:
    """True if a job failed for what starting it again may heal; see `causes.judged`."""
    if isinstance(error, TaskLost):
        return True
    return is_spark_error(error) and judged(causes_of(error)) is Kind.LOST


def is_spark_error(error: Exception) -> bool:
    """True if Spark, or the way to it, raised this; its errors have no common base class."""
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j", "grpc")


def _meant_by(error: Exception) -> SparkDLError | None:
    """Our error in place of one of Spark's, if it is not a loss; None: a loss, or told well."""
    if isinstance(error, _OF_THE_DRIVER):
        return None
    causes = causes_of(error)
    kind = judged(causes)
    for cause in causes:
        if cause.is_of_users_code:
            return None if kind is Kind.LOST else _of_users_code(error, cause, causes)
    if any(text in cause.message for cause in causes for text in _DISK_FULL):
        return StorageError(
            f"a local disk of Spark's is full, where it keeps its own files and the spools "
            f"({spark_message(error)}); {DISK_REMEDY}"
        )
    for entry, told in _TOO_LARGE.items():
        if any(entry in cause.message for cause in causes):
            return ClusterError(f"{told} ({spark_message(error)})")
    if kind is Kind.CANCELLED:
        return TrainingFailed(
            f"the Spark job was cancelled, so it was not started again ({spark_message(error)})"
        )
    if kind is Kind.CLUSTER:
        return ClusterError(
            f"Spark cannot run the DataFrame's query here: {_told(causes)}; {_remedy(causes)}"
        )
    if kind is Kind.LOST:
        return None
    if gone := _lost_directory(causes):
        return StorageError(gone)
    if any((cause.condition or "").startswith(_CANNOT_READ) for cause in causes):
        return DataError(
            f"the source of the DataFrame cannot be read ({_told(causes)}); see that its files "
            "are of the format that they are read as, restore them, or read the source anew if "
            "they were replaced"
        )
    if causes[0].state[:2] in _OF_QUERIES or "AnalysisException" in causes[0].type:
        return DataError(f"Spark refuses the DataFrame's query: {_told(causes)}; mend it")
    return DataError(f"{_FAILED}: {_told(causes)}{_place(causes)}; {_remedy(causes)}")


def _of_users_code(error: Exception, cause: Cause, causes: Sequence[Cause]) -> SparkDLError | None:
    """Return the error for an exception of the query's function; None: our task reports it."""
    if not cause.is_python:
        owner = _OWNER.search(cause.message)
        stage = f"{owner[1]}: " if owner else ""
        remedy = _HANDLE_INVALID if "handleInvalid" in _told(causes) else _remedy(causes)
        return DataError(f"{_FAILED}: {stage}{_told(causes)}{_place(causes)}; {remedy}")
    lacking = _LACKING.search(cause.raised)
    if lacking and is_users_own(lacking[1].partition(".")[0]):
        return ClusterError(
            f"a Python function that the DataFrame's rows need fails on a worker: {cause.raised}; "
            "send your own modules with --py-files (spark.submit.pyFiles), "
            "sparkContext.addPyFile(path) or spark.addArtifacts(path, pyfile=True)"
        )
    if other := _other_python(cause, is_connect="connect" in type(error).__module__):
        return other
    if cause.is_ours:
        name, _, message = cause.raised.partition(": ")
        own = getattr(errors, name.removeprefix("sparkdl.errors."), None)
        is_own = isinstance(own, type) and issubclass(own, SparkDLError)
        if is_own and own is not None and own is not errors.WorkerError:
            found: SparkDLError = own(message)
            return found
        if isinstance(error, PythonException):
            return None  # its traceback shows the user's lines
    frames = _FRAME.findall(cause.message)
    frames = [frame for frame in frames if not _OF_PACKAGES.search(frame[0])] or frames
    where = " ({2}, line {1} of {0})".format(*frames[-1]) if frames else ""
    told = _shortened(cause.raised, _LONGEST)
    return DataError(
        f"a Python function of the DataFrame's query failed on its rows: {told}{where}; mend "
        f"it, or drop or fill the rows that it does not take; {_ALONE}"
    )


def _told(causes: Sequence[Cause]) -> str:
    """Return what Spark says of the rows: the conditions in a chain, and the innermost cause."""
    told: list[str] = []
    for cause in causes:
        is_innermost = cause is causes[-1]
        is_wrapper = (cause.condition or "").startswith(_UDF) and not is_innermost
        if is_wrapper or (cause.condition is None and not is_innermost):
            continue
        text = " ".join(_SQLSTATE.sub("", cause.message).split())
        name = cause.type.rpartition(".")[2]
        if cause.condition is None and name not in ("", "SparkException"):
            text = f"{name}: {text}" if text else name
        if not any(text.rpartition(": ")[2] in before for before in told):
            told.append(_shortened(text, _LONGEST).rstrip("."))
    return ": ".join(told)


def _place(causes: Sequence[Cause]) -> str:
    """Return the place in the query of the expression that failed, if Spark says it."""
    for cause in causes:
        if found := _IN_PROGRAM.search(cause.message):
            return f" (in {found[1]}, called at {found[2]})"
        if found := _IN_SQL.search(cause.message):
            return f" (in {found[1]})"
    return ""


def _remedy(causes: Sequence[Cause]) -> str:
    """Return the remedy, by the innermost condition."""
    if lacks_memory(causes):
        return _MEMORY
    state = next((cause.state for cause in reversed(causes) if cause.state), "")
    if state.startswith("XX"):
        return _INNER
    if judged(causes) is Kind.CLUSTER:
        return "change what Spark names there"
    if state.startswith(_OF_ROWS):
        return f"drop, fill or mend such rows, or use a try_ function, such as try_cast; {_ALONE}"
    return f"mend the query, or drop or fill such rows; {_ALONE}"


def python_cause(error: Exception) -> str:
    """The last line of the traceback of a Python worker, which says what was raised."""
    return next(cause.raised for cause in causes_of(error) if cause.is_python)


def _other_python(cause: Cause, *, is_connect: bool) -> ClusterError | None:
    """Return the error if a function of the user's fails because workers run another Python."""
    raised, named = cause.raised, os.environ.get("PYSPARK_PYTHON")
    if not raised.startswith("ModuleNotFoundError") and "PYTHON_VERSION_MISMATCH" not in raised:
        return None
    theirs: str = shutil.which(named or "python3") or named or "python3"
    how = "which PYSPARK_PYTHON names" if named else "since PYSPARK_PYTHON was not set"
    if is_connect:
        theirs, how = "the Python", "that PYSPARK_PYTHON named where the server was started"
    elif theirs == sys.executable:
        return None
    return ClusterError(
        f"a Python function that the DataFrame's rows need fails on a worker: {raised}; its worker "
        f"runs {theirs}, {how}, and this program runs {sys.executable}; set "
        f"PYSPARK_PYTHON={sys.executable} before the session and the function are made, or install "
        "there what is missing"
    )


_LACKING = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'")
"""Pattern of what Python says of a module that a worker does not find."""
_OF_STACKS = ("at ", "...", "Driver stacktrace:")
"""Beginnings of lines that show where in Spark's own code something happened."""
_WAITED = "Exception thrown in awaitResult"


def _text_of(error: Exception) -> str:
    """Return Spark's messages, without those that only say that it waited for something."""
    if not is_spark_error(error):
        return str(error)
    told = causes_of(error)
    return "\n".join(cause.message for cause in told if not cause.message.startswith(_WAITED))


def spark_message(error: Exception) -> str:
    """Return what Spark says of a failure, without the stacks: its first lines, joined."""
    return _shortened(" | ".join(_telling_lines(error)[:4]) or type(error).__name__, 600)


def _cause_of(error: Exception) -> str:
    """The sentence of Spark's that says what has happened to a task."""
    lines = _telling_lines(error) or [type(error).__name__]
    causes = [line for line in lines if not line.startswith("Job aborted")]
    sentence = _EXCEPTION.sub("", (causes or lines)[0]).partition(". ")[0]
    return _shortened(sentence, 160)


_EXCEPTION = re.compile(r"^[\w.$]+(?:Exception|Error): ")
"""Pattern of the class with which Java begins the message of an exception."""


def _telling_lines(error: Exception) -> list[str]:
    lines = (line.strip() for line in _text_of(error).splitlines())
    return [line for line in lines if line and not line.startswith(_OF_STACKS)]


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."

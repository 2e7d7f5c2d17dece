"""The causes that Spark names for a failed job, and what each of them is: a loss, or not.

Classic Spark and Spark Connect show the same text: Java's, in which each cause begins with its
class. A barrier stage keeps no Java object of its causes, only this text.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from py4j.protocol import Py4JJavaError

from sparkdl import errors

Kind = Enum("Kind", ["LOST", "CANCELLED", "CLUSTER", "DATA"])
"""Part that failed: a worker, executor or connection, so that the job may end well if it is started
again; nothing, somebody cancelled it; what the cluster or its settings give; the query."""

_LOST = frozenset(
    {
        "CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND",
        "INTERNAL_ERROR_BROADCAST",
        "INTERNAL_ERROR_EXECUTOR",
        "INTERNAL_ERROR_NETWORK",
        "INTERNAL_ERROR_SHUFFLE",
        "INTERNAL_ERROR_STORAGE",
        "INVALID_CURSOR",
        "INVALID_HANDLE.OPERATION_ABANDONED",
        "INVALID_HANDLE.OPERATION_NOT_FOUND",
        "_LEGACY_ERROR_TEMP_3003",  # could not compute split, block not found
        "_LEGACY_ERROR_TEMP_3033",  # unable to register with the external shuffle server
        "_LEGACY_ERROR_TEMP_3036",  # failure while trying to store a block
        "_LEGACY_ERROR_TEMP_3037",  # a block was not found even though it is locked
    }
)
"""The conditions of losses among those that Spark lists, or the first parts of their names."""
_LOST_STATE = "08"
"""Class of SQLSTATEs: a connection failed. Spark has none so far."""
_CANCELLED = frozenset({"SPARK_JOB_CANCELLED", "OPERATION_CANCELED"})
_CLUSTER = frozenset(
    {
        "KRYO_BUFFER_OVERFLOW",
        "LOCAL_RELATION_SIZE_LIMIT_EXCEEDED",
        "PACKAGE_NOT_INSTALLED",
        "UNSUPPORTED_PACKAGE_VERSION",
        "_LEGACY_ERROR_TEMP_2097",  # could not execute a broadcast in time
        "_LEGACY_ERROR_TEMP_2105",  # no memory to grow a hash map
        "_LEGACY_ERROR_TEMP_2107",  # no memory to build a hash map
        "_LEGACY_ERROR_TEMP_2248",  # too many rows for a broadcast
        "_LEGACY_ERROR_TEMP_2249",  # too large for a broadcast
        "_LEGACY_ERROR_TEMP_2250",  # no memory to build and broadcast a table
    }
)
_MEMORY_STATES = ("53", "82")
"""Resources that do not suffice; out of memory."""
_CLUSTER_STATES = (*_MEMORY_STATES, "55", "56", "57", "58", "F0", "HY", "XX")
"""States, features that are not enabled, interventions, the system, files of settings, handles of
Spark Connect, and the inner errors of Spark. All others are of queries, sources and rows."""
_DATA = frozenset({"MALFORMED_PROTOBUF_MESSAGE"})  # an inner error by its SQLSTATE
_USERS_STATES = ("38", "39", "P0")
"""Functions of the user's: of Python, of the JVM, and ``raise_error``."""

_NETWORK = re.compile(
    r"java\.net\.(?!URI|Malformed)|javax\.net\.ssl\.|java\.nio\.channels\.|io\.netty\."
    r"|java\.sql\.SQL(?:Transient|Recoverable)"
    r"|org\.apache\.hadoop\.(?:net\.|ipc\.(?:Standby|Retriable)|hdfs\.BlockMissing)"
    r"|(?:.*\.)?(?:\w*TimeoutException|SdkClientException|AWSClientIOException|AWSStatus500\w*"
    r"|AWSServiceThrottled\w*|SlowDown\w*)$"
)
"""Classes of what may go away by itself, as a connection to a storage that is away for a while."""
_MAY_GO_AWAY = re.compile(
    r"java\.io\.(?:IO|EOF|InterruptedIO)Exception$|java\.util\.concurrent\.|java\.lang\.(?:Thread"
    r"Death|IllegalStateException|Interrupted\w+)$|org\.apache\.spark\.(?:TaskKilledException$"
    r"|(?:shuffle|network|storage|rpc|scheduler|executor|broadcast|memory)\.)"
)
"""Classes that count likewise where Spark gives no condition: disks and pipes fail for a while, a
session is about to end. Any other class is of code that fails on the same rows again."""
_SPARKS_WORDS = re.compile(
    r"worker|executor|fetch|get broadcast|block|barrier|connect|coordinator|tracker|reply"
    r"|time[ds]? ?out|acknowledged|killed|shut down|stopped|shuffle",
    re.IGNORECASE,
)
"""Words of Spark about losses in a plain SparkException, which is also what it raises for rows."""
_WAITING = (
    "Job aborted",
    "Exception thrown in awaitResult",
    "Stage failed because",
    "Stage cancel",
)
_HEAP = re.compile(r"OutOfMemoryError|Java heap space|GC overhead limit|Direct buffer memory")

_HEADING = re.compile(r"(?:Caused by: |: )?((?:[a-z_]\w*\.)+[A-Z][\w$]*)(?:: (.*)|)$")
"""Pattern of a line with which Java begins a cause."""
_OF_TASK = re.compile(r"(?<=\)): (?=(?:[a-z_]\w*\.)+[A-Z][\w$]*(?:: |$))")
"""Before the cause of a task's failure, in the line that names the task and its executor."""
_OF_STACK = re.compile(r"\s+at |\s*\.\.\. \d+ |\tSuppressed: |\tCaused by: |Driver stacktrace:")
_CONDITION = re.compile(r"\[([A-Z_][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)\] ?")
_STATE = re.compile(r"\bSQLSTATE: ([0-9A-Z]{5})\b")
_TRACEBACK = "Traceback (most recent call last)"
_NO_TYPE = ("Exception", "PySparkException", "SparkException", "SparkConnectException",
            "SparkConnectGrpcException", "UnknownException", "CapturedException",
            "RetriesExceeded")  # fmt: skip
"""Classes of pyspark's own that say nothing of what happened."""
_WORKERS = re.compile(
    r"[/\\]sparkdl[/\\]spark[/\\](?:cluster[/\\]gang|rounds[/\\]round_stages)\.py"
)
"""Files of tasks that report what the user's code does, and raise only where something is lost."""
_OURS = re.compile(r'File "[^"\n]*[/\\]sparkdl[/\\](?:spark|worker|data|comm|inference)[/\\]')


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause in a chain of Spark's."""

    type: str
    """Java's class, or pyspark's; empty: not known."""
    message: str
    condition: str | None = None
    """Its name in Spark's list of error conditions, if it is there."""
    state: str = ""
    """Its SQLSTATE, likewise."""

    @property
    def is_python(self) -> bool:
        """True for what a Python worker has raised."""
        return self.type.endswith(".PythonException") or self.condition == "PYTHON_EXCEPTION"

    @property
    def is_of_users_code(self) -> bool:
        """True for an exception of a function that the query calls."""
        return self.is_python or self.state[:2] in _USERS_STATES

    @property
    def is_ours(self) -> bool:
        """True if a task of this package has raised it."""
        return self.is_python and _OURS.search(self.message) is not None

    @property
    def raised(self) -> str:
        """The last line of a Python worker's traceback, which says what was raised."""
        return _STATE.sub("", self.message).strip().rpartition("\n")[2].strip()

    @property
    def kind(self) -> Kind | None:
        """The kind that its condition says; None: it has none."""
        return None if self.condition is None else kind_of(self.condition, self.state)

    @property
    def is_network(self) -> bool:
        """True for a connection that failed."""
        return _NETWORK.match(self.type) is not None


def kind_of(condition: str, state: str) -> Kind:
    """Return the kind of a condition of Spark's: losses by name, all others by SQLSTATE."""
    names = {condition, condition.partition(".")[0]}
    if names & _CANCELLED:
        return Kind.CANCELLED
    if names & _LOST or state.startswith(_LOST_STATE):
        return Kind.LOST
    is_cluster = names & _CLUSTER or state.startswith(_CLUSTER_STATES)
    return Kind.CLUSTER if is_cluster and not names & _DATA else Kind.DATA


def judged(causes: Sequence[Cause]) -> Kind:
    """Return the kind of a chain of causes, the outermost first.

    An exception of a user's function would come again, whatever it is. Otherwise it is a loss if
    any cause is one, or a connection; else what the innermost condition says. Without conditions
    the innermost class decides.
    """
    for cause in causes:
        if cause.is_of_users_code:
            return Kind.LOST if _has_lost(cause) else Kind.DATA
    kinds = [cause.kind for cause in causes if cause.kind is not None]
    for kind in (Kind.CANCELLED, Kind.LOST):
        if kind in kinds:
            return kind
    if any(cause.is_network for cause in causes):
        return Kind.LOST
    if kinds:
        return kinds[-1]
    if lacks_memory(causes):
        return Kind.CLUSTER  # of the executors that it ends, Spark says so
    told = [cause for cause in causes if cause.type and not cause.message.startswith(_WAITING)]
    if not told or any(_says_lost(cause) for cause in told):
        return Kind.LOST
    return Kind.LOST if _MAY_GO_AWAY.match(told[-1].type) else Kind.DATA


def lacks_memory(causes: Sequence[Cause]) -> bool:
    """True if Spark or its JVM has found no more memory."""
    return any(
        cause.state.startswith(_MEMORY_STATES) or _HEAP.search(f"{cause.type}: {cause.message}")
        for cause in causes
    )


def _says_lost(cause: Cause) -> bool:
    is_plain = cause.type == "org.apache.spark.SparkException"
    return is_plain and _SPARKS_WORDS.search(cause.message) is not None


def _has_lost(cause: Cause) -> bool:
    """True if a task of ours has raised what starting again may heal."""
    if not cause.is_ours:
        return False
    name = cause.raised.partition(":")[0].strip()
    own = getattr(errors, name.removeprefix("sparkdl.errors."), None)
    if isinstance(own, type) and issubclass(own, errors.SparkDLError):
        return issubclass(own, errors.GangError)
    known = getattr(builtins, name, None)
    is_broken = isinstance(known, type) and issubclass(known, OSError | EOFError)
    return is_broken or _WORKERS.search(cause.message) is not None


def causes_of(error: BaseException) -> list[Cause]:
    """The causes that an error of Spark's names, the outermost first."""
    causes: list[Cause] = []
    kind, in_stack = _type_of(error), False
    lines: list[str] = []
    for line in _lines_of(error):
        in_python = not in_stack and any(_TRACEBACK in said for said in lines)
        found = None if in_python else _HEADING.match(line)
        if found is not None:
            causes += _cause(kind, lines)
            kind, lines, in_stack = found[1], [found[2] or ""], False
        elif line.startswith("\tat ") or (_OF_STACK.match(line) and not in_python):
            in_stack = True
        else:
            lines.append(line)
    causes += _cause(kind, lines)
    tell: Any = getattr(error, "getCondition", lambda: None)
    if causes and causes[0].condition is None and (condition := tell()) is not None:
        known = Cause(type=causes[0].type, message=causes[0].message, condition=str(condition))
        causes[0] = known
    return causes or [Cause(type=kind, message="")]


def _lines_of(error: BaseException) -> Iterator[str]:
    for line in _text_of(error).splitlines():
        yield from _OF_TASK.split(line, maxsplit=1) if "executor" in line else [line]


def _cause(kind: str, lines: Sequence[str]) -> list[Cause]:
    message = "\n".join(lines).strip()
    if not message and (not kind or kind.startswith("pyspark.")):
        return []  # what follows says more
    condition, state = _CONDITION.match(message), _STATE.search(message)
    return [
        Cause(
            type=kind,
            message=message,
            condition=condition[1] if condition and (state or "_" in condition[1]) else None,
            state=state[1] if state else "",
        )
    ]


def _type_of(error: BaseException) -> str:
    kind = type(error)
    is_known = kind.__module__.startswith("pyspark.") and kind.__name__ not in _NO_TYPE
    return f"{kind.__module__}.{kind.__name__}" if is_known else ""


def _text_of(error: BaseException) -> str:
    """Return what Java shows of an error, or Spark Connect's client, or the error itself."""
    if isinstance(error, Py4JJavaError):
        return str(error).partition("\n: ")[2]
    captured: str | None = getattr(error, "_stackTrace", None)  # of classic Spark
    if captured:
        return captured
    text = str(error).partition("\n\nJVM stacktrace:")[0]
    tell: Any = getattr(error, "getStackTrace", lambda: None)  # of Connect; its first line is known
    return f"{text}\n\tat Spark Connect\n{(tell() or '').partition(chr(10))[2]}"

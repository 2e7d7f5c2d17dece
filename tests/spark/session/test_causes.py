"""Spark's causes are read from its texts, and judged by a table of its conditions."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from pathlib import Path

import pyspark
import pytest
from pyspark.errors import PySparkException

from sparkdl.errors import ClusterError, DataError
from sparkdl.spark.session.causes import Cause, Kind, causes_of, judged, kind_of
from sparkdl.spark.session.failures import raise_unless_loss

STACK = "\n\tat org.apache.spark.Some.where(Some.scala:1)\n\t... 40 more\n"
JOB = (
    "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed "
    "4 times, most recent failure: Lost task 0.3 in stage 3.0 (TID 9) (10.0.0.3 executor 2): "
)
BARRIER = (
    "org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from a "
    "failed barrier ResultStage. Most recent failure reason: Stage failed because barrier task "
    "ResultTask(42, 1) finished unsuccessfully.\n"
)
UDF = (
    "org.apache.spark.SparkException: [FAILED_EXECUTE_UDF] User defined function (`bucketizer_0 "
    "(Bucketizer$$Lambda$5182/0x00007f15e56034c8)`: (double) => double) failed due to: "
)
READ = (
    "org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading "
    "file s3a://b/x.parquet.  SQLSTATE: KD001"
)
NPE = "java.lang.NullPointerException: no name"
GONE = "java.net.SocketException: Connection reset"


def python_text(file: str, raised: str) -> str:
    return (
        "org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown "
        "from the Python worker: Traceback (most recent call last):\n"
        f'  File "{file}", line 7, in work\n    {raised.partition(":")[0]}()\n{raised}\n'
        " SQLSTATE: 38000\n"
    )


def failed(text: str) -> PySparkException:
    return PySparkException(text)


def listed() -> dict[str, str]:
    """All conditions of this Spark, with those below them, and their SQLSTATEs."""
    jars = Path(pyspark.__file__).parent / "jars"
    with zipfile.ZipFile(next(jars.glob("spark-common-utils_*.jar"))) as jar:
        conditions = json.loads(jar.read("error/error-conditions.json"))
    found = {}
    for name, entry in conditions.items():
        found[name] = state = entry.get("sqlState", "")
        found |= {f"{name}.{part}": state for part in entry.get("subClass", ())}
    return found


CONDITIONS = listed()
NETWORK_WORDS = ("NETWORK", "SHUFFLE", "STORAGE", "BROADCAST", "EXECUTOR", "BLOCK_ID_NOT_FOUND")


def test_every_condition_of_spark_is_judged() -> None:
    kinds = {name: kind_of(name, state) for name, state in CONDITIONS.items()}
    lost = {name for name, kind in kinds.items() if kind is Kind.LOST}
    assert {name for name in lost if not name.startswith("_LEGACY")} == {
        *(n for n in CONDITIONS if n.startswith("INTERNAL_ERROR_") and n.endswith(NETWORK_WORDS)),
        *("INVALID_HANDLE.OPERATION_ABANDONED", "INVALID_HANDLE.OPERATION_NOT_FOUND"),
        *(n for n in CONDITIONS if n.partition(".")[0] == "INVALID_CURSOR"),
        "CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND",
    }
    assert sum(name.startswith("_LEGACY") for name in lost) == 4
    cancelled = {name for name, kind in kinds.items() if kind is Kind.CANCELLED}
    assert cancelled == {"SPARK_JOB_CANCELLED", "OPERATION_CANCELED"}
    counts = Counter(kinds.values())
    assert counts[Kind.DATA] > 5 * counts[Kind.CLUSTER] > 50 * len(cancelled)


@pytest.mark.parametrize("state", ["0A", "21", "22", "23", "38", "39", "42", "KD", "P0"])
def test_what_is_of_rows_and_queries_is_never_a_loss(state: str) -> None:
    own = [name for name, given in CONDITIONS.items() if given.startswith(state)]
    assert own and {kind_of(name, CONDITIONS[name]) for name in own} == {Kind.DATA}


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("22099", Kind.DATA), ("KD099", Kind.DATA), ("", Kind.DATA), ("08S01", Kind.LOST),
        ("53999", Kind.CLUSTER), ("XX000", Kind.CLUSTER), ("57014", Kind.CLUSTER),
    ],
)  # fmt: skip
def test_a_condition_of_a_later_spark_is_judged_by_its_state(state: str, kind: Kind) -> None:
    assert kind_of("SOMETHING_NEW.OF_LATER", state) is kind


LOST = [
    JOB + f"org.apache.spark.SparkException: Python worker exited unexpectedly (crashed).{STACK}"
    "Caused by: java.io.EOFException",
    BARRIER + "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: "
    "Command exited with code 52",
    BARRIER + f"FetchFailed(BlockManagerId(1, h, 7337, None), shuffleId=0)\n{STACK}",
    BARRIER + f"org.apache.spark.shuffle.FetchFailedException: Connection refused{STACK}",
    BARRIER + f"org.apache.spark.SparkException: Failed to get broadcast_3_piece0{STACK}",
    BARRIER + f"org.apache.spark.SparkException: Python worker did not connect back in time{STACK}",
    JOB + f"org.apache.spark.SparkException: [INTERNAL_ERROR_SHUFFLE] gone. SQLSTATE: XX000{STACK}",
    JOB + f"java.io.IOException: Input/output error{STACK}",  # a disk; the next one may be whole
    f"{READ}{STACK}Caused by: org.apache.hadoop.fs.s3a.AWSClientIOException: read{STACK}"
    f"Caused by: {GONE}{STACK}",  # the storage was away for a while
    JOB + f"{GONE}{STACK}",
    JOB + f"java.util.concurrent.TimeoutException: Futures timed out{STACK}",
    f"java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext{STACK}",
    BARRIER + python_text("/x/sparkdl/spark/cluster/gang.py", "ValueError: told nobody") + STACK,
    BARRIER + python_text("/x/sparkdl/spark/frames/spool_task.py", "OSError: [Errno 5] I/O error"),
    JOB + python_text("/x/sparkdl/worker/a.py", "sparkdl.errors.ShardLost: not on this host"),
]
DATA = [
    (BARRIER + f"{UDF}{NPE}. SQLSTATE: 39000{STACK}Caused by: {NPE}{STACK}", "Bucketizer: NullP"),
    # what a function of the user's raises would come again, whatever it is
    (BARRIER + f"{UDF}{GONE}. SQLSTATE: 39000{STACK}Caused by: {GONE}", "Bucketizer: SocketExc"),
    (BARRIER + python_text("/home/u/job.py", "ConnectionError: no"), r"ConnectionError: no \(wo"),
    (JOB + python_text("/home/u/job.py", "json.decoder.JSONDecodeError: x"), "JSONDecodeError: x"),
    (JOB + f"java.lang.reflect.InvocationTargetException{STACK}Caused by: {NPE}", "no name"),
    (f"org.apache.spark.SparkException: Could not execute broadcast in 300 secs.{STACK}", "in 300"),
    (JOB + f"com.example.reader.BadRow: row 7{STACK}", "BadRow: row 7"),
    (JOB + f"org.apache.spark.SparkException: Vectors of other sizes: 3, 4{STACK}", "sizes: 3, 4"),
    (
        "org.apache.spark.SparkException: Exception thrown in awaitResult: "
        f"{STACK}Caused by: org.apache.spark.SparkRuntimeException: [USER_RAISED_EXCEPTION] my "
        f"text SQLSTATE: P0001{STACK}",
        "my text; ",
    ),
    (f"{READ}{STACK}Caused by: java.io.IOException: not in gzip format{STACK}", "not in gzip"),
    (f"{READ}{STACK}Caused by: java.io.EOFException: reached the end{STACK}", "cannot be read"),
    (
        f"{READ}{STACK}Caused by: org.apache.spark.SparkException: [MALFORMED_RECORD_IN_PARSING"
        ".WITHOUT_SUGGESTION] Malformed records: [null,3.0].\nParse Mode: FAILFAST. SQLSTATE: "
        f"22023{STACK}Caused by: java.lang.NumberFormatException: {{}}{STACK}",
        r"file s3a://b/x.parquet: .*\[null,3.0\]\. Parse Mode: FAILFAST: NumberFormatException: {}",
    ),
    (JOB + python_text("/x/sparkdl/data/a.py", "sparkdl.errors.DataError: 3 nulls"), "^3 nulls$"),
]  # fmt: skip


@pytest.mark.parametrize("text", LOST)
def test_what_spark_calls_lost_is_started_again(text: str) -> None:
    assert judged(causes_of(failed(text))) is Kind.LOST
    raise_unless_loss(failed(text))


@pytest.mark.parametrize(("text", "told"), DATA)
def test_what_fails_on_rows_is_an_error_of_the_data(text: str, told: str) -> None:
    with pytest.raises(DataError, match=told) as caught:
        raise_unless_loss(failed(text))
    assert "\n" not in str(caught.value) and "lost" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (JOB + f"java.lang.OutOfMemoryError: Java heap space{STACK}", "spark.executor.memory"),
        ("<RPC that terminated with:\n\tdetails = 'Java heap space'\n>", "spark.executor.memory"),
        (
            "org.apache.spark.memory.SparkOutOfMemoryError: [UNABLE_TO_ACQUIRE_MEMORY] Unable to "
            f"acquire 65536 bytes of memory, got 0. SQLSTATE: 53200{STACK}",
            "acquire 65536 bytes.*or fewer spark.executor.cores",
        ),
        (
            f"org.apache.spark.SparkException: [INTERNAL_ERROR] phase. SQLSTATE: XX000{STACK}"
            f"Caused by: {NPE}",
            "phase: NullPointerException: no name; Spark calls this an error of its own",
        ),
        (
            "[UNSUPPORTED_PACKAGE_VERSION] PyArrow >= 15.0.0 must be installed; however, your "
            "version is 14.0.0.",
            "your version is 14.0.0; change what Spark names there",
        ),
    ],
)
def test_what_the_cluster_lacks_is_not_started_again(text: str, remedy: str) -> None:
    with pytest.raises(ClusterError, match=remedy):
        raise_unless_loss(failed(text))


def test_the_causes_of_a_text() -> None:
    first, second, third = causes_of(
        failed(f"{READ}{STACK}Caused by: java.io.IOException: of two\nlines{STACK}Caused by: a.B")
    )
    assert first == Cause(
        type="org.apache.spark.SparkException",
        message=READ.partition(": ")[2],
        condition="FAILED_READ_FILE.NO_HINT",
        state="KD001",
    )
    assert second == Cause(type="java.io.IOException", message="of two\nlines")
    assert third == Cause(type="a.B", message="")

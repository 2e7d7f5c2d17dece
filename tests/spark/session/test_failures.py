"""Spark's errors are told apart by type."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    PySparkException,
    PySparkPicklingError,
    PythonException,
    UnknownException,
)

from sparkdl.errors import ClusterError, DataError, StorageError, TrainingFailed
from sparkdl.spark.session import failures
from sparkdl.spark.session.failures import is_loss, loss_reason, raise_unless_loss, spark_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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


@pytest.mark.parametrize("text", ["No space left on device", "Disk quota exceeded"])
def test_a_full_disk_of_sparks_is_not_a_lost_worker(text: str) -> None:
    error = PySparkException(f"Job aborted: Task 1 failed\njava.io.IOException: {text}")
    with pytest.raises(StorageError, match=rf"disk of Spark's is full.*{text}.*spark\.local\.dir"):
        raise_unless_loss(error)
    with pytest.raises(OSError):
        raise_unless_loss(OSError(text))  # not Spark's


def test_a_local_directory_that_is_gone_is_no_matter_of_the_rows() -> None:
    """As Spark says it after ``spark.local.dir`` was removed under a session."""
    cause = "java.nio.file.NoSuchFileException: /tmp/blockmgr-08761f3e-644b-44c4-863e-02dbbd21/1f"
    error = PySparkException(
        f"Job aborted due to stage failure: Task serialization failed: {cause}\n{cause}\n"
        f"\tat java.base/java.nio.file.Files.createDirectory\nCaused by: {cause}"
    )
    with pytest.raises(StorageError, match=r"directory of Spark's is gone.*blockmgr-08761f3e.*new"):
        raise_unless_loss(error)
    with pytest.raises(DataError, match="failed on the rows"):
        raise_unless_loss(
            PySparkException("x\nCaused by: java.nio.file.NoSuchFileException: /data/rows.csv")
        )


@pytest.mark.parametrize(
    "cause",
    [
        "java.nio.file.NoSuchFileException: /tmp/blockmgr-08761f3e-644b-44c4-863e-02dbbd21/1f",
        "java.io.FileNotFoundException: /a/blockmgr-08761f3e-644b-44c4/0c/temp_shuffle_1 (No such)",
        "java.io.IOException: Failed to create local dir in /tmp/blockmgr-08761f3e.",
    ],
)
def test_a_worker_that_is_lost_with_its_directory_did_not_lack_memory(cause: str) -> None:
    """The reason names Spark's cause, which its sentence on the task leaves out."""
    error = PySparkException(
        "Job aborted due to stage failure: Could not recover from a failed barrier ResultStage. "
        "Most recent failure reason: Stage failed because barrier task ResultTask(9, 0) finished "
        "unsuccessfully.\nLost task 0.0 in stage 9.0 (TID 12) (localhost executor driver): "
        f"{cause}\n\tat org.apache.spark.storage"
    )
    told = loss_reason(error)
    assert told.startswith("a local directory of Spark's is gone")
    assert cause.partition(": ")[2].partition(" (")[0] in told and "new session" in told


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (
            "Job aborted due to stage failure: Total size of serialized results of 3 tasks "
            "(1080.2 MiB) is bigger than spark.driver.maxResultSize (1024.0 MiB)",
            r"raise spark\.driver\.maxResultSize.*1080.2 MiB",
        ),
        (
            "Job aborted due to stage failure: Serialized task 3:0 was 268435600 bytes, which "
            "exceeds max allowed: spark.rpc.message.maxSize (134217728 bytes). Consider "
            "increasing spark.rpc.message.maxSize or using broadcast variables for large values.",
            r"raise spark\.rpc\.message\.maxSize, or make smaller.*268435600 bytes",
        ),
    ],
)
def test_what_is_too_large_is_no_lost_worker(text: str, remedy: str) -> None:
    with pytest.raises(ClusterError, match=remedy):
        raise_unless_loss(PySparkException(text))


@pytest.mark.parametrize(
    "text",
    [
        "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: "
        "Command exited with code 137",
        "Reason: Container killed by YARN for exceeding memory limits. 5.5 GB of 5.5 GB physical "
        "memory used. Consider boosting spark.executor.memoryOverhead.",
        "The executor with id 1 exited with exit code 137(SIGKILL, possible container OOM).",
        "The executor with id 1 was OOMKilled",
    ],
)
def test_a_kill_for_lack_of_memory_is_told_as_such(text: str) -> None:
    error = PySparkException(f"Job aborted: Task 1 failed\n{text}\n\tat org.apache")
    raise_unless_loss(error)  # a restart may heal it
    told = loss_reason(error)
    assert told.startswith("an executor was killed, as it seems because its container had too lit")
    assert told.endswith("gradientAccumulationSteps, or lower batchSize")


@pytest.mark.parametrize(
    "text",
    [
        "ExecutorLostFailure (executor 2 exited caused by one of the running tasks) Reason: "
        "Container from a bad node: container_1_2_01_000003 on host: h. Exit status: 143.",
        "Command exited with code 143",
    ],
)
def test_an_executor_that_was_told_to_end_did_not_lack_memory(text: str) -> None:
    told = loss_reason(PySparkException(f"Job aborted: Task 1 failed\n{text}\n\tat org.apache"))
    assert told.startswith("an executor was ended by SIGTERM: its node was drained, its")
    assert "batchSize" not in told


@pytest.mark.parametrize("named", [None, "/bin/other", sys.executable])
def test_a_function_of_the_users_on_another_python(
    named: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PYSPARK_PYTHON")
    if named is not None:
        monkeypatch.setenv("PYSPARK_PYTHON", named)
    trace = "Traceback:\n  File \"worker.py\"\nModuleNotFoundError: No module named 'numpy'\n"
    error = PythonException(f"{trace}\n\nJVM stacktrace:\norg.apache.spark")
    theirs = named or f"{tmp_path}/python3"
    kind = DataError if named == sys.executable else ClusterError
    with pytest.raises(kind, match="No module named 'numpy'") as caught:
        raise_unless_loss(error)
    if kind is ClusterError:
        assert f"its worker runs {theirs}, " in str(caught.value)
        assert f"set PYSPARK_PYTHON={sys.executable} before" in str(caught.value)
    with pytest.raises(DataError, match="failed on its rows: ValueError: x; mend it"):
        raise_unless_loss(PythonException("Traceback:\nValueError: x"))


@pytest.mark.parametrize(
    "text", ["Python worker exited unexpectedly (crashed)", "Command exited with code 1", "137"]
)
def test_another_loss_is_not_blamed_on_memory(text: str) -> None:
    assert loss_reason(PySparkException(text)) == f"a worker or executor was lost ({text})"


def test_a_loss_is_told_in_one_short_sentence() -> None:
    barrier = (
        "Job aborted due to stage failure: Could not recover from a failed barrier ResultStage. "
        "Most recent failure reason: Stage failed because barrier task ResultTask(108, 0) finished "
        "unsuccessfully.\norg.apache.spark.SparkException: Python worker exited unexpectedly "
        "(crashed). Consider setting 'a.b' to 'true'.\n\tat org.apache\nCaused by: java.io.EOF"
    )
    lost = "a worker or executor was lost (Python worker exited unexpectedly (crashed))"
    assert loss_reason(PySparkException(barrier)) == lost
    assert len(loss_reason(PySparkException("x" * 900))) < 200


@pytest.mark.parametrize("condition", ["SPARK_JOB_CANCELLED", "OPERATION_CANCELED"])
def test_a_job_that_somebody_cancelled_is_not_started_again(condition: str) -> None:
    error = PySparkException("Job 0 cancelled by hand", errorClass=condition)
    with pytest.raises(TrainingFailed, match="the Spark job was cancelled, so it was not"):
        raise_unless_loss(error)


@pytest.mark.parametrize("detail", ["FILE_NOT_EXIST", "CANNOT_READ_FILE_FOOTER"])
def test_a_source_that_cannot_be_read_is_an_error_of_the_data(detail: str) -> None:
    error = PySparkException("no such file", errorClass=f"FAILED_READ_FILE.{detail}")
    with pytest.raises(DataError, match=r"cannot be read \(.* no such file\); see that its files"):
        raise_unless_loss(error)


def test_a_loss_and_what_spark_has_not_raised_stay_as_they_are() -> None:
    raise_unless_loss(PySparkException("lost", errorClass="INTERNAL_ERROR_SHUFFLE"))
    error = ConnectionRefusedError("their own service")
    with pytest.raises(ConnectionRefusedError) as caught:
        raise_unless_loss(error)
    assert caught.value is error


def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    time.sleep(60)
    yield from ()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.classic
def test_spark_tells_of_a_cancelled_job_and_of_a_missing_file(
    spark: SparkSession, tmp_path: Path
) -> None:
    def cancel() -> None:
        while not spark.sparkContext.statusTracker().getActiveStageIds():
            time.sleep(0.1)
        spark.sparkContext.cancelAllJobs()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(Py4JJavaError) as cancelled:
        spark.range(0, 2, 1, 2).mapInArrow(slow, "a int", barrier=True).collect()
    canceller.join()
    with pytest.raises(TrainingFailed, match="SPARK_JOB_CANCELLED"):
        raise_unless_loss(cancelled.value)

    source = str(tmp_path / "source")
    spark.range(10).coalesce(1).write.parquet(source)
    df = spark.read.parquet(source)
    for file in Path(source).glob("part-*"):
        file.unlink()
    with pytest.raises(Py4JJavaError) as missing:
        df.collect()
    with pytest.raises(DataError, match="FILE_NOT_EXIST"):
        raise_unless_loss(missing.value)


def test_the_telling_lines() -> None:
    error = PySparkException(
        "Job aborted:\n\n  Lost task 0.0\n\tat org.apache.Spark\n... 3 more\ncause\n"
        "Driver stacktrace:\nfourth\nfifth"
    )
    assert spark_message(error) == "Job aborted: | Lost task 0.0 | cause | fourth"
    assert spark_message(PySparkException("")) == "PySparkException"
    assert spark_message(PySparkException("x" * 1000)) == "x" * 597 + "..."


def test_what_was_waited_for_is_told_and_not_the_waiting() -> None:
    waited = "org.apache.spark.SparkException: Exception thrown in awaitResult: "
    inner = "Caused by: org.apache.spark.SparkException: Failed to connect to host/10.0.0.2:7337"
    error = PySparkException(f"{waited}\n\tat org.apache.spark.util\n{inner}\n\tat java.lang")
    assert is_loss(error)
    assert spark_message(error) == "Failed to connect to host/10.0.0.2:7337"


def test_a_dataframe_of_a_session_before_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, runs = SimpleNamespace(ended=True), SimpleNamespace(ended=False)
    monkeypatch.setattr(failures, "has_ended", lambda session: session.ended)
    for active, told in (
        (runs, "the Spark session of this DataFrame has ended, and another one runs now; make the "
         "DataFrame again with that one"),
        (ended, "the Spark session has ended: the program"),
        (None, "the Spark session has ended: the program"),
    ):  # fmt: skip
        sessions = SimpleNamespace(getActiveSession=lambda: active)  # noqa: B023
        monkeypatch.setattr(failures, "SparkSession", sessions)
        with pytest.raises(ClusterError) as caught:
            failures.raise_if_ended(ended)  # type: ignore[arg-type]
        assert str(caught.value).startswith(told)
    failures.raise_if_ended(runs)  # type: ignore[arg-type]

    def killed() -> None:
        raise Py4JNetworkError("Answer from Java side is empty")

    monkeypatch.setattr(failures, "SparkSession", SimpleNamespace(getActiveSession=killed))
    with pytest.raises(ClusterError, match=r"its JVM was killed, .*spark\.driver\.memory"):
        failures.raise_if_ended(ended)  # type: ignore[arg-type]

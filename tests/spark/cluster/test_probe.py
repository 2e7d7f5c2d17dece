"""Executors that cannot run sparkdl are told with the remedy."""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
from pyspark.errors import PySparkException, PythonException

from sparkdl.comm.access import Address
from sparkdl.comm.certificates import Certificate
from sparkdl.errors import ClusterError, CommunicationError
from sparkdl.spark.cluster import probe as module
from sparkdl.spark.cluster.probe import Needs, ProbeFindings, ProbeTask, probe
from sparkdl.spark.session import background_job
from sparkdl.spark.session.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGE = """
An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "worker.py", line 1, in main
ModuleNotFoundError: No module named 'sparkdl'

JVM stacktrace:
org.apache.spark.api.python.PythonException
"""


def ask(spark: Any, **settings: float) -> ProbeFindings:
    return probe(
        spark, num_tasks=1, profile=None, channel=None, needs_channel=True, storage_url=None,
        checkpoints=None, run_id="r", settings=Settings(**settings),  # type: ignore[arg-type]
    )  # fmt: skip


def test_executors_without_sparkdl() -> None:
    spark = MagicMock()
    spark.sparkContext.pythonExec = "/their/python"
    tasks = spark.range.return_value.mapInArrow.return_value
    tasks.collect.side_effect = PythonException(MESSAGE)
    with pytest.raises(ClusterError) as caught:
        ask(spark)
    assert str(caught.value) == (
        "sparkdl cannot run on an executor: ModuleNotFoundError: No module named 'sparkdl'; "
        "Spark's workers run /their/python, which PYSPARK_PYTHON names; set PYSPARK_PYTHON to a "
        "Python that has the packages, install them there as on the driver, or send them with "
        "--archives or --py-files"
    )


class HangingSpark(MagicMock):
    """Its job has two tasks, of which one ends and the other runs until it is cancelled."""

    def begin(self) -> None:
        ended = threading.Event()
        self.sparkContext.cancelJobsWithTag.side_effect = lambda _: ended.set()
        tasks = self.range.return_value.mapInArrow.return_value
        tasks.collect.side_effect = lambda: ended.wait(20) and []
        scala = self.sparkContext._jsc.sc.return_value
        stage = SimpleNamespace(
            stageId=lambda: 3, currentAttemptId=lambda: 0, numActiveTasks=lambda: 1,
            numCompletedTasks=lambda: 1, numFailedTasks=lambda: 0,
        )  # fmt: skip
        tracker = scala.statusTracker.return_value
        tracker.getJobIdsForTag.side_effect = lambda tag: [7] if tag == "sparkdl-r-probe" else []
        tracker.getJobInfo.return_value.get.return_value.stageIds.return_value = [3]
        tracker.getStageInfo.return_value.get.return_value = stage
        found = [("RUNNING", "h2"), ("SUCCESS", "h1")]
        launched = SimpleNamespace(getTime=lambda: 0)
        listed = [
            SimpleNamespace(status=lambda s=s: s, host=lambda h=h: h, launchTime=lambda: launched)
            for s, h in found
        ]
        scala.statusStore.return_value.taskList.return_value = SimpleNamespace(
            size=lambda: len(listed), apply=lambda index: listed[index]
        )


def test_an_executor_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python worker that was stopped has held `fit` for ever."""
    monkeypatch.setattr(background_job, "_ASK_SECONDS", 0.1)
    spark = HangingSpark()
    spark.begin()
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"on h2 has not .* 0.5 s \(spark.sparkdl.startTimeo"):
        ask(spark, start_timeout_seconds=0.5)
    assert time.monotonic() - began < 10
    spark.sparkContext.cancelJobsWithTag.assert_called_with("sparkdl-r-probe")


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("python: Error while finding module specification for 'sparkdl.spark.daemon' "
         "(ModuleNotFoundError: No module named 'sparkdl')", "daemon.module=sparkdl.spark.daemon"),
        ("python3.11: No module named sparkdl", "--archives packages"),
        ('Cannot run program "python9": error=2, No such file', "PYSPARK_PYTHON=./env/bin/python"),
    ],
)  # fmt: skip
def test_the_remedy_fits_what_kept_python_from_starting(said: str, remedy: str) -> None:
    assert remedy in module.python_remedy(RuntimeError(f"Error from python worker:\n  {said}"))


CRASH = (
    "Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times, most recent failure: "
    "Lost task 0.0 in stage 3.0 (TID 4) (h1 executor driver): org.apache.spark.SparkException: "
    "Python worker exited unexpectedly (crashed)"
)


@pytest.mark.parametrize("crashes", [1, 2])
def test_executors_are_asked_again_when_a_worker_was_lost(
    crashes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark runs no task of ``local[N]`` again, and ends workers with a task that is cancelled."""
    answer = json.loads(
        next(ProbeTask(channel=None, connect_seconds=0.0, storage_url=None, marker=None)(iter([])))
        .column("answer")[0].as_py()
    )  # fmt: skip
    spark, beside = MagicMock(), list[int]()
    tasks = spark.range.return_value.mapInArrow.return_value
    tasks.collect.side_effect = [
        *[PySparkException(CRASH)] * crashes, [{"answer": json.dumps(answer)}]
    ]  # fmt: skip

    def asked() -> ProbeFindings:
        return probe(
            spark, num_tasks=1, profile=None, channel=None, needs_channel=True, storage_url=None,
            checkpoints=None, run_id="r", settings=Settings(),
            once_submitted=lambda: beside.append(1),
        )  # fmt: skip

    if crashes == 1:
        assert not asked().reaches_driver
        assert beside == [1], "what goes on beside it is not done twice"
    else:
        with pytest.raises(ClusterError, match=r"no task could run .*exited unexpectedly"):
            asked()
    assert caplog.text.count("the executors are asked again") == 1


@pytest.mark.spark
def test_a_task_that_executors_cannot_import(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from sparkdl.spark.cluster.probe import ProbeTask\nclass Task(ProbeTask): ...\n"
    (tmp_path / "only_on_the_driver.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import only_on_the_driver  # type: ignore[import-not-found]

    monkeypatch.setattr(module, "ProbeTask", only_on_the_driver.Task)
    with pytest.raises(ClusterError, match=r"No module named 'only_on_the_driver'; Spark's work"):
        ask(spark)
    del sys.modules["only_on_the_driver"]


@pytest.mark.spark
@pytest.mark.classic
def test_executors_without_the_python_that_is_named(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/nowhere/python")
    with pytest.raises(ClusterError, match=r"/nowhere/python.*PYSPARK_PYTHON or spark.*--archives"):
        ask(spark)


def test_a_mistake_of_ours_stays_what_it_is() -> None:
    spark = MagicMock()
    spark.range.return_value.mapInArrow.side_effect = ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        ask(spark)


class ChannelThatComes:
    """A channel of which the first calls get lost."""

    calls = 0

    def __init__(self, address: Address, *, timeout_seconds: float) -> None: ...

    def get(self, key: str) -> None:
        type(self).calls += 1
        if type(self).calls < 3:
            raise CommunicationError("the network is away")

    def close(self) -> None: ...


@pytest.mark.parametrize(("seconds", "reaches_driver"), [(5.0, True), (0.0, False)])
def test_a_network_that_is_away_for_a_while(
    monkeypatch: pytest.MonkeyPatch, seconds: float, reaches_driver: bool
) -> None:
    """Eight seconds of it have ended the fit."""
    monkeypatch.setattr(module, "ChannelClient", ChannelThatComes)
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(ChannelThatComes, "calls", 0)
    address = Address(
        host="h", port=1, server_certificate="", worker=Certificate("", ""), secret=""
    )
    task = ProbeTask(channel=address, connect_seconds=seconds, storage_url=None, marker=None)
    (batch,) = task(iter([]))
    assert json.loads(batch["answer"][0].as_py())["reaches_driver"] is reaches_driver


def test_what_training_needs_is_imported_where_nothing_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(module, "preload", lambda: done.append("imports"))
    asked = partial(ProbeTask, channel=None, connect_seconds=0.0, storage_url=None, marker=None)
    list(asked()(iter([])))
    list(asked(preloads=True, needs=Needs(names=frozenset({("os", "nothing")})))(iter([])))
    assert done == []
    list(asked(preloads=True)(iter([])))
    assert done == ["imports"]

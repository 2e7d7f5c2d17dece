"""On a terminal our line is alone: Spark's own bar comes back when ours has gone."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import MagicMock

import pytest
from py4j.protocol import Py4JError

from sparkdl.spark.session import stage_progress
from sparkdl.spark.session.compat import RUN
from sparkdl.spark.session.stage_progress import StageProgress
from tests.terminal import on_terminal

PROGRAM = """
import time
from pyspark.sql import SparkSession
from torch import nn
from sparkdl import TorchRegressor

spark = SparkSession.builder.master("local[2]").getOrCreate()
df = spark.range(64).selectExpr("array(cast(id as float), 1f) as features", "id as label")

def slowly(batches):
    for batch in batches:
        time.sleep(2)
        yield batch

model = TorchRegressor(module=lambda: nn.Linear(2, 1), inputShape=(2,), batchSize=4, epochs=3,
                       numWorkers=2, learningRate=1e-4).fit(df.mapInArrow(slowly, df.schema))
print("FITTED", model.summary)
spark.range(0, 2, 1, 2).mapInArrow(slowly, "id long").collect()
spark.stop()
"""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_fit_on_a_terminal() -> None:
    text = on_terminal(PROGRAM, columns=80)
    fit, _, after = text.partition("FITTED")
    phases = ["checking", "writing the rows for the workers", "starting workers", "epoch 3 of 3"]
    places = [fit.find(phase) for phase in phases]
    assert -1 not in places and places == sorted(places)
    assert re.search(r"writing the rows for the workers \(\d of \d tasks? done\)", fit)
    # Dozens without us; a busy machine may give it a moment.
    assert fit[fit.index("checking") :].count("[Stage") <= 2
    assert "[Stage" in after  # the user's own job has Spark's bar
    drawn = re.split(r"[\r\n]", fit[fit.index("checking") :])
    assert max(map(len, drawn)) <= 80
    assert all(len(line) <= 80 for line in after.splitlines() if "Stage" not in line)


class FakeSpark:
    """A classic session with one stage of 8 tasks."""

    def __init__(self, *, has_bar: bool = True, run_id: str | None = None) -> None:
        self.sparkContext: Any = MagicMock()
        self.scala = self.sparkContext._jsc.sc()
        self.scala.progressBar().isDefined.return_value = has_bar
        self.bar = self.scala.progressBar().get()
        tracker = self.scala.statusTracker()
        tracker.getActiveStageIds.return_value = [3]
        stage = tracker.getStageInfo(3).get()
        stage.stageId.return_value, stage.currentAttemptId.return_value = 3, 1
        self.tasks = MagicMock()
        self.tasks.numTasks.return_value = 8
        self.tasks.taskSet().properties().getProperty.side_effect = {RUN: run_id}.get
        pool = self.scala.taskScheduler().rootPool()
        pool.getSchedulableByName.side_effect = {"TaskSet_3.1": self.tasks}.get
        self.say(0, 0)

    def say(self, ended: int, active: int) -> None:
        self.tasks.tasksSuccessful.return_value = ended
        self.tasks.runningTasks.return_value = active


def test_tasks_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_progress, "_ASK_SECONDS", 0.0)
    monkeypatch.setattr(stage_progress, "terminal_columns", lambda: 80)
    spark: Any = FakeSpark()
    ask = StageProgress(spark)
    said = []
    for ended, active in ((0, 0), (0, 0), (0, 2), (3, 2), (8, 0)):
        spark.say(ended, active)
        said.append(ask())
    assert said == [
        "0 of 8 tasks done", "waiting for slots", "0 of 8 tasks done", "3 of 8 tasks done",
        "8 of 8 tasks done",
    ]  # fmt: skip
    assert spark.bar.finishAll.call_count == 5
    spark.scala.statusTracker().getActiveStageIds.return_value = []
    assert ask() == ""


def test_tasks_of_other_runs_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_progress, "_ASK_SECONDS", 0.0)
    for run_id, said in (("mine", "0 of 8 tasks done"), ("other", ""), (None, "")):
        spark: Any = FakeSpark(run_id=run_id)
        assert StageProgress(spark, "mine")() == said
    own: Any = FakeSpark(run_id=None)
    assert StageProgress(own)() == "0 of 8 tasks done"


def test_of_a_log_file_sparks_own_bar_is_kept_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_progress, "terminal_columns", lambda: None)
    spark: Any = FakeSpark()
    StageProgress(spark)()
    assert spark.bar.stop.called  # however late we look again


def test_a_session_that_has_ended_is_asked_no_more() -> None:
    spark: Any = FakeSpark(has_bar=False)
    spark.scala.statusTracker.side_effect = Py4JError("gone")
    ask = StageProgress(spark)
    assert [ask(), ask()] == ["", ""]
    assert not spark.bar.finishAll.called
    connected = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    assert StageProgress(connected)() == ""

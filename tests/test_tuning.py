"""A search from end to end: what is kept, what is pruned, what a failure and a kill leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.jobfile import (
    DataSection,
    EstimatorSection,
    ObjectRef,
    SparkSection,
    TrainOutput,
    ValidationSection,
)
from sparkdl.spark.shards import ShardTable
from sparkdl.studyfile import Space, StudySection, TuneJob
from sparkdl.tuning import run_tune

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang]


class Net(nn.Sequential):
    """A line; some widths do not fit."""

    def __init__(self, width: int = 3) -> None:
        super().__init__(nn.Linear(width, 1))


@pytest.fixture(scope="module")
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    from pyspark.sql import functions as F

    x = F.array(*[((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)])
    path = str(tmp_path_factory.mktemp("rows") / "rows")
    df = spark.range(0, 120, 1, 2).select(x.alias("features"), (x[0] - x[2]).alias("label"))
    df.write.parquet(path)
    return path


def job(rows: str, place: Path, **changes: Any) -> TuneJob:
    study: dict[str, Any] = {
        "trials": 4, "pruner": "none", "sampler": "random", "seed": 1,
        "search": {"estimator.learning_rate": Space(low=1e-5, high=0.3, log=True)},
    }  # fmt: skip
    return TuneJob(
        data=DataSection(path=rows),
        model=ObjectRef(factory="tests.test_tuning:Net"),
        output=TrainOutput(path=str(place)),
        validation=ValidationSection(fraction=0.3),
        estimator=EstimatorSection(
            kind="regressor", epochs=3, batch_size=16, num_workers=1, seed=2, optimizer="sgd",
            verbose=0,
        ),
        study=StudySection(**{**study, **changes}),
    )  # fmt: skip


def trials(place: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(place.glob("trial-*/trial.json"))]


def test_parameters_history_and_model_of_each_trial_are_kept(
    spark: SparkSession, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparkdl import TorchRegressorModel

    made: list[int] = []
    monkeypatch.setattr(ShardTable, "collect", _counted(ShardTable.collect, made))
    report = run_tune(job(rows, tmp_path), spark)
    assert len(set(made)) == 1  # one table, whichever trial asked
    found = trials(tmp_path)
    assert [trial["state"] for trial in found] == ["complete"] * 4
    assert all(len(trial["history"]) == 3 for trial in found)
    best = min(range(4), key=lambda number: found[number]["value"])
    assert (report.best, report.value) == (best, found[best]["value"])
    assert report.params == found[best]["params"]
    assert report.states == {"complete": 4, "pruned": 0, "failed": 0}
    assert found[best]["value"] == min(r["val_loss"] for r in found[best]["history"])
    model = TorchRegressorModel.load(str(tmp_path / f"trial-{best:05d}" / "model"))
    assert model.transform(spark.read.parquet(rows)).count() == 120
    assert json.loads((tmp_path / "study.json").read_text())["best"] == f"trial-{best:05d}"
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def _counted(collect: Any, made: list[int]) -> Any:
    def counted(self: ShardTable) -> Any:
        made.append(id(self))
        return collect(self)

    return counted


def test_a_failed_trial_does_not_end_the_search(
    spark: SparkSession, rows: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search = {"model.args.width": Space(choices=(3, 5))}
    report = run_tune(job(rows, tmp_path, search=search, trials=5), spark)
    assert report.states["failed"] >= 1
    assert report.states["complete"] >= 1
    assert report.params == {"model.args.width": 3}
    failed = [trial for trial in trials(tmp_path) if trial["state"] == "failed"]
    assert len(failed) == report.states["failed"]
    assert "cannot take the features" in failed[0]["error"]
    assert "failed: the module cannot take the features" in caplog.text


def test_trials_that_promise_nothing_are_pruned(
    spark: SparkSession, rows: str, tmp_path: Path
) -> None:
    found = job(rows, tmp_path, trials=8, pruner="median", startup_trials=2, warmup_epochs=0)
    report = run_tune(replace(found, estimator=replace(found.estimator, epochs=4)), spark)
    assert report.states["pruned"] >= 1
    kept = trials(tmp_path)
    pruned = [trial for trial in kept if trial["state"] == "pruned"]
    assert len(pruned) == report.states["pruned"]
    assert all(1 <= len(trial["history"]) < 4 for trial in pruned)
    assert not any((tmp_path / f"trial-{kept.index(t):05d}" / "model").exists() for t in pruned)
    assert report.value == min(t["value"] for t in kept)


def test_trials_run_at_the_same_time(spark: SparkSession, rows: str, tmp_path: Path) -> None:
    report = run_tune(job(rows, tmp_path, parallel=2), spark)
    assert report.states == {"complete": 4, "pruned": 0, "failed": 0}
    assert len(trials(tmp_path)) == 4


def test_a_finished_search_goes_on_with_more_trials(
    spark: SparkSession, rows: str, tmp_path: Path
) -> None:
    first = run_tune(job(rows, tmp_path, trials=2), spark)
    before = (tmp_path / "trial-00000" / "trial.json").stat().st_mtime_ns
    second = run_tune(job(rows, tmp_path, trials=3), spark)
    assert (sum(first.states.values()), sum(second.states.values())) == (2, 3)
    assert (tmp_path / "trial-00000" / "trial.json").stat().st_mtime_ns == before
    assert len(trials(tmp_path)) == 3


SEARCH = """
import sys
from pathlib import Path
from sparkdl.job import make_session
from sparkdl.jobfile import SparkSection
from sparkdl.tuning import run_tune
from tests.test_tuning import job
section = SparkSection(master="local[2]", conf={"spark.ui.enabled": False})
run_tune(job(sys.argv[1], Path(sys.argv[2]), trials=40), make_session(section, "search"))
"""


@pytest.mark.timeout(240)
def test_a_killed_search_goes_on(spark: SparkSession, rows: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SEARCH, rows, str(tmp_path)],
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 150
        while len(trials(tmp_path)) < 2 and time.monotonic() < deadline:
            assert process.poll() is None, "the search ended"
            time.sleep(0.05)
        done = len(trials(tmp_path))
        assert 2 <= done < 40
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    known = {trial["params"]["estimator.learning_rate"] for trial in trials(tmp_path)}
    report = run_tune(job(rows, tmp_path, trials=done + 3), spark)
    # The one that was cut off counts as failed, and was tried again with its values.
    assert report.states["complete"] >= done + 2
    assert sum(report.states.values()) == done + 3
    assert known <= {trial["params"]["estimator.learning_rate"] for trial in trials(tmp_path)}


def test_a_metric_that_is_not_measured_is_named(
    spark: SparkSession, rows: str, tmp_path: Path
) -> None:
    report = run_tune(job(rows, tmp_path, metric="val_f1", trials=1), spark)
    assert report.best is None
    (found,) = trials(tmp_path)
    assert "'val_f1'" in found["error"]
    assert "val_loss" in found["error"]


def test_a_study_on_a_distant_place_needs_a_storage(spark: SparkSession, rows: str) -> None:
    distant = replace(job(rows, Path("x")), output=TrainOutput(path="memory://search"))
    with pytest.raises(ConfigError, match=r"study\.storage"):
        run_tune(distant, spark)


def test_a_database_may_keep_the_study(spark: SparkSession, rows: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    report = run_tune(job(rows, tmp_path / "out", storage=url, trials=1), spark)
    assert report.states["complete"] == 1
    assert (tmp_path / "study.db").exists()
    assert not (tmp_path / "out" / "study.log").exists()


def test_the_job_file_says_which_session() -> None:
    assert job("rows", Path("x")).spark == SparkSection()

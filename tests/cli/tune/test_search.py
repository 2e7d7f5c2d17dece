"""A search from end to end: what is kept, what is pruned, what a failure and a kill leave."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from sparkdl.cli.job_files.job_file import (
    DataSection,
    EstimatorSection,
    ObjectRef,
    SparkSection,
    TrainOutput,
    ValidationSection,
)
from sparkdl.cli.job_files.study_file import Space, StudySection, TuneJob
from sparkdl.cli.tune.search import _Watch, _write, run_tune
from sparkdl.cli.tune.study_storage import open_study
from sparkdl.errors import ConfigError, StorageError
from sparkdl.spark.frames.shard_table import ShardTable
from sparkdl.storage.storage import open_storage

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
        model=ObjectRef(factory="tests.cli.tune.test_search:Net"),
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


@pytest.mark.slow
def test_a_failed_trial_does_not_end_the_search(
    spark: SparkSession, rows: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search = {"model.args.width": Space(choices=(3, 5, "wide"))}
    report = run_tune(job(rows, tmp_path, search=search, trials=7), spark)
    assert report.params == {"model.args.width": 3}
    assert report.states["complete"] >= 1
    failed = {t["params"]["model.args.width"]: t for t in trials(tmp_path) if "error" in t}
    assert all(trial["state"] == "failed" and trial["value"] is None for trial in failed.values())
    assert "cannot take the features" in failed[5]["error"]  # ours
    assert "raised TypeError" in failed["wide"]["error"]  # of the user's code
    assert "failed: the module cannot take the features" in caplog.text


@pytest.mark.slow
def test_a_trial_counts_although_the_driver_hears_no_epoch(
    spark: SparkSession, rows: str, tmp_path: Path
) -> None:
    spark.conf.set("spark.sparkdl.channel", "workers")
    try:
        report = run_tune(job(rows, tmp_path, trials=1), spark)
    finally:
        spark.conf.unset("spark.sparkdl.channel")
    (found,) = trials(tmp_path)
    assert report.states == {"complete": 1, "pruned": 0, "failed": 0}
    assert len(found["history"]) == 3
    assert found["value"] == min(record["val_loss"] for record in found["history"])
    assert found["last"] == found["history"][-1]["val_loss"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_trials_run_at_the_same_time(spark: SparkSession, rows: str, tmp_path: Path) -> None:
    report = run_tune(job(rows, tmp_path, parallel=2), spark)
    assert report.states == {"complete": 4, "pruned": 0, "failed": 0}
    assert len(trials(tmp_path)) == 4


@pytest.mark.slow
def test_a_finished_search_goes_on_with_more_trials(
    spark: SparkSession, rows: str, tmp_path: Path
) -> None:
    first = run_tune(job(rows, tmp_path, trials=2), spark)
    before = (tmp_path / "trial-00000" / "trial.json").stat().st_mtime_ns
    second = run_tune(job(rows, tmp_path, trials=3), spark)
    assert (sum(first.states.values()), sum(second.states.values())) == (2, 3)
    assert (tmp_path / "trial-00000" / "trial.json").stat().st_mtime_ns == before
    rates = [trial["params"]["estimator.learning_rate"] for trial in trials(tmp_path)]
    assert len(set(rates)) == 3


def interrupted(*_: Any) -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_trial_that_was_cut_off_goes_on_from_its_checkpoint_with_its_whole_history(
    spark: SparkSession, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, kept = tmp_path / "search", tmp_path / "checkpoints"
    found = job(rows, place, trials=2)
    section = replace(found.estimator, checkpoint_dir=str(kept), checkpoint_interval=2)
    found = replace(found, estimator=section)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("sparkdl.model.TorchModel.write", interrupted)  # it was trained
        run_tune(found, spark)
    assert trials(place) == []
    report = run_tune(found, spark)
    assert report.states == {"complete": 2, "pruned": 0, "failed": 0}
    again, other = trials(place)
    assert len(again["history"]) == len(other["history"]) == 3
    assert again["value"] == min(record["val_loss"] for record in again["history"])
    # Trial 1 is trial 0 again.
    assert sorted(path.name for path in kept.iterdir()) == ["trial-00000", "trial-00002"]


@pytest.mark.classic  # a Spark Connect client does not cancel its jobs at Ctrl-C
@pytest.mark.slow
def test_ctrl_c_leaves_all_running_trials_to_the_next_search(
    spark: SparkSession, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, pressed = job(rows, tmp_path, parallel=2), threading.Event()

    def press(section: StudySection, history: Any) -> float:
        if not pressed.is_set():
            pressed.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return 1.0

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("sparkdl.cli.tune.search.best_value", press)  # each epoch asks for it
        run_tune(replace(found, estimator=replace(found.estimator, epochs=20_000)), spark)
    assert trials(tmp_path) == []
    report = run_tune(found, spark)
    assert report.states == {"complete": 4, "pruned": 0, "failed": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"metric": "loss"},
        {"direction": "maximize"},
        {"search": {"estimator.learning_rate": Space(low=1e-5, high=1.0, log=True)}},
        {"search": {"estimator.batch_size": Space(choices=(16, 32))}},
    ],
)
def test_a_study_does_not_go_on_with_what_cannot_be_compared(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    place = open_storage(str(tmp_path))
    open_study(job("rows", tmp_path).study, place)
    open_study(job("rows", tmp_path, trials=9, sampler="tpe").study, place)
    (name,) = change
    with pytest.raises(ConfigError, match=rf"another study\.{name}.*set study\.name"):
        open_study(job("rows", tmp_path, **change).study, place)


def test_an_epoch_that_is_seen_twice_stands_once(tmp_path: Path) -> None:
    section = job("rows", tmp_path).study
    trial = open_study(section, open_storage(str(tmp_path))).ask()
    watch = _Watch(section, trial, threading.Event())
    for epoch, loss in ((1, 3.0), (2, 9.0), (2, 2.0), (3, math.nan)):
        watch({"epoch": epoch, "val_loss": loss})
    assert [record["epoch"] for record in watch.history] == [1, 2, 3]
    assert watch.best == 2.0


def test_what_is_written_is_json(tmp_path: Path) -> None:
    _write(open_storage(str(tmp_path)), "x.json", {"history": [{"learning_rate": math.nan}]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"history": [{"learning_rate": None}]}


def test_a_place_that_cannot_be_written_is_found_before_any_trial(
    spark: SparkSession, rows: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        run_tune(job(rows, tmp_path / "file" / "search"), spark)
    fine = job(rows, tmp_path / "search", storage=str(tmp_path / "file" / "study.log"))
    with pytest.raises(StorageError, match=r"set study\.storage"):
        run_tune(fine, spark)


SEARCH = """
import sys
from pathlib import Path
from sparkdl.cli.job_files.spark_session import make_session
from sparkdl.cli.job_files.job_file import SparkSection
from sparkdl.cli.tune.search import run_tune
from tests.cli.tune.test_search import job
section = SparkSection(master="local[2]", conf={"spark.ui.enabled": False})
run_tune(job(sys.argv[1], Path(sys.argv[2]), trials=40), make_session(section, "search"))
"""


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_killed_search_goes_on(spark: SparkSession, rows: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SEARCH, rows, str(tmp_path)],
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 240
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
    # The one that was cut off does not count; it was tried again with its values.
    assert report.states == {"complete": done + 3, "pruned": 0, "failed": 0}
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


@pytest.mark.slow
def test_a_database_may_keep_the_study(spark: SparkSession, rows: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    report = run_tune(job(rows, tmp_path / "out", storage=url, trials=1), spark)
    assert report.states["complete"] == 1
    assert (tmp_path / "study.db").exists()
    assert not (tmp_path / "out" / "study.log").exists()


def test_the_job_file_says_which_session() -> None:
    assert job("rows", Path("x")).spark == SparkSection()

"""The search of a job file from end to end: what is kept, what a failure and a kill leave."""

from __future__ import annotations

import json
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

from sparkdl.cli.job_commands import TUNE, Form
from sparkdl.cli.job_files.job_file import (
    DataSection,
    EstimatorSection,
    ObjectRef,
    SparkSection,
    TrainOutput,
    ValidationSection,
)
from sparkdl.cli.job_files.study_file import Space, StudySection, TuneJob
from sparkdl.cli.jobs import run_tune
from sparkdl.errors import ConfigError, SparkDLError, StorageError

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
        model=ObjectRef(factory="tests.cli.test_tune_job:Net"),
        output=TrainOutput(path=str(place)),
        validation=ValidationSection(fraction=0.3),
        estimator=EstimatorSection(
            kind="regressor", epochs=3, batch_size=16, num_workers=1, seed=2, optimizer="sgd",
            verbose=0,
        ),
        study=StudySection(**{**study, **changes}),
    )  # fmt: skip


def states(found: Any) -> dict[str, int]:
    counts: dict[str, int] = found.to_dict()["states"]
    return counts


def trials(place: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(place.glob("trial-*/trial.json"))]


def test_parameters_history_and_model_of_each_trial_are_kept(
    spark: SparkSession, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparkdl import TorchRegressorModel

    the_job = job(rows, tmp_path)
    report = run_tune(the_job, spark)
    found = trials(tmp_path)
    assert [trial["state"] for trial in found] == ["complete"] * 4
    assert all(len(trial["history"]) == 3 for trial in found)
    best = min(range(4), key=lambda number: found[number]["values"]["val_loss"])
    assert (report.best.number, report.best_value) == (best, found[best]["values"]["val_loss"])
    assert report.best_params == found[best]["params"]
    assert report.best_value == min(r["val_loss"] for r in found[best]["history"])
    model = TorchRegressorModel.load(str(tmp_path / f"trial-{best:05d}" / "model"))
    assert model.transform(spark.read.parquet(rows)).count() == 120
    kept = json.loads((tmp_path / "study.json").read_text())
    assert (kept["best"][0]["trial"], kept["states"]) == (best, {"complete": 4})
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    TUNE.show(the_job, report, Form.COMMAND)
    printed = capsys.readouterr().out
    assert "trials: 4 complete\n" in printed
    assert f"model: {tmp_path}/trial-{best:05d}/model\n" in printed
    assert (
        f"--set 'estimator.learning_rate={report.best_params['estimator.learning_rate']}'"
        in printed
    )


@pytest.mark.slow
def test_a_failed_trial_does_not_end_the_search(
    spark: SparkSession, rows: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search = {"model.args.width": Space(choices=(3, 5, "wide"))}
    report = run_tune(job(rows, tmp_path, search=search, trials=7), spark)
    assert report.best_params == {"model.args.width": 3}
    failed = {t["params"]["model.args.width"]: t for t in trials(tmp_path) if "error" in t}
    assert all(
        trial["state"] == "failed" and trial["values"] == {"val_loss": None}
        for trial in failed.values()
    )
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
    assert states(report) == {"complete": 1}
    assert len(found["history"]) == 3
    assert report.best_value == min(record["val_loss"] for record in found["history"])


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
    assert states(report) == {"complete": 2}
    again, other = trials(place)
    assert len(again["history"]) == len(other["history"]) == 3
    # Trial 1 is trial 0 again.
    assert sorted(path.name for path in kept.iterdir()) == ["trial-00000", "trial-00002"]


@pytest.mark.classic  # a Spark Connect client does not cancel its jobs at Ctrl-C
@pytest.mark.slow
def test_ctrl_c_leaves_all_running_trials_to_the_next_search(
    spark: SparkSession, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, pressed = job(rows, tmp_path, parallel=2, trials=3), threading.Event()
    found = replace(found, estimator=replace(found.estimator, epochs=300))  # the other one trains

    def press(watch: Any, record: Any, name: str) -> float:
        if not pressed.is_set():
            pressed.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return 1.0

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("sparkdl.tuning.search._Watch.value", press)  # each epoch asks for it
        run_tune(found, spark)
    assert trials(tmp_path) == []
    report = run_tune(found, spark)
    assert states(report) == {"complete": 3}


def test_a_place_that_cannot_be_written_is_found_before_any_trial(
    spark: SparkSession, rows: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        run_tune(job(rows, tmp_path / "file" / "search"), spark)
    fine = job(rows, tmp_path / "search", storage=str(tmp_path / "file" / "study.log"))
    with pytest.raises(StorageError, match=r"set storage"):
        run_tune(fine, spark)


SEARCH = """
import sys
from pathlib import Path
from sparkdl.cli.job_files.spark_session import make_session
from sparkdl.cli.job_files.job_file import SparkSection
from sparkdl.cli.jobs import run_tune
from tests.cli.test_tune_job import job
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
    assert states(report) == {"complete": done + 3}
    assert known <= {trial["params"]["estimator.learning_rate"] for trial in trials(tmp_path)}


def test_a_metric_that_is_not_measured_is_named(
    spark: SparkSession, rows: str, tmp_path: Path
) -> None:
    with pytest.raises(SparkDLError, match=r"'val_f1'.*val_loss"):
        run_tune(job(rows, tmp_path, metric="val_f1", trials=1), spark)


def test_a_study_on_a_distant_place_needs_a_storage(spark: SparkSession, rows: str) -> None:
    distant = replace(job(rows, Path("x")), output=TrainOutput(path="memory://search"))
    with pytest.raises(ConfigError, match=r"set storage to a local file"):
        run_tune(distant, spark)


def test_the_job_file_says_which_session() -> None:
    assert job("rows", Path("x")).spark == SparkSection()

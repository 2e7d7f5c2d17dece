"""What does a fit leave for people to read, in either mode, whether it succeeds or fails?"""

from __future__ import annotations

import _thread
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pyspark import TaskContext
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from sparkdl.config import EarlyStopping
from sparkdl.errors import StorageError, WorkerError
from sparkdl.estimator import TorchClassifier
from sparkdl.report.listeners.listener import Listener, RunListener, RunStart
from sparkdl.report.listeners.tensorboard import TensorBoard
from sparkdl.report.record.run_folder import RunFolder, RunReader, read_runs
from sparkdl.report.record.run_record import RunRecord
from sparkdl.runner import TorchRunner
from sparkdl.storage.storage import LocalStorage
from sparkdl.train.callbacks import Callback, CallbackState
from sparkdl.worker.context import context

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang]

TOLD: list[tuple[str, Any]] = []


@dataclass(frozen=True)
class Ear(Listener):
    """Keeps what it is told in `TOLD`."""

    fails_at: str = ""

    def start(self, run: RunStart) -> RunListener:
        TOLD.clear()
        TOLD.append(("start", run))
        return _Ear(self.fails_at)


@dataclass
class _Ear(RunListener):
    fails_at: str
    names: list[str] = field(default_factory=list)

    def _take(self, name: str, value: Any) -> None:
        TOLD.append((name, value))
        if name == self.fails_at:
            raise RuntimeError("deaf")

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._take("facts", facts)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._take("step", (step, values))

    def epoch(self, step: int, record: Mapping[str, float]) -> None:
        self._take("epoch", (step, record))

    def failure(self, reason: str) -> None:
        self._take("failure", reason)

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        self._take("end", (record, module))


def told(name: str) -> list[Any]:
    return [value for kind, value in TOLD if kind == name]


class Slow(Callback):
    """Makes steps long enough for the timeline."""

    def on_step_end(self, state: CallbackState) -> None:
        time.sleep(0.02)


class Failing(Callback):
    def on_step_end(self, state: CallbackState) -> None:
        if state.step == 5:
            raise ValueError("<no> more")


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)]
    return spark.range(0, 240, 1, 3).select(
        F.array(*features).alias("features"),
        (F.col("id") % 3).alias("label"),
        (F.col("id") % 5 == 0).alias("held_out"),
    )


def classifier(folder: Path | None, **params: Any) -> TorchClassifier:
    values: dict[str, Any] = {
        "module": make_net, "epochs": 3, "batchSize": 16, "numWorkers": 2, "verbose": 0,
        "maxRestarts": 0, "validationIndicatorCol": "held_out", "seed": 3,
        "reportDir": None if folder is None else str(folder),
    }  # fmt: skip
    return TorchClassifier(**{**values, **params})


def only_run(folder: Path) -> tuple[RunRecord, str]:
    """The one run's record, and its page."""
    reader = RunReader(LocalStorage(folder))
    (name,) = reader.names()
    found = reader.read(name)
    assert found is not None
    assert {path.name for path in (folder / name).iterdir()} == {"run.json", "report.html"}
    return found, (folder / name / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plain(df: DataFrame) -> Any:
    """A fit that nobody listens to, and that writes nothing."""
    return classifier(None).fit(df)


def assert_told_in_order() -> None:
    """By the fit of three epochs that `Ear` has heard last."""
    kinds = [kind for kind, _ in TOLD]
    assert kinds[:2] == ["start", "facts"]
    assert kinds[-1] == "end"
    assert told("start")[0].params["epochs"] == "3"
    per_epoch = told("facts")[0]["steps_per_epoch"]
    assert [step for step, _ in told("epoch")] == [per_epoch, 2 * per_epoch, 3 * per_epoch]
    steps = [step for step, _ in told("step")]
    assert steps == sorted(set(steps)) and steps
    record, module = told("end")[0]
    assert record.status == "succeeded"
    assert isinstance(module, nn.Module)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["gang", "rounds"])
def test_a_fit_leaves_its_record_and_page(
    df: DataFrame, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, plain: Any, mode: str
) -> None:
    strategy = "allreduce" if mode == "gang" else "parameter_averaging"
    events = tmp_path_factory.mktemp("tensorboard")
    estimator = classifier(
        tmp_path,
        syncStrategy=strategy,
        executionMode=mode,
        callbacks=[Slow()],
        runName=f"in a {mode}",
        listeners=[TensorBoard(log_dir=str(events), layer_interval=6), Ear()],
    )
    began = time.time()
    model = estimator.fit(df)
    elapsed, summary = time.time() - began, model.summary
    found, text = only_run(tmp_path)

    assert summary.report_path == str(next(tmp_path.glob("*/report.html")))
    assert (found.status, found.name, found.restarts) == ("succeeded", "TorchClassifier", 0)
    assert found.run_name == summary.run_name == f"in a {mode}"
    assert list(read_runs(tmp_path, name="in a*").values()) == [found]
    assert began - 1 < found.started < began + 5
    assert found.seconds == pytest.approx(elapsed, abs=2)
    phases = ["preflight", "first rows", "executors", "spool", "train", "clean up"]
    assert list(found.laps) == phases
    assert sum(found.laps.values()) == pytest.approx(found.seconds, abs=1)
    assert found.history == json.loads(json.dumps(summary.history))
    assert {p["name"]: p["value"] for p in found.params if p["is_set"]}["epochs"] == "3"
    assert found.facts["mode"] == mode
    assert found.facts["rows"] + found.facts["validation_rows"] == 240
    assert found.facts["parameters"] == 59
    assert [node["op"] for node in found.graph["nodes"]] == [
        "input", "Linear", "ReLU", "Linear", "output",
    ]  # fmt: skip
    assert found.confusion is not None
    assert sum(map(sum, found.confusion["counts"])) == found.facts["validation_rows"]
    assert found.confusion["epoch"] == 3
    assert set(found.hardware) == set(found.spent) == {"0", "1"}
    for rank, total in found.totals().items():
        assert set(total) >= {"data", "compute", "communication", "evaluate"}
        spans = found.spent[rank]
        assert 0 < spans[0][0] < spans[-1][1] < found.seconds + 0.5
        covered = spans[-1][1] - spans[0][0]
        assert sum(total.values()) == pytest.approx(covered, abs=0.3)  # all of it is told
        assert covered < found.laps["train"] + 0.5
    assert "Where the time went" in text
    every = list(range(6, summary.steps + 1, 6))
    assert {look["step"] for look in found.layers} == {*every, summary.steps}
    assert all(list(look["ratios"]) == ["0", "2"] for look in found.layers)
    assert all(1e-5 < look["ratios"]["0"] < 0.1 for look in found.layers)
    assert "Updates by layer" in text
    shown = EventAccumulator(str(next(events.iterdir())), {"histograms": 0}).Reload()
    assert set(shown.Tags()["histograms"]) == {
        f"{what}/{layer}.{name}"
        for what in ("weights", "gradients") for layer in (0, 2) for name in ("weight", "bias")
    }  # fmt: skip
    (first, *_) = shown.Histograms("gradients/0.weight")
    assert (first.step, first.histogram_value.num) == (6, 24)
    assert [node.op for node in shown.Graph().node] == [
        "input", "Linear", "ReLU", "Linear", "output",
    ]  # fmt: skip

    assert_told_in_order()
    if mode == "gang":  # who listens changes no weights
        expected, watched = plain.module.state_dict(), model.module.state_dict()
        assert all(torch.equal(expected[name], watched[name]) for name in expected)


def test_a_fit_that_never_began_says_why(df: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no_such_column"):
        classifier(tmp_path, labelCol="no_such_column").fit(df)
    found, _ = only_run(tmp_path)
    assert found.status == "failed"
    assert "no_such_column" in found.error["message"]
    assert found.spent == {}


@pytest.mark.slow
def test_the_record_is_in_memory_without_a_directory(plain: Any, tmp_path: Path) -> None:
    assert plain.summary.report_path is None
    path = plain.summary.write_report(tmp_path / "deep" / "report.html")
    assert "Learning curves" in path.read_text(encoding="utf-8")
    with pytest.raises(StorageError, match="choose another path"):
        plain.summary.write_report(tmp_path)


def test_a_directory_that_cannot_be_written_ends_the_fit_at_once(
    df: DataFrame, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="that is no file, and below none"):
        classifier(tmp_path / "file").fit(df)


@pytest.mark.slow
def test_the_kept_epochs_mistakes_are_shown_and_a_listener_that_fails_ends_no_fit(
    df: DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = EarlyStopping(monitor="val_loss", patience=1, min_delta=100.0)
    deaf = Ear(fails_at="epoch")
    model = classifier(tmp_path, epochs=5, earlyStopping=stop, listeners=[deaf]).fit(df)
    found, _ = only_run(tmp_path)
    assert len(model.summary.history) == 2
    assert found.confusion is not None
    assert found.confusion["epoch"] == 1
    assert len(told("epoch")) == 1
    assert len(told("end")) == 1
    assert "deaf" in caplog.text


class KillOnce(nn.Module):
    """Kills its worker once."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = Path(marker)
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_worker = TaskContext.get() is not None  # the driver tries a step
        if is_worker and self.training and x.abs().sum() > 0 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        out: torch.Tensor = self.linear(x)
        return out


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gang", "rounds"])
def test_a_restart_is_recorded(df: DataFrame, tmp_path: Path, mode: str) -> None:
    strategy = "allreduce" if mode == "gang" else "parameter_averaging"
    make = partial(KillOnce, str(tmp_path / "killed"))
    estimator = classifier(
        tmp_path / "runs", module=make, syncStrategy=strategy, executionMode=mode, maxRestarts=1
    )
    summary = estimator.fit(df).summary
    found, text = only_run(tmp_path / "runs")
    assert found.restarts == summary.restarts == 1
    assert [attempt["number"] for attempt in found.attempts] == [0, 1]
    assert len(found.failures) == 1
    assert "started again after" in text
    assert "the run ended" not in text
    assert found.steps[-1][1] == summary.steps


class Lingering(Callback):
    def on_step_end(self, state: CallbackState) -> None:
        time.sleep(30)


@pytest.mark.slow
def test_an_interrupted_fit_says_so(df: DataFrame, tmp_path: Path) -> None:
    """Whatever its cancelled job has raised."""

    class Press(Ear):
        def start(self, run: RunStart) -> RunListener:
            threading.Timer(3.0, _thread.interrupt_main, (signal.SIGINT,)).start()
            return super().start(run)

    with pytest.raises(KeyboardInterrupt):
        classifier(tmp_path, callbacks=[Lingering()], listeners=[Press()]).fit(df)
    found, _ = only_run(tmp_path)
    assert found.status == "failed"
    assert found.error == {"type": "KeyboardInterrupt", "message": "interrupted"}
    assert len(told("end")) == 1


@pytest.mark.slow
def test_presses_while_the_report_is_written_do_not_tear_it(
    df: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = RunFolder.finish

    def pressed(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        finish(*arguments)

    monkeypatch.setattr(RunFolder, "finish", pressed)
    with pytest.raises(KeyboardInterrupt):
        classifier(tmp_path, listeners=[Ear()]).fit(df)
    assert only_run(tmp_path)[0].status == "succeeded"
    assert [record.status for record, _ in told("end")] == ["succeeded"]
    with pytest.raises(KeyboardInterrupt) as caught:
        classifier(tmp_path / "bad", callbacks=[Failing()]).fit(df)
    assert isinstance(caught.value.__cause__, WorkerError)
    found, text = only_run(tmp_path / "bad")
    assert (found.status, found.error["type"]) == ("failed", "WorkerError")
    assert "ValueError on rank" in found.error["message"]
    assert "on_step_end" in found.error["traceback"]
    assert "&lt;no&gt; more" in text


def train_function() -> str:
    place = context()
    for number in range(3):
        place.report({"loss": 1.0 / (number + 1)})
    return "done"


def test_a_function_leaves_a_record_of_its_reports(spark: SparkSession, tmp_path: Path) -> None:
    runner = TorchRunner(
        num_workers=2, verbose=0, report_dir=str(tmp_path), listeners=[Ear()], run_name="mine"
    )
    assert runner.run(train_function) == "done"
    found, text = only_run(tmp_path)
    assert (found.status, found.name) == ("succeeded", "TorchRunner")
    assert found.run_name == told("start")[0].run_name == "mine"
    assert [entry["report"] for entry in found.history] == [1.0, 2.0, 3.0]
    assert found.facts["workers"] == 2
    assert set(found.hardware) == {"0", "1"}
    assert "train_function" in text
    assert len(told("epoch")) == 3


def stages_of(context: Any) -> dict[int, str]:
    """Number of each stage that Spark knows -> description, as its UI has them."""
    empty = context._gateway.new_array(context._jvm.double, 0)
    status = context._jvm.java.util.ArrayList()
    found = context._jsc.sc().statusStore().stageList(None, False, False, empty, status)
    stages = [found.apply(k) for k in range(found.size())]
    ran = [stage for stage in stages if stage.status().name() != "SKIPPED"]
    texts = {stage.stageId(): stage.description() for stage in ran}
    return {number: text.get() if text.isDefined() else "" for number, text in texts.items()}


@pytest.mark.slow
@pytest.mark.classic
@pytest.mark.parametrize("mode", ["gang", "rounds"])
def test_spark_names_our_jobs_and_keeps_the_users_name(
    spark: SparkSession, df: DataFrame, mode: str
) -> None:
    context_: Any = spark.sparkContext
    store = context_._jsc.sc().statusStore()
    context_.setJobDescription("the user's own")
    try:
        before = store.jobsList(None)  # the newest first; the oldest are forgotten
        newest, earlier = before.apply(0).jobId(), set(stages_of(context_).items())
        strategy = "allreduce" if mode == "gang" else "parameter_averaging"
        classifier(None, syncStrategy=strategy, executionMode=mode, runName="wide").fit(df)
        spark.range(3).collect()  # one job
        jobs = store.jobsList(None)
        new = [jobs.apply(k) for k in range(jobs.size())]
        described = [job.description().get() for job in new if job.jobId() > newest]
        stages = set(stages_of(context_).items()) - earlier
    finally:
        context_.setJobDescription(None)
    assert described[0] == "the user's own"
    ours = described[1:]
    for what in ("check the executors", "spool", "train", "clean up"):
        assert any(what in text for text in ours), (what, ours)
    assert all(text.startswith("sparkdl ") and text.endswith(" (wide)") for text in ours)
    others = {text for _, text in stages if not text.startswith("sparkdl ")}
    assert others == {"the user's own"}


def test_params_are_shown_without_passwords(df: DataFrame) -> None:
    from sparkdl.spark.run.run_facts import shown, shown_params

    estimator = classifier(None, checkpointDir="s3://key:secret@bucket/x")
    text = str(shown_params(estimator))
    assert "secret" not in text and "bucket" in text
    assert shown(make_net).endswith("test_run_facts.make_net")
    assert len(shown("x" * 10_000)) == 500


@pytest.mark.classic
def test_what_a_runner_is_given_is_shown_without_secrets_and_jobs(df: DataFrame) -> None:
    from sparkdl.data.sources.petastorm import PetastormSource
    from sparkdl.runner import _shown

    spark = df.sparkSession
    source = PetastormSource(
        "s3://key:secret@bucket/x", storage_options={"token": "secret", "anon": False}
    )
    store = spark.sparkContext._jsc.sc().statusStore()
    before = store.jobsList(None).size()
    spark.conf.set("spark.sql.repl.eagerEval.enabled", "true")
    try:
        request = TorchRunner(data={"rows": df, "more": source})._ask(function=train_function)
        shown = {entry["name"]: entry["value"] for entry in _shown(request, train_function)}
    finally:
        spark.conf.unset("spark.sql.repl.eagerEval.enabled")
    assert store.jobsList(None).size() == before
    assert shown["data: rows"] == (
        "DataFrame[features: array<float>, label: bigint, held_out: boolean]"
    )
    assert shown["data: more"] == "PetastormSource('s3://***@bucket/x')"


def test_a_function_in_the_drivers_own_process_leaves_one_too(tmp_path: Path) -> None:
    runner = TorchRunner(num_workers=0, verbose=0, report_dir=str(tmp_path))
    assert runner.run(train_function) == "done"
    found, _ = only_run(tmp_path)
    assert (found.status, len(found.history)) == ("succeeded", 3)
    assert found.facts == {"workers": 1, "mode": "the driver's own process"}

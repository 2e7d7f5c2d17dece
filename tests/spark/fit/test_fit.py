"""Fit as a whole refuses early, leaves nothing behind, and tells what happens."""

from __future__ import annotations

import _thread
import hashlib
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from torchmetrics.classification import BinaryAccuracy

from sparkdl.config import CheckpointConfig, EarlyStopping, TrainConfig
from sparkdl.data.shuffle_windows import HostLoad
from sparkdl.errors import ClusterError, ConfigError, DataError, StorageError, WorkerError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.spark.cluster import cluster_info, probe, slots
from sparkdl.spark.fit.check_request import check_request
from sparkdl.spark.fit.fit import fit
from sparkdl.spark.frames import first_rows, spool_task
from sparkdl.spark.frames import user_data as user_data_module
from sparkdl.spark.frames.user_data import user_data
from sparkdl.spark.run.run import FitRequest, FitResult
from sparkdl.train.callbacks import Callback, CallbackState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from torch import nn

pytestmark = [pytest.mark.spark, pytest.mark.gang]

ROWS = 120


def make_net() -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)]
    return spark.range(0, ROWS, 1, 3).select(
        F.array(*features).alias("features"),
        (F.col("id") % 3).alias("label"),
        F.col("id").cast("string").alias("text"),
        F.lit(1.0).alias("weight"),
    )


def request(*callbacks: Any, **changes: Any) -> FitRequest:
    config = TrainConfig(
        task=CLASSIFICATION, loss="cross_entropy", optimizer="adam", learning_rate=0.01,
        epochs=changes.pop("epochs", 2), batch_size=16, seed=7, callbacks=callbacks,
        checkpoint=CheckpointConfig(directory=changes.pop("directory", None), interval=5),
    )  # fmt: skip
    values: dict[str, Any] = {
        "module": make_net, "config": config, "feature_cols": ("features",),
        "input_shapes": (None,), "label_col": "label", "weight_col": None,
        "validation_col": None, "num_workers": 2, "max_restarts": 0, "verbose": 0,
        "cpus_per_worker": None, "gpus_per_worker": None,
    }  # fmt: skip
    return FitRequest(**{**values, **changes})


def digest(result: FitResult) -> str:
    state = result.module.state_dict()
    data = b"".join(tensor.numpy().tobytes() for tensor in state.values())
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def expected(df: DataFrame) -> str:
    """Weights of the plain fit."""
    return digest(fit(df, request()))


def num_jobs(spark: SparkSession) -> int:
    context: Any = spark.sparkContext
    return int(context._jsc.sc().statusStore().jobsList(None).size())


def tell_local_dirs(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    yield pa.RecordBatch.from_pydict({"folder": spool_task.local_dirs()})


@pytest.fixture(scope="module")
def local_dirs(spark: SparkSession) -> list[Path]:
    """Where executors keep their files."""
    rows = spark.range(1).mapInArrow(tell_local_dirs, "folder string").collect()
    return [Path(row["folder"]) for row in rows]


def wait_long(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Take longer than a test may, so who reads these rows to their end is found out."""
    time.sleep(600)
    yield from batches


def test_executors_that_are_refused_do_not_read_the_rows_to_their_end(
    df: DataFrame, local_dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = df.sparkSession.sparkContext.statusTracker()

    def refuse(*_: object) -> str:
        while not tracker.getActiveJobsIds():  # else the test's time-out says where it waits
            time.sleep(0.05)
        return "the executor has another torch"

    monkeypatch.setattr(probe, "difference", refuse)
    monkeypatch.setattr(first_rows, "_SECONDS", 1.0)  # for a look that sees none of these rows
    with pytest.raises(ClusterError, match="the executor has another torch"):
        fit(df.mapInArrow(wait_long, df.schema), request())
    assert not tracker.getActiveJobsIds()
    assert not [path for folder in local_dirs for path in folder.glob("sparkdl-*")]


def python_workers() -> set[int]:
    """Spark's Python workers below this process, without the daemons that fork them."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue
        pid = int(folder.name)
        parents[pid] = int(stat.rpartition(")")[2].split()[1])
        names[pid] = stat.partition("(")[2].rpartition(")")[0]
    below, size = {os.getpid()}, 0
    while len(below) != size:
        size = len(below)
        below |= {pid for pid, parent in parents.items() if parent in below}
    pythons = {pid for pid in below - {os.getpid()} if names[pid].startswith("python")}
    return {pid for pid in pythons if names[parents[pid]].startswith("python")}


def listening_ports(pids: Iterable[int]) -> set[int]:
    """Ports on which processes listen."""
    sockets = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[fields[9]] = int(fields[1].rsplit(":", 1)[1], 16)
    ports = set()
    for pid in pids:
        try:
            links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        ports |= {sockets[link[8:-1]] for link in links if link[8:-1] in sockets}
    return ports


def left_behind(spark: SparkSession, local_dirs: list[Path], temporary: Path) -> dict[str, Any]:
    context: Any = spark.sparkContext
    return {
        "spools": [path for folder in local_dirs for path in folder.glob("sparkdl-*")],
        "temporary": list(temporary.glob("sparkdl-*")),
        "persisted": int(context._jsc.getPersistentRDDs().size()),
        "jobs": list(spark.sparkContext.statusTracker().getActiveJobsIds()),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("sparkdl")],
        "ports": listening_ports([os.getpid()]),
        "description": spark.sparkContext.getLocalProperty("spark.job.description"),
    }


def too_many_ports(workers: set[int], num_ports: int) -> bool:
    """True if the workers have more ports than before; new ones keep their last gang's group."""
    now = python_workers()
    return len(listening_ports(now)) > num_ports + len(now - workers)


@pytest.fixture(autouse=True)
def nothing_is_left(
    spark: SparkSession, local_dirs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Whatever a test does, nothing stays."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert all(folder.is_dir() for folder in local_dirs)
    before = left_behind(spark, local_dirs, temporary)
    workers = python_workers()
    num_ports = len(listening_ports(workers))
    yield
    deadline = time.monotonic() + 30  # a cancelled task, and its daemon, take a moment to end
    while time.monotonic() < deadline and (
        left_behind(spark, local_dirs, temporary) != before or too_many_ports(workers, num_ports)
    ):
        time.sleep(0.1)
    assert left_behind(spark, local_dirs, temporary) == before
    assert not too_many_ports(workers, num_ports)
    assert all(folder.is_dir() for folder in local_dirs)


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    spark.conf.set(f"spark.sparkdl.{name}", value)
    try:
        yield
    finally:
        spark.conf.unset(f"spark.sparkdl.{name}")


@dataclass
class Speak(Callback):
    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        print(f"epoch {state.epoch} as rank {state.rank} sees it")


@pytest.mark.slow
def test_a_fit(df: DataFrame, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(df, request(Speak(), verbose=2))
    assert digest(result) == expected
    assert not result.module.training
    assert result.num_classes == 3
    assert [(c.name, c.shape) for c in result.columns] == [("features", (3,))]
    summary = result.summary
    assert (summary.rows, summary.world_size, summary.restarts) == (ROWS, 2, 0)
    assert [record["epoch"] for record in summary.history] == [1, 2]
    assert len(summary.throughput_by_rank) == 2
    phases = summary.phase_seconds
    assert {"fit: preflight", "fit: spool", "fit: train"} <= set(phases)
    of_fit = [seconds for name, seconds in phases.items() if name.startswith("fit: ")]
    assert sum(of_fit) == pytest.approx(summary.seconds)
    assert min(of_fit) >= 0
    assert summary.weights_of is not None
    assert (summary.weights_of.values, summary.weights_of.best) == (summary.history[-1], None)
    assert not summary.weights_of.stopped_early
    lines = [line.strip() for line in capsys.readouterr().err.replace("\r", "\n").splitlines()]
    for rank in (0, 1):
        for epoch in (1, 2):
            assert lines.count(f"[rank {rank}] epoch {epoch} as rank {rank} sees it") == 1
    assert sum(line.startswith("epoch 2: loss ") for line in lines) == 1


@pytest.mark.slow
def test_one_worker_by_default(df: DataFrame) -> None:
    assert check_request(user_data(df), request(num_workers=None)).slots.num_workers == 1


class Unpicklable(Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_what_is_wrong_is_refused_before_any_job(spark: SparkSession, df: DataFrame) -> None:
    plain = request()
    metrics = replace(plain.config, metrics={"accuracy": BinaryAccuracy()})
    stopping = replace(plain.config, early_stopping=EarlyStopping())
    cases: list[tuple[FitRequest, type[Exception], str]] = [
        (
            request(num_workers=3),
            ClusterError,
            r"numWorkers=3 needs 3 free slots of 1 cpu .* has 2 ",
        ),
        (request(cpus_per_worker=1), ClusterError, "need stage-level scheduling, which local"),
        (request(feature_cols=("absent",)), DataError, '"absent" is not in the DataFrame; its col'),
        (
            request(feature_cols=("text",)),
            DataError,
            '"text" has type string and cannot become a tensor',
        ),
        (
            request(label_col="features"),
            DataError,
            '"features" has type array<float>.*a class is',
        ),
        (request(weight_col="absent"), DataError, '"absent" is not in the DataFrame'),
        (
            request(validation_col="weight"),
            DataError,
            '"weight" marks validation rows and must be',
        ),
        (request(module=dict), ConfigError, "it returned dict"),
        (
            request(Unpicklable()),
            ConfigError,
            "^callbacks cannot be sent to the workers: .*lock",
        ),
        (
            replace(plain, config=metrics),
            ConfigError,
            "computed on validation rows, and there are",
        ),
        (
            replace(plain, config=stopping),
            ConfigError,
            "monitors 'val_loss', but the history has only",
        ),
    ]
    before = num_jobs(spark)
    for asked, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            fit(df, asked)
        assert "\n" not in str(caught.value)
    with (
        setting(spark, "heartbeatTimeout", "soon"),
        pytest.raises(ConfigError, match="heartbeatTimeout has a wrong value"),
    ):
        fit(df, plain)
    assert num_jobs(spark) == before


def test_only_the_rows_tell_that_none_are_for_validation(df: DataFrame) -> None:
    from pyspark.sql import functions as F

    asked = request(validation_col="held")
    asked = replace(asked, config=replace(asked.config, early_stopping=EarlyStopping()))
    with pytest.raises(ConfigError, match=r'column "held" marks none of the \d+ rows for'):
        fit(df.withColumn("held", F.lit(False)), asked)


def test_a_checkpoint_directory_that_cannot_be_written(
    spark: SparkSession, df: DataFrame, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    before = num_jobs(spark)
    with pytest.raises(StorageError, match="file/below"):
        fit(df, request(directory=str(file / "below")))
    assert num_jobs(spark) == before


def test_a_checkpoint_directory_that_executors_do_not_share(df: DataFrame) -> None:
    with pytest.raises(StorageError, match=r"cannot be used from the executor on .*; choose a dir"):
        fit(df, request(directory="memory://only-in-the-driver"))


def test_a_cluster_that_cannot_run_a_gang(
    spark: SparkSession, df: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {
        "spark.network.crypto.enabled": "set spark.sparkdl.allowUnencrypted=true",
        "spark.io.encryption.enabled": "the spool lies in clear",
    }
    real, before = spark.conf.get, num_jobs(spark)
    for key, message in entries.items():

        def changed(_: Any, asked: str, key: str = key) -> str | None:
            return "true" if asked == key else real(asked, None)

        for module in (cluster_info, slots, user_data_module):
            monkeypatch.setattr(module, "conf", changed)
        with pytest.raises(ClusterError, match=message):
            fit(df, request())
    assert num_jobs(spark) == before


def test_labels_outside_the_classes(df: DataFrame) -> None:
    # Of the first shards, if the driver hears of them before all are written, else of all rows.
    message = r'"label" has (some|40) label\(s\) outside the 3 classes .*, 0 to 2 \((4 is|such as)'
    with pytest.raises(DataError, match=message):
        fit(df.selectExpr("features", "label * 2 AS label").orderBy("label"), request())


@pytest.mark.slow
def test_an_error_in_the_users_own_query_comes_once(
    df: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    from pyspark.sql import functions as F

    bad = df.withColumn("label", F.expr("CAST(text AS int) DIV (CAST(text AS int) - 7)"))
    with pytest.raises(DataError, match=r"DIVIDE_BY_ZERO.*try_divide"):
        fit(bad, request(max_restarts=3))
    said = [r.getMessage() for r in caplog.records if r.name.startswith("sparkdl")]
    assert not [text for text in said if "DIVIDE_BY_ZERO" in text or "restart" in text], said


@dataclass
class Break(Callback):
    """Fails on rank 1, while rank 0 is busy with something else."""

    seconds: float

    def on_step_end(self, state: CallbackState) -> None:
        if state.step < 2:
            return
        if state.rank == 1:
            raise ArithmeticError("the user's own mistake")
        time.sleep(self.seconds)


@pytest.mark.slow
def test_the_users_error_comes_once_and_soon_and_the_next_fit_works(
    df: DataFrame, expected: str
) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        fit(df, request(Break(60.0), max_restarts=3))
    assert time.monotonic() - began < 25
    error = caught.value
    assert (error.rank, error.error_type) == (1, "ArithmeticError")
    text = str(error)
    assert text.startswith("ArithmeticError on rank 1: the user's own mistake\n\nTraceback of rank")
    assert text.count("Traceback (most recent call last)") == 1
    assert 'raise ArithmeticError("the user\'s own mistake")' in text
    assert error.__cause__ is None
    assert digest(fit(df, request())) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_workers_can_host_the_channel_with_the_same_bits(
    spark: SparkSession, df: DataFrame, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with setting(spark, "channel", "workers"):
        result = fit(df, request())
    assert digest(result) == expected
    assert result.summary.world_size == 2
    assert "a restart would begin at step 0" in caplog.text


@pytest.mark.slow
def test_workers_can_host_the_channel_and_keep_checkpoints_elsewhere(
    spark: SparkSession, df: DataFrame, expected: str, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    with setting(spark, "channel", "workers"):
        assert digest(fit(df, request(directory=str(directory)))) == expected
        with pytest.raises(WorkerError, match="the user's own mistake"):
            fit(df, replace(request(Break(0), directory=str(tmp_path / "other"))))
    (run,) = directory.iterdir()
    assert any(run.iterdir())


@dataclass
class Linger(Callback):
    """Tells that training has begun, then takes its time."""

    marker: str

    def on_step_end(self, state: CallbackState) -> None:
        Path(self.marker).touch()
        time.sleep(30)


@pytest.mark.slow
def test_interrupting_a_fit_ends_it(df: DataFrame, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not marker.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        _thread.interrupt_main(signal.SIGINT)

    finger = threading.Thread(target=interrupt)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        fit(df, request(Linger(str(marker))))
    finger.join(timeout=10)
    assert marker.exists()
    assert time.time() - marker.stat().st_mtime < 20


@pytest.mark.slow
def test_interrupting_a_gang_that_is_about_to_begin_ends_it(df: DataFrame, expected: str) -> None:
    """Spark may not know of its job yet, and cancels active ones only."""

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if any(re.fullmatch(r"sparkdl-\w+-0", t.name) for t in threading.enumerate()):
                break
            time.sleep(0.001)
        pressed.append(time.monotonic())
        _thread.interrupt_main(signal.SIGINT)

    pressed: list[float] = []
    finger = threading.Thread(target=interrupt)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        fit(df, request(epochs=1_000_000))
    finger.join(timeout=10)
    assert time.monotonic() - pressed[0] < 20
    assert digest(fit(df, request())) == expected


def test_other_workers_and_their_other_steps_are_no_early_end(
    df: DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(df, request(directory=str(tmp_path), epochs=1))
    asked = request(directory=str(tmp_path), num_workers=1, verbose=1)
    summary = fit(df, asked).summary
    assert [record["epoch"] for record in summary.history] == [1, 2]
    assert summary.steps == 5 + 8  # where two epochs of the second fit have 16
    assert summary.weights_of is not None and not summary.weights_of.stopped_early
    assert "stopped early" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_goes_on_in_the_windows_in_which_it_was_begun(
    df: DataFrame, tmp_path: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_machine_of(memory_bytes: int, directory: str, epochs: int = 2) -> FitResult:
        def loads(spooled: Any, *_: Any) -> list[HostLoad]:
            size = sum(part.shard.num_bytes for part in spooled)
            return [HostLoad(num_shards=2, num_bytes=size, memory_bytes=memory_bytes)]

        with monkeypatch.context() as patch:
            patch.setattr("sparkdl.spark.frames.shard_table.host_loads", loads)
            # So small that the few rows of this test need several of them.
            patch.setattr("sparkdl.data.shuffle_windows._LEAST_WINDOW", 200)
            directory = str(tmp_path / directory)
            return fit(df, request(directory=directory, epochs=epochs))

    small = digest(on_a_machine_of(100, "small"))
    assert small != expected
    begun = on_a_machine_of(100, "moved", epochs=1).summary
    resumed = on_a_machine_of(1 << 30, "moved")
    assert digest(resumed) == small
    assert [record["epoch"] for record in resumed.summary.history] == [1, 2]
    assert resumed.summary.steps > resumed.summary.first_step == begun.steps > begun.first_step


@pytest.mark.slow
def test_the_users_windows(df: DataFrame, expected: str) -> None:
    wanted = request()
    windowed = replace(wanted.config, shuffle_window_bytes=200)
    assert digest(fit(df, replace(wanted, config=windowed))) != expected

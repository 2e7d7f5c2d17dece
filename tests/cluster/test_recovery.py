"""Whatever dies, training ends with the bits of the undisturbed run."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.config import CheckpointConfig, EarlyStopping, TrainConfig
from sparkdl.errors import TrainingFailed, WorkerError
from sparkdl.inference.classification import CLASSIFICATION
from tests.cluster import faults
from tests.cluster.processes import descendants, state_of, threads_left

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from torch import nn

    from sparkdl.spark.run.run import FitRequest, FitResult

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow]


def make_net() -> nn.Module:
    from torch import nn

    # Dropout: recovery must restore each rank's random generator as well.
    return nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))


def training_rows(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)]
    return spark.range(0, 1000, 1, 3).select(
        F.array(*features).alias("features"), (F.col("id") % 3).alias("label")
    )


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> DataFrame:
    return training_rows(cluster)


def request(*callbacks: Any, **changes: Any) -> FitRequest:
    from sparkdl.spark.run.run import FitRequest

    config = TrainConfig(
        task=CLASSIFICATION,
        loss="cross_entropy",
        optimizer="adam",
        learning_rate=0.01,
        epochs=3,
        batch_size=32,
        seed=7,
        callbacks=callbacks,
        checkpoint=changes.pop("checkpoint", CheckpointConfig(interval=5)),
    )
    values: dict[str, Any] = {
        "module": make_net,
        "config": config,
        "feature_cols": ("features",),
        "input_shapes": (None,),
        "label_col": "label",
        "weight_col": None,
        "validation_col": None,
        "num_workers": 2,
        "max_restarts": 3,
        "verbose": 0,
        "cpus_per_worker": None,
        "gpus_per_worker": None,
    }
    return FitRequest(**{**values, **changes})


def digest(result: FitResult) -> str:
    state = result.module.state_dict()
    data = b"".join(tensor.numpy().tobytes() for tensor in state.values())
    return hashlib.sha256(data).hexdigest()


def ended_or_stopped() -> set[int]:
    """Zombies and stopped processes below this one."""
    return {pid for pid in descendants(os.getpid()) if state_of(pid) in "TZ"}


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: SparkSession, local_dir: Path) -> Iterator[None]:
    """After every fit, good or bad: no spool, no persisted table, no thread, no stopped worker."""
    before = ended_or_stopped()
    yield
    assert threads_left() == []
    assert list(local_dir.rglob("sparkdl-*")) == []
    assert dict(cluster.sparkContext._jsc.getPersistentRDDs()) == {}  # type: ignore[union-attr]
    left = ended_or_stopped() - before
    until = time.monotonic() + 5
    while left and time.monotonic() < until:  # whoever ends is a zombie until its parent looks
        time.sleep(0.02)
        left &= ended_or_stopped()
    assert left == set()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("fault", "rank", "step"),
    [
        (faults.KillWorker, 1, 12),
        (faults.KillExecutor, 0, 12),
        (faults.StopWorker, 1, 12),
    ],
)
def test_a_lost_worker_changes_no_bit(
    df: DataFrame, undisturbed: str, tmp_path: Path,
    fault: Callable[..., faults.Fault], rank: int, step: int,
) -> None:  # fmt: skip
    from sparkdl.spark.fit.fit import fit

    marker = tmp_path / "struck"
    result = fit(df, request(fault(marker=str(marker), rank=rank, step=step)))
    assert marker.exists()
    assert result.summary.restarts == 1
    assert digest(result) == undisturbed
    assert [record["epoch"] for record in result.summary.history] == [1, 2, 3]


@pytest.mark.timeout(300)
def test_with_bits_any_number_of_workers_changes_none(
    cluster: SparkSession, df: DataFrame, tmp_path: Path
) -> None:
    """Three shards are trained by one worker; by two, then by the one that is left, then by two."""
    from sparkdl.spark.fit.fit import fit

    def found(*callbacks: Any, **changes: Any) -> tuple[FitResult, list[dict[str, float]]]:
        asked = request(*callbacks, num_shards=3, validation_fraction=0.1, **changes)
        config = replace(asked.config, elasticity="bits", early_stopping=EarlyStopping())
        result = fit(df, replace(asked, config=config))
        return result, [{**record, "seconds": 0.0} for record in result.summary.history]

    alone, history = found(num_workers=1)
    marker = tmp_path / "struck"
    fault = faults.KillExecutor(marker=str(marker), rank=1, step=12)
    cluster.conf.set("spark.sparkdl.elasticWait", "1")
    try:
        result, found_history = found(fault, faults.Slow(), min_workers=1)
    finally:
        cluster.conf.unset("spark.sparkdl.elasticWait")
    assert marker.exists()
    assert result.summary.restarts >= 1
    assert digest(result) == digest(alone)
    assert found_history == history


@pytest.mark.timeout(240)
def test_workers_lost_before_there_is_a_checkpoint_and_while_one_is_written(
    df: DataFrame, undisturbed: str, tmp_path: Path
) -> None:
    """The first one says nothing, and exits with status 0."""
    from sparkdl.spark.fit.fit import fit

    leave = faults.LeaveQuietly(marker=str(tmp_path / "left"), rank=0, step=1)
    kill = faults.KillWorkerSoon(
        marker=str(tmp_path / "struck"), rank=0, step=10, delay_seconds=0.002
    )
    checkpoint = CheckpointConfig(directory=str(tmp_path / "checkpoints"), interval=5)
    result = fit(df, request(leave, kill, faults.Slow(), checkpoint=checkpoint))
    assert result.summary.restarts == 2
    assert digest(result) == undisturbed


@pytest.mark.timeout(240)
def test_a_worker_stopped_while_it_spools(
    df: DataFrame, undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has held the fit for ever, as nobody listens to it."""
    from sparkdl.spark.fit.fit import fit
    from sparkdl.spark.frames import shard_table

    marker = tmp_path / "struck"
    monkeypatch.setattr(
        shard_table, "SpoolTask", partial(faults.StoppingSpoolTask, marker=str(marker))
    )
    began = time.monotonic()
    result = fit(df, request())
    assert marker.exists()
    assert digest(result) == undisturbed
    assert time.monotonic() - began < 120


@pytest.mark.timeout(240)
def test_a_worker_stopped_while_it_is_asked(
    df: DataFrame, undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended the fit after a while, as nobody listens to it."""
    from sparkdl.spark.cluster import probe
    from sparkdl.spark.fit.fit import fit

    marker = tmp_path / "struck"
    task = partial(faults.StoppingProbeTask, struck=str(marker))
    monkeypatch.setattr(probe, "ProbeTask", task)
    began = time.monotonic()
    result = fit(df, request())
    assert marker.exists()
    assert digest(result) == undisturbed
    assert time.monotonic() - began < 120


def stopping_once(marker: str, x: Any) -> Any:
    """What a model does with its rows first; on the driver, which tries it on zeros, nothing."""
    from pyspark import TaskContext

    if TaskContext.get() is not None:
        faults.stop_once(marker)
    return x


@pytest.mark.timeout(240)
def test_a_worker_stopped_while_it_predicts(df: DataFrame, tmp_path: Path) -> None:
    from sparkdl import TorchModel
    from sparkdl.data.plan import Column

    column = Column(name="features", role="feature", dtype="float32", shape=(3,))
    model = TorchModel(make_net(), [column])
    rows = model.transform(df).select("prediction").collect()
    marker = tmp_path / "struck"
    model.setPreprocessing(partial(stopping_once, str(marker)))
    assert model.transform(df).select("prediction").collect() == rows
    assert marker.exists()


@pytest.mark.timeout(240)
def test_too_many_losses_end_the_fit(df: DataFrame, tmp_path: Path) -> None:
    from sparkdl.spark.fit.fit import fit

    fault = faults.KillWorker(marker=str(tmp_path / "struck"), rank=0, step=3)
    with pytest.raises(TrainingFailed, match=r"failed once \(maxRestarts=0\).*lost"):
        fit(df, request(fault, max_restarts=0))


@pytest.mark.timeout(120)
def test_an_error_of_the_user_ends_the_fit_at_once(df: DataFrame, tmp_path: Path) -> None:
    from sparkdl.spark.fit.fit import fit

    fault = faults.Fail(marker=str(tmp_path / "struck"), rank=1, step=12)
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        fit(df, request(fault))
    assert time.monotonic() - began < 30
    assert caught.value.rank == 1
    assert caught.value.error_type == "ArithmeticError"
    assert "the user's own mistake" in str(caught.value)
    assert "in strike" in caught.value.worker_traceback


@pytest.mark.timeout(240)
def test_a_finished_run_is_not_trained_again_and_can_be_continued(
    df: DataFrame, undisturbed: str, tmp_path: Path
) -> None:
    from sparkdl.spark.fit.fit import fit

    checkpoint = CheckpointConfig(directory=str(tmp_path / "c"), interval=5)
    first = request(checkpoint=checkpoint)
    short = replace(first, config=replace(first.config, epochs=1))
    assert len(fit(df, short).summary.history) == 1
    result = fit(df, first)
    assert digest(result) == undisturbed
    assert [record["epoch"] for record in result.summary.history] == [1, 2, 3]
    again = fit(df, request(faults.Fail(marker=str(tmp_path / "never"), rank=0, step=1),
                            checkpoint=checkpoint))  # fmt: skip
    assert digest(again) == undisturbed
    assert not (tmp_path / "never").exists()

"""Fit in rounds as a whole: equal to a gang, repeatable, resumable, and nothing left behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torchmetrics
from pyspark import TaskContext
from torch import nn

from sparkdl.config import CUSTOM, CheckpointConfig, EarlyStopping, TrainConfig
from sparkdl.errors import ConfigError, TrainingDiverged, WorkerError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.inputs import Tensor, named
from sparkdl.spark.fit.check_request import choose_mode
from sparkdl.spark.fit.fit import fit
from sparkdl.spark.rounds import round_stages
from sparkdl.spark.run.run import FitRequest, FitResult
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.train.callbacks import Callback, CallbackState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang]

ROWS = 120
EVERY_3 = ParameterAveraging(averaging_period=3)


def make_net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def make_wide_net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 64, bias=False), nn.BatchNorm1d(64), nn.Linear(64, 3))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 17 - 8).cast("double") for k in (1, 5, 7)]
    return spark.range(0, ROWS, 1, 3).select(
        F.array(*features).alias("features"),
        (F.col("id") % 3).alias("label"),
        (F.col("id") % 5 == 0).alias("held_out"),
    )


def request(**changes: Any) -> FitRequest:
    config: dict[str, Any] = {
        "task": CLASSIFICATION,
        "loss": "cross_entropy",
        "optimizer": "adam",
        "learning_rate": 0.01,
        "epochs": 2,
        "batch_size": 8,
        "seed": 7,
        "sync_strategy": EVERY_3,
    }
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    config.update({name: changes.pop(name) for name in list(changes) if name in names})
    values: dict[str, Any] = {
        "module": make_net, "config": TrainConfig(**config), "feature_cols": ("features",),
        "input_shapes": (None,), "label_col": "label", "weight_col": None,
        "validation_col": None, "num_workers": 2, "max_restarts": 0, "verbose": 0,
        "cpus_per_worker": None, "gpus_per_worker": None,
    }  # fmt: skip
    return FitRequest(**{**values, **changes})


def states(result: FitResult) -> list[torch.Tensor]:
    return list(result.module.state_dict().values())


def equal(first: FitResult, second: FitResult) -> bool:
    return all(map(torch.equal, states(first), states(second)))


def assert_about_equal(first: FitResult, second: FitResult) -> None:
    """Weights and history agree but for the order of sums."""
    for mine, theirs in zip(states(first), states(second), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for record, other in zip(first.summary.history, second.summary.history, strict=True):
        assert record.keys() == other.keys()
        for key in record.keys() - {"seconds"}:
            assert record[key] == pytest.approx(other[key], abs=1e-12), key


class Note(Callback):
    """Counts what it sees on the driver."""

    seen: list[tuple[str, int]]

    def __init__(self) -> None:
        self.seen = []

    def on_train_begin(self, state: CallbackState) -> None:
        self.seen.append(("begin", state.step))

    def on_evaluation_end(self, state: CallbackState, record: Any) -> None:
        if record["epoch"] % 1:
            self.seen.append(("within", state.step))

    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        self.seen.append(("epoch", state.step))

    def on_train_end(self, state: CallbackState) -> None:
        self.seen.append(("end", state.step))


NOTE = Note()
WATCHED = {"validation_col": "held_out", "validation_interval": 4, "training_metrics": True}
"""Falls due within rounds, so each evaluation waits for the end of one."""


@pytest.fixture(scope="module")
def whole(df: DataFrame) -> FitResult:
    """A run that nothing disturbs."""
    return fit(df, request(**WATCHED, callbacks=(NOTE,)))


def test_rounds_are_what_a_gang_does(df: DataFrame, whole: FitResult) -> None:
    gang = fit(df, request(**WATCHED, execution_mode="gang"))
    assert_about_equal(whole, gang)
    inside = [r["steps"] for r in whole.summary.history if r["epoch"] < 1]
    assert inside and all(steps % 3 == 0 for steps in inside)
    assert all({"accuracy", "val_accuracy"} <= record.keys() for record in whole.summary.history)


@pytest.mark.slow
def test_rounds_reset_the_optimizer_as_a_gang_does(df: DataFrame) -> None:
    strategy = ParameterAveraging(averaging_period=3, average_optimizer_state=False)
    wanted = request(sync_strategy=strategy, epochs=1)
    rounds, gang = fit(df, wanted), fit(df, dataclasses.replace(wanted, execution_mode="gang"))
    assert_about_equal(rounds, gang)


@pytest.mark.slow
def test_rounds_read_windows_as_a_gang_does(df: DataFrame, whole: FitResult) -> None:
    wanted = request(validation_col="held_out", shuffle_window_bytes=200)
    rounds, gang = fit(df, wanted), fit(df, dataclasses.replace(wanted, execution_mode="gang"))
    assert_about_equal(rounds, gang)
    assert not equal(rounds, whole)


@pytest.mark.slow
def test_executors_take_the_mean_with_the_bits_of_the_driver(
    df: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more shards than slots."""
    wanted = request(module=make_wide_net, num_workers=7, epochs=1)
    first = fit(df, wanted)
    monkeypatch.setattr(round_stages, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(round_stages, "_MERGED_BYTES", 1 << 14)
    assert round_stages.num_merge_tasks(7, 1 << 13) == 4
    second = fit(df, wanted)
    assert equal(first, second)
    averaging = ParameterAveraging(averaging_period=3, compression="int8")
    compressed = fit(df, dataclasses.replace(wanted, config=dataclasses.replace(
        wanted.config, sync_strategy=averaging
    )))  # fmt: skip
    assert not equal(first, compressed)
    for mine, theirs in zip(states(first), states(compressed), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-3)
    assert first.summary.world_size == 7
    assert all(rate > 0 for rate in first.summary.throughput_by_rank)


@pytest.mark.slow
def test_a_run_goes_on_where_the_last_one_stopped(
    df: DataFrame, tmp_path: Path, whole: FitResult
) -> None:
    checkpoint = CheckpointConfig(directory=str(tmp_path), interval=4)
    kept = {**WATCHED, "checkpoint": checkpoint}
    stop = whole.summary.steps // 2 + 3  # the end of a round in the second epoch
    assert fit(df, request(**kept, max_steps=stop)).summary.steps == stop
    resumed = fit(df, request(**kept))
    assert equal(whole, resumed) and resumed.summary.first_step == stop
    for mine, theirs in zip(whole.summary.history, resumed.summary.history, strict=True):
        assert {**mine, "seconds": 0.0} == {**theirs, "seconds": 0.0}


SEVERAL_LABELS: dict[str, Any] = {
    "task": CUSTOM, "label_col": None, "loss": {"a": "cross_entropy", "b": "cross_entropy"},
    "labels": named({"a": Tensor("label"), "b": Tensor("label")}),
}  # fmt: skip


@pytest.mark.slow
def test_with_other_shards_the_epoch_begins_anew(
    df: DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = CheckpointConfig(directory=str(tmp_path), interval=4)
    options = {"checkpoint": checkpoint, **SEVERAL_LABELS}
    stopped = fit(df, request(**options, max_steps=11, epochs=2, num_workers=1))
    assert stopped.summary.history[-1]["epoch"] == 1
    resumed = fit(df, request(**options, epochs=2, num_workers=5))
    (warning,) = [text for text in caplog.messages if "the shards have changed" in text]
    assert "epoch 1 begins anew after 11 of its steps" in warning
    epochs = resumed.summary.history
    assert [record["epoch"] for record in epochs] == [1, 2]
    assert epochs[0]["steps"] == epochs[1]["steps"] < 11
    assert resumed.summary.steps == 11 + 2 * epochs[0]["steps"]


@pytest.mark.slow
def test_metrics_and_early_stopping_see_the_merged_model(df: DataFrame) -> None:
    metrics = {"accuracy": torchmetrics.classification.MulticlassAccuracy(3, average="micro")}
    stopping = EarlyStopping(monitor="val_accuracy", mode="max", patience=1)
    result = fit(
        df,
        request(
            validation_col="held_out", metrics=metrics, early_stopping=stopping, epochs=30,
            num_workers=3,
        ),
    )  # fmt: skip
    history = result.summary.history
    assert len(history) < 30
    best = max(record["val_accuracy"] for record in history)
    held_out = df.where("held_out").collect()
    features = torch.tensor([row["features"] for row in held_out], dtype=torch.float64)
    labels = torch.tensor([row["label"] for row in held_out])
    accuracy = (result.module(features).argmax(1) == labels).double().mean().item()
    assert accuracy == pytest.approx(best)
    weights = result.summary.weights_of
    assert weights is not None and weights.stopped_early and weights.planned_epochs == 30
    assert weights.values == next(entry for entry in history if entry["val_accuracy"] == best)
    assert history[-1]["val_accuracy"] <= best


def test_callbacks_of_epochs_run_on_the_driver(whole: FitResult) -> None:
    inside = [record for record in whole.summary.history if record["epoch"] % 1]
    assert sum(name == "within" for name, _ in NOTE.seen) == len(inside) > 0
    seen = [(name, step) for name, step in NOTE.seen if name != "within"]
    steps = [step for _, step in seen]
    assert [name for name, _ in seen] == ["begin", "epoch", "epoch", "end"]
    assert steps == [0, steps[1], 2 * steps[1], 2 * steps[1]]


@pytest.mark.slow
def test_few_rows_leave_shards_empty(df: DataFrame) -> None:
    few = df.limit(3)
    result = fit(few, request(num_workers=4, module=lambda: nn.Linear(3, 3).double()))
    assert result.summary.rows == 3
    assert all(tensor.isfinite().all() for tensor in states(result))


class Break(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and TaskContext.get() is not None:  # not on the driver, which tries it
            raise LookupError("no such layer")
        return self.linear(x)


@pytest.mark.slow
def test_the_users_error_comes_once_and_the_next_fit_works(df: DataFrame) -> None:
    with pytest.raises(WorkerError, match=r"LookupError on rank \d: no such layer"):
        fit(df, request(module=Break, max_restarts=3))
    assert fit(df, request(epochs=1)).summary.restarts == 0


@pytest.mark.slow
def test_divergence_ends_the_fit(df: DataFrame) -> None:
    with pytest.raises(TrainingDiverged, match="lower the learning rate"):
        fit(
            df,
            request(
                optimizer="sgd", learning_rate=1e9, loss="mse", task=REGRESSION,
                module=lambda: nn.Linear(3, 1).double(), epochs=20,
            ),
        )  # fmt: skip


def test_modes() -> None:
    assert choose_mode("auto", EVERY_3) == "rounds"
    assert choose_mode("gang", EVERY_3) == "gang"
    assert choose_mode("auto", AllReduce()) == "gang"
    with pytest.raises(ConfigError, match="AllReduce cannot run with executionMode='rounds': it"):
        choose_mode("rounds", AllReduce())
    assert choose_mode("rounds", ParameterAveraging(compression="int8")) == "rounds"
    for name in ("topk", "onebit", "powersgd"):
        with pytest.raises(ConfigError, match="no task keeps anything of its shard"):
            choose_mode("rounds", ParameterAveraging(compression=name))

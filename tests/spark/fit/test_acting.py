"""Callbacks that act, and LightningModules, in fits: in a gang, in rounds, and after a restart."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torchmetrics
from torch import nn

from sparkdl import Callback, ParameterAveraging, TorchRegressor
from sparkdl.errors import ConfigError
from sparkdl.train.callbacks import CallbackState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    x = F.array(*[((F.col("id") * k) % 7 - 3).cast("double") for k in (1, 2, 3)])
    held = (F.col("id") % 4 == 0).alias("held")
    return spark.range(0, 90, 1, 3).select(x.alias("features"), (x[0] - x[2]).alias("label"), held)


class Duck(nn.Module):
    """What a LightningModule has; Lightning itself takes long to import in workers."""

    log: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        self.mae = torchmetrics.MeanAbsoluteError()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: Any) -> torch.Tensor:
        output = self(batch[0]).squeeze(1)
        loss = (output - batch[1]).square().mean()
        self.mae(output, batch[1])
        self.log("mae", self.mae)
        self.log("own_loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", (self(batch[0]).squeeze(1) - batch[1]).abs().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Once(Callback):
    """Lowers the learning rate after each epoch, and stops after the third."""

    def on_epoch_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
        state.set_learning_rate(state.learning_rate / 2)
        if record["epoch"] == 3:
            state.stop()


def regressor(**params: Any) -> TorchRegressor:
    options: dict[str, Any] = {
        "epochs": 9, "batchSize": 8, "seed": 3, "numWorkers": 2, "validationIndicatorCol": "held",
    }  # fmt: skip
    return TorchRegressor(**{"module": Duck, "verbose": 0, **options, **params})


def shown(model: Any) -> list[dict[str, float]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in model.summary.history]


def test_rounds_log_and_act_as_a_gang_does(df: DataFrame) -> None:
    params = {"syncStrategy": ParameterAveraging(averaging_period=3), "callbacks": [Once()]}
    gang = regressor(executionMode="gang", **params).fit(df)
    rounds = regressor(executionMode="rounds", **params).fit(df)
    assert [record["learning_rate"] for record in shown(gang)] == [0.01, 0.005, 0.0025]
    for first, second in zip(shown(gang), shown(rounds), strict=True):
        assert first == pytest.approx(second, abs=1e-9)
        assert first["own_loss"] == pytest.approx(first["loss"])
        assert 0 < first["val_loss"] < 10
        assert first["mae"] > 0


class Slow(Callback):
    """Blocks rank 1 for longer than a worker may be silent."""

    def on_step_end(self, state: CallbackState) -> None:
        if state.rank == 1 and state.step == 1:
            time.sleep(5)


class Strike(Callback):
    """Kills rank 0 once, when the second checkpoint was asked for."""

    def __init__(self, folder: str) -> None:
        self.marker = f"{folder}/struck"

    def on_step_end(self, state: CallbackState) -> None:
        if state.rank == 0 and state.step == 11 and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Plan(Callback):
    """Counts its own steps, and acts by their number."""

    acts_every = 1

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, state: CallbackState) -> None:
        self.count += 1
        if self.count % 4 == 0:
            state.set_learning_rate(state.learning_rate * 0.8)
            state.save()
        if self.count == 17:
            state.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.fixture
def impatient(spark: SparkSession) -> Iterator[None]:
    spark.conf.set("spark.sparkdl.heartbeatTimeout", "3")
    yield
    spark.conf.unset("spark.sparkdl.heartbeatTimeout")


@pytest.mark.usefixtures("impatient")
def test_a_restart_changes_nothing_and_a_blocking_callback_is_no_hang(
    df: DataFrame, tmp_path: Path
) -> None:
    checkpoints = {"checkpointInterval": -1}
    calm = regressor(callbacks=[Plan(), Slow()], **checkpoints).fit(df)
    assert calm.summary.restarts == 0
    assert calm.summary.steps == 17
    struck = regressor(callbacks=[Plan(), Strike(str(tmp_path))], **checkpoints).fit(df)
    assert struck.summary.restarts == 1
    assert shown(struck) == shown(calm)
    for first, second in zip(struck.module.parameters(), calm.module.parameters(), strict=True):
        assert torch.equal(first, second)


class Hooked(Duck):
    def on_train_epoch_end(self) -> None:
        pass

    def optimizer_step(self) -> None:
        pass


def test_what_cannot_be_honoured_is_refused_before_any_job(df: DataFrame) -> None:
    with pytest.raises(ConfigError, match=r"Hooked.optimizer_step"):
        regressor(module=Hooked).fit(df)
    hooked = type("Hooked", (Duck,), {"on_train_epoch_end": Hooked.on_train_epoch_end})
    with pytest.raises(ConfigError, match=r"on_train_epoch_end.*executionMode='rounds'"):
        regressor(module=hooked(), syncStrategy=ParameterAveraging(), executionMode="rounds").fit(
            df
        )


def test_a_rank_that_asks_alone_ends_the_fit(df: DataFrame) -> None:
    class Alone(Callback):
        acts_every = 1

        def on_step_end(self, state: CallbackState) -> None:
            if state.rank == 1 and state.step == 2:
                state.stop()

    with pytest.raises(ConfigError, match=r"after step 2 rank . asked"):
        regressor(callbacks=[Alone()]).fit(df)

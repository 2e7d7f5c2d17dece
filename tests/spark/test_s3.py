"""Does a fit keep checkpoints and models on S3, although plain pyspark knows no S3?"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sparkdl import ParameterAveraging, TorchClassifier, TorchClassifierModel, TorchRegressor
from sparkdl.checkpoint.storage import open_storage
from sparkdl.errors import StorageError
from sparkdl.plan import Column
from tests.cluster import faults

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.classic]


def make_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    return spark.range(0, 60, 1, 2).select(
        F.array(F.col("id").cast("float")).alias("features"), (F.col("id") % 2).alias("label")
    )


def fitted(df: DataFrame, mode: str, *callbacks: Any, **params: Any) -> TorchClassifierModel:
    strategy = {"gang": "allreduce", "rounds": ParameterAveraging(averaging_period=2)}[mode]
    return TorchClassifier(
        module=make_net, syncStrategy=strategy, executionMode=mode, batchSize=10, epochs=3,
        seed=7, numWorkers=2, verbose=0, callbacks=list(callbacks), **params,
    ).fit(df)  # fmt: skip


def same_weights(one: TorchClassifierModel, other: TorchClassifierModel) -> bool:
    state = other.module.state_dict()
    return all(torch.equal(value, state[name]) for name, value in one.module.state_dict().items())


@pytest.mark.gang
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gang", "rounds"])
def test_checkpoints_and_resume(
    df: DataFrame, s3_url: str, tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    # In rounds Spark runs a lost task again, but not where it is its own executor, as here.
    strike = faults.KillWorker(marker=str(tmp_path / "struck"), rank=1, step=5)
    strikes = [strike] if mode == "gang" else []
    params: dict[str, Any] = {"checkpointDir": s3_url, "checkpointInterval": 2}
    with caplog.at_level(logging.INFO, "sparkdl"):
        model = fitted(df, mode, *strikes, **params)
        assert (tmp_path / "struck").exists() == bool(strikes)
        assert "by way of the driver" not in caplog.text  # workers have credentials of their own
        again = fitted(df, mode, **params)
    assert "going on from the checkpoint of step 12" in caplog.text
    assert same_weights(model, fitted(df, mode)) and same_weights(again, model)
    assert len(open_storage(s3_url).list("")) == 1  # no marker, no probe
    assert "a-secret-that-no-log-shows" not in caplog.text


def test_models(spark: SparkSession, s3_url: str) -> None:
    column = Column(name="features", role="feature", dtype="float32", shape=(1,))
    model = TorchClassifierModel(make_net(), [column], num_classes=2)
    model.save(f"{s3_url}/model")
    loaded = TorchClassifierModel.load(f"{s3_url}/model")
    assert same_weights(loaded, model) and loaded.uid == model.uid


def test_estimators_and_overwriting(spark: SparkSession, s3_url: str) -> None:
    estimator = TorchRegressor(module=make_net(), epochs=4)
    estimator.save(f"{s3_url}/estimator")
    assert TorchRegressor.load(f"{s3_url}/estimator").getEpochs() == 4
    with pytest.raises(StorageError, match=r"estimator already exists; use write\(\)\.overwrite"):
        estimator.save(f"{s3_url}/estimator")
    estimator.setEpochs(5).write().overwrite().save(f"{s3_url}/estimator")
    assert TorchRegressor.load(f"{s3_url}/estimator").getEpochs() == 5


def test_loading_what_is_not_there(spark: SparkSession, s3_url: str) -> None:
    with pytest.raises(StorageError, match=r"cannot read s3://tests/.*/absent/metadata/part-00000"):
        TorchRegressor.load(f"{s3_url}/absent")

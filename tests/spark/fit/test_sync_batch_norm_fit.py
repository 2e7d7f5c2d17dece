"""Fit with syncBatchNorm: BatchNorm layers talk while they train, and are plain ones afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.estimator import TorchClassifier
from sparkdl.model import TorchClassifierModel
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang]


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    # A third of the rows are equal, hence on one worker: the other runs out of rows first.
    number = F.when(F.col("id") % 3 == 0, 0).otherwise(F.col("id"))
    features = [((number * k) % 7 - 3).cast("float") for k in (1, 2, 3)]
    return spark.range(0, 60, 1, 2).select(
        F.array(*features).alias("features"), (number % 2).alias("label")
    )


def classifier(**params: Any) -> TorchClassifier:
    values = {
        "module": make_net,
        "numWorkers": 2,
        "batchSize": 8,
        "epochs": 2,
        "seed": 4,
        "verbose": 0,
        "maxRestarts": 0,
    }
    return TorchClassifier(**{**values, **params})


@pytest.mark.slow
def test_the_fitted_and_the_loaded_model_are_plain(df: DataFrame, tmp_path: Path) -> None:
    model = classifier(syncBatchNorm=True).fit(df)
    norm = model.module[1]
    assert type(norm) is nn.BatchNorm1d
    assert "forward" not in vars(norm)
    assert norm.num_batches_tracked == model.summary.steps
    assert list(model.module.state_dict()) == list(make_net().state_dict())
    own = classifier().fit(df).module
    assert not torch.equal(norm.running_mean, own[1].running_mean)

    model.write().overwrite().save(str(tmp_path / "model"))
    loaded = TorchClassifierModel.load(str(tmp_path / "model"))
    assert type(loaded.module[1]) is nn.BatchNorm1d
    for name, value in loaded.module.state_dict().items():
        assert torch.equal(value, model.module.state_dict()[name])
    probabilities = [m.transform(df).select("probability").collect() for m in (model, loaded)]
    assert probabilities[0] == probabilities[1]


def test_workers_that_train_apart_are_refused(df: DataFrame) -> None:
    estimator = classifier(syncBatchNorm=True, syncStrategy=ParameterAveraging(averaging_period=2))
    with pytest.raises(ConfigError, match="with ParameterAveraging they train apart"):
        estimator.fit(df)

"""Explain predicts what fit takes, within 30 %, as medians of several fits."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from torch import nn

from sparkdl.estimator import TorchClassifier
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

# Not part of make test: other programs on the machine would decide.
pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.bench, pytest.mark.timeout(600)]

TOLERANCE = 0.3
TRIES = 3
STRATEGIES: dict[str, Any] = {
    "all-reduce": AllReduce(),
    "averaging": ParameterAveraging(averaging_period=16),
}


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 16, 16)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def images(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    folder: Path = tmp_path_factory.mktemp("images") / "rows"
    generator = np.random.default_rng(0)
    rows = [
        (row.tolist(), int(label))
        for row, label in zip(
            generator.normal(size=(4096, 256)).astype("float32"),
            generator.integers(0, 10, 4096),
            strict=True,
        )
    ]
    frame = spark.createDataFrame(rows, "features array<float>, label int")
    frame.write.parquet(str(folder))
    return spark.read.parquet(str(folder))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_epochs_take_what_was_predicted(images: DataFrame, name: str, workers: int) -> None:
    estimator = TorchClassifier(
        module=make_net, optimizer="sgd", learningRate=0.01, batchSize=64, epochs=5,
        numWorkers=workers, syncStrategy=STRATEGIES[name], verbose=0, seed=1,
    )  # fmt: skip
    ratios = []
    for _ in range(TRIES):
        explanation = estimator.explain(images)
        row = next(row for row in explanation.scaling if row.workers == workers)
        history = estimator.fit(images).summary.history
        measured = statistics.median(record["seconds"] for record in history[1:])
        ratios.append(row.epoch_seconds / measured)
        if abs(statistics.median(ratios) - 1) <= TOLERANCE:
            break
    assert statistics.median(ratios) == pytest.approx(1, abs=TOLERANCE), ratios

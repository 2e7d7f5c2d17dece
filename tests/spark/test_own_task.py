from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pytest
import torch
from pyspark.sql import SparkSession
from sklearn import metrics
from torch import nn

from sparkdl import TorchRegressor
from sparkdl.config import Task
from sparkdl.errors import ConfigError
from sparkdl.inference.evaluate_rows import Part
from sparkdl.model import TorchRegressorModel
from sparkdl.train.objective.loss import CLASS_LOSSES

pytestmark = pytest.mark.spark


@dataclass(frozen=True)
class Ordered:
    """Measures of grades: how many are right, and how many next to right."""

    accuracy: float
    close: float

    def measures(self) -> dict[str, float]:
        return {"accuracy": self.accuracy, "close": self.close}

    def tables(self) -> dict[str, Any]:
        return {}

    def lines(self, loss: float, *, width: int = 0) -> list[str]:
        return [f"{'close':<{width}} {self.close:.3f}"]


@dataclass(frozen=True)
class Grades(Task):
    """Whole numbers in an order, of which the module gives one that is rounded."""

    name = "grades"
    has_one_label = True
    labels = "classes"
    default_metrics = ("mae",)
    compares = frozenset({"numbers"})

    def check_loss(self, loss: Any) -> None:
        if isinstance(loss, CLASS_LOSSES):
            raise ConfigError(f"grades are in an order, which {type(loss).__name__} ignores")

    def compared(
        self, output: torch.Tensor, target: torch.Tensor, predictions: Callable[[Any], Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return output.round(), target

    def add_rows(
        self,
        part: Part,
        predicted: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor,
        ignored: int,
    ) -> None:
        distance = (predicted.flatten().round() - target.flatten()).abs()
        part.add("weight", float(weights.sum()))
        part.add("right", float(weights[distance == 0].sum()))
        part.add("close", float(weights[distance <= 1].sum()))

    def scores(self, part: Part) -> Ordered | None:
        weight = part.sums["weight"]
        if not weight:
            return None
        return Ordered(part.sums["right"] / weight, part.sums["close"] / weight)


class GradesModel(TorchRegressorModel):
    """Predicts a grade."""

    _task = Grades()


class GradesEstimator(TorchRegressor):
    """Trains a module that gives a grade."""

    _task = Grades()
    _model_class = GradesModel


@pytest.mark.slow
def test_a_new_kind_of_label_is_a_task_and_two_classes(spark: SparkSession) -> None:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grades = (x.sum(1) * 1.5 + 3).round().clamp(0, 6).long()
    table = pd.DataFrame(
        {"features": x.tolist(), "label": grades.tolist(), "w": [1.0, 3.0] * 30,
         "held": [True, False, False] * 20}
    )  # fmt: skip
    df = spark.createDataFrame(table)
    estimator = GradesEstimator(
        module=lambda: nn.Linear(2, 1), numWorkers=2, epochs=20, batchSize=8, learningRate=0.1,
        optimizer="adam", validationIndicatorCol="held",
    )  # fmt: skip
    model = estimator.fit(df)
    assert isinstance(model, GradesModel)
    shown = model.transform(df).toPandas()
    given = shown["prediction"].round()
    distance = (given - shown["label"]).abs()
    last = model.summary.history[-1]
    assert last["val_mae"] == pytest.approx(distance[shown["held"]].mean(), abs=1e-6)
    assert "val_accuracy" not in last
    found = model.evaluate(df, weightCol="w")
    right = metrics.accuracy_score(shown["label"], given, sample_weight=shown["w"])
    assert found["accuracy"] == pytest.approx(right, abs=1e-12)
    close = metrics.accuracy_score(distance <= 1, [True] * 60, sample_weight=shown["w"])
    assert found["close"] == pytest.approx(close, abs=1e-12)
    assert 0.3 < right < close
    assert f"{close:.3f}" in str(found)


def test_its_task_says_which_losses_fit(spark: SparkSession) -> None:
    estimator = GradesEstimator(module=nn.Linear(2, 1), loss="cross_entropy")
    with pytest.raises(ConfigError, match="grades are in an order"):
        estimator.fit(spark.createDataFrame([([0.0, 1.0], 2)], "features array<double>, label int"))

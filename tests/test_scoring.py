from __future__ import annotations

from typing import Any

import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn import metrics
from torch import nn

from sparkdl.errors import ConfigError, DataError
from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
from sparkdl.plan import Column
from sparkdl.scores import ClassificationScores, RegressionScores
from sparkdl.scoring import score

pytestmark = pytest.mark.spark

X = Column(name="x", role="feature", dtype="float32", shape=(2,))


def classifier() -> TorchClassifierModel:
    """Predicts class 1 where the second number is the larger one."""
    return TorchClassifierModel(nn.Identity(), [X], num_classes=2)


def regressor() -> TorchRegressorModel:
    """Predicts the sum of both numbers."""
    layer = nn.Linear(2, 1, bias=False)
    nn.init.ones_(layer.weight)
    return TorchRegressorModel(layer, [X])


@pytest.fixture
def rows(spark: SparkSession) -> DataFrame:
    values = [
        ([1.0, 0.0], 0, 1.0),
        ([0.0, 2.0], 1, 2.0),
        ([3.0, 1.0], 1, 0.5),
        ([0.0, 1.0], 1, 1.0),
    ]
    return spark.createDataFrame(values, "x array<float>, label int, weight double")


@pytest.mark.parametrize("weight_col", [None, "weight"])
def test_a_classifier_is_scored_as_scikit_learn_does(
    rows: DataFrame, weight_col: str | None
) -> None:
    scores = score(classifier(), rows, "label", weight_col)
    assert isinstance(scores, ClassificationScores)
    table = rows.toPandas()
    weights = None if weight_col is None else table[weight_col]
    logits = torch.tensor([list(pair) for pair in table["x"]])
    accuracy = metrics.accuracy_score(table["label"], logits.argmax(1), sample_weight=weights)
    log_loss = metrics.log_loss(
        table["label"], logits.double().softmax(1).numpy(), sample_weight=weights
    )
    assert scores.accuracy == pytest.approx(accuracy)
    assert scores.log_loss == pytest.approx(log_loss, abs=1e-6)


def test_a_label_that_the_model_does_not_know_counts_as_wrong(rows: DataFrame) -> None:
    scores = score(classifier(), rows.selectExpr("x", "label + 5 AS label"), "label", None)
    assert isinstance(scores, ClassificationScores)
    assert scores.accuracy == 0
    assert scores.log_loss is not None
    assert 30 < scores.log_loss < 40


def test_a_classifier_without_probabilities_has_no_log_loss(rows: DataFrame) -> None:
    scores = score(classifier().setProbabilityCol(""), rows, "label", None)
    assert isinstance(scores, ClassificationScores)
    assert scores.log_loss is None


@pytest.mark.parametrize("weight_col", [None, "weight"])
def test_a_regressor_is_scored_as_scikit_learn_does(
    rows: DataFrame, weight_col: str | None
) -> None:
    scores = score(regressor(), rows, "label", weight_col)
    assert isinstance(scores, RegressionScores)
    table = rows.toPandas()
    weights = None if weight_col is None else table[weight_col]
    predictions = [sum(pair) for pair in table["x"]]
    arguments = (table["label"], predictions)
    assert scores.r2 == pytest.approx(metrics.r2_score(*arguments, sample_weight=weights))
    assert scores.mae == pytest.approx(
        metrics.mean_absolute_error(*arguments, sample_weight=weights)
    )
    assert scores.rmse == pytest.approx(
        metrics.root_mean_squared_error(*arguments, sample_weight=weights)
    )


@pytest.mark.parametrize(
    ("label", "message"),
    [("1.5D", "label 1.5: no class number"), ("-1", "label -1.0"), ("NULL", "has null labels")],
)
def test_wrong_labels_are_named(rows: DataFrame, label: str, message: str) -> None:
    wrong = rows.selectExpr("x", f"CAST({label} AS DOUBLE) AS label")
    with pytest.raises(DataError, match=message):
        score(classifier(), wrong, "label", None)


def test_a_missing_label_column_is_named(rows: DataFrame) -> None:
    with pytest.raises(DataError, match=r'"digit" is not in the DataFrame; .*: x, label, weight'):
        score(classifier(), rows, "digit", None)


@pytest.mark.parametrize("make", [classifier, regressor])
def test_names_may_have_dots(rows: DataFrame, make: Any) -> None:
    plain = score(make(), rows, "label", "weight")
    names = {"label": "the.label", "weight": "the.weight", "x": "the.x"}
    model = make().setFeaturesCol("the.x").setPredictionCol("the.prediction")
    if make is classifier:
        model.setProbabilityCol("the.probability")
    dotted = rows.withColumnsRenamed(names)
    assert score(model, dotted, "the.label", "the.weight") == plain


def test_a_model_without_a_common_measure_is_refused(rows: DataFrame) -> None:
    with pytest.raises(ConfigError, match="a TorchModel cannot be evaluated"):
        score(TorchModel(nn.Identity(), [X]), rows, "label", None)


def test_no_rows_are_an_error(rows: DataFrame) -> None:
    for model in (classifier(), regressor()):
        with pytest.raises(DataError, match="no rows to evaluate"):
            score(model, rows.limit(0), "label", None)

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torchmetrics
from pyspark import TaskContext
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn import metrics
from torch import nn
from torchmetrics import classification

from sparkdl.data.plan import Column
from sparkdl.errors import ClusterError, ConfigError, DataError
from sparkdl.inference import evaluate_rows
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.evaluate_rows import Evaluator, Measures, Part
from sparkdl.inference.outputs import Output
from sparkdl.inference.scores import ClassificationScores, RegressionScores
from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
from sparkdl.spark.inference import evaluate_model
from sparkdl.spark.inference.evaluate_task import AddTask

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


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    values = [
        ([1.0, 0.0], 0, 1.0),
        ([0.0, 2.0], 1, 2.0),
        ([3.0, 1.0], 1, 0.5),
        ([0.0, 1.0], 1, 1.0),
    ]
    return spark.createDataFrame(values, "x array<float>, label int, weight double")


def test_a_classifier_is_evaluated_as_scikit_learn_does(rows: DataFrame) -> None:
    found = classifier().evaluate(rows, weightCol="weight")
    assert isinstance(found.scores, ClassificationScores)
    table = rows.toPandas()
    weights = table["weight"]
    logits = torch.tensor([list(pair) for pair in table["x"]])
    chances = logits.double().softmax(1).numpy()
    accuracy = metrics.accuracy_score(table["label"], logits.argmax(1), sample_weight=weights)
    log_loss = metrics.log_loss(table["label"], chances, sample_weight=weights)
    area = metrics.roc_auc_score(table["label"], chances[:, 1], sample_weight=weights)
    assert found["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert found["log_loss"] == pytest.approx(log_loss, abs=1e-12)
    assert found["loss"] == pytest.approx(log_loss, abs=1e-6)
    assert found["roc_auc"] == pytest.approx(area, abs=1e-12)
    assert found.rows == 4


@pytest.mark.slow
def test_a_regressor_is_evaluated_as_scikit_learn_does(rows: DataFrame) -> None:
    found = regressor().evaluate(rows, weightCol="weight")
    assert isinstance(found.scores, RegressionScores)
    table = rows.toPandas()
    weights = table["weight"]
    arguments = (table["label"], [sum(pair) for pair in table["x"]])
    squared = metrics.mean_squared_error(*arguments, sample_weight=weights)
    absolute = metrics.mean_absolute_error(*arguments, sample_weight=weights)
    r2 = metrics.r2_score(*arguments, sample_weight=weights)
    assert found["loss"] == pytest.approx(squared, abs=1e-12)
    assert found["rmse"] == pytest.approx(math.sqrt(squared), abs=1e-12)
    assert found["mae"] == pytest.approx(absolute, abs=1e-12)
    assert found["r2"] == pytest.approx(r2, abs=1e-12)


@pytest.fixture(scope="module")
def many(spark: SparkSession) -> DataFrame:
    generator = np.random.default_rng(0)
    features = generator.normal(size=(400, 4)).tolist()
    labels = generator.integers(0, 3, 400).astype(float).tolist()
    rows = [(i, *values) for i, values in enumerate(zip(features, labels, strict=True))]
    return spark.createDataFrame(rows, "id int, features array<double>, label double")


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [3, 21])
def test_partitions_and_batches_do_not_matter(many: DataFrame, partitions: int) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 3).double()
    column = Column(name="features", role="feature", dtype="float64", shape=(4,))
    model = TorchClassifierModel(module, [column], num_classes=3)
    wanted = {
        "f1": classification.MulticlassF1Score(3),
        "auroc": classification.MulticlassAUROC(3),
        "matrix": lambda: classification.MulticlassConfusionMatrix(3),
    }
    cut = many.repartition(partitions, "id")  # of 21 partitions one is without rows at least
    found = model.evaluate(cut, metrics=wanted, curves=True, batchSize=7 * partitions)
    table = many.toPandas()
    features = torch.tensor(np.stack(table["features"].to_list()))
    labels = torch.tensor(table["label"].to_numpy()).long()
    with torch.no_grad():
        logits = module(features)
    chances = logits.softmax(1)
    losses = nn.functional.cross_entropy(logits, labels, reduction="none").tolist()
    assert found["loss"] == pytest.approx(math.fsum(losses) / len(losses), abs=1e-12)
    for name in ("f1", "auroc"):
        metric: Any = wanted[name]
        expected = float(metric.clone().set_dtype(torch.float64)(chances, labels))
        assert found[name] == pytest.approx(expected, abs=1e-12)
    confusion = metrics.confusion_matrix(labels, logits.argmax(1))
    assert found["matrix"] == confusion.tolist()
    ours = [[found.confusion[i].get(j, 0.0) for j in range(3)] for i in range(3)]
    np.testing.assert_array_equal(ours, confusion)
    for number in range(3):
        area = metrics.roc_auc_score(labels == number, chances[:, number])
        assert found.curves[number].roc_auc == pytest.approx(area, abs=1e-12)


@pytest.mark.slow
def test_any_model_has_a_loss_and_metrics(rows: DataFrame) -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"copy": x, "sum": x.sum(1)}

    def of_copy(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return (output["copy"] - target + 1).square()

    class Sums(torchmetrics.MeanMetric):
        def update(self, output: dict[str, torch.Tensor], target: torch.Tensor) -> None:
            super().update(output["sum"])

    model = TorchModel(Pair(), [X])
    found = model.evaluate(rows, loss=of_copy, metrics=[Sums()], weightCol="weight")
    assert dict(found) == {"loss": 1.0, "Sums": 2.0}
    assert found.scores is None
    autoencoder = TorchModel(nn.Identity(), [X])
    assert autoencoder.evaluate(rows)["loss"] == 0


@pytest.mark.slow
def test_the_prediction_is_that_of_transform(rows: DataFrame) -> None:
    class Answer(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": x}

    def first(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output["logits"], target, reduction="none")

    def swapped(output: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"logits": output["logits"].flip(1)}

    plain = classifier().evaluate(rows)
    model = TorchClassifierModel(Answer(), [X], num_classes=2)
    model.setPredictionOutput("logits").setPostprocessing(swapped)
    found = model.evaluate(rows, loss=first)
    assert found["loss"] == plain["loss"]
    assert found["accuracy"] == 1 - plain["accuracy"]
    model.setPredictionOutput(Output(layer="x"))
    with pytest.raises(ConfigError, match="set it without layer"):
        model.evaluate(rows, loss=first)


@pytest.mark.slow
def test_a_label_that_the_model_does_not_know_counts_as_wrong(rows: DataFrame) -> None:
    found = classifier().evaluate(rows.selectExpr("x", "label + 5 AS label"))
    assert found["accuracy"] == 0
    assert found["loss"] == math.inf
    assert 30 < found["log_loss"] < 40


@pytest.mark.slow
def test_wrong_labels_are_named(rows: DataFrame) -> None:
    wrong = rows.selectExpr("x", "CAST(1.5 AS DOUBLE) AS label")
    with pytest.raises(DataError, match=r'"label" must hold whole, .* \(first: 1\.5 in row 0'):
        classifier().evaluate(wrong)


def test_checks_before_any_job(rows: DataFrame) -> None:
    with pytest.raises(DataError, match=r'"digit" is not in the DataFrame; .*: x, label, weight'):
        classifier().evaluate(rows, labelCol="digit")
    with pytest.raises(ConfigError, match="labelCol is not set"):
        classifier().evaluate(rows, labelCol="")
    with pytest.raises(ConfigError, match="cannot be called 'accuracy'"):
        metric = classification.BinaryAccuracy
        classifier().evaluate(rows, metrics={"accuracy": metric})
    with pytest.raises(ConfigError, match="unknown loss"):
        classifier().evaluate(rows, loss="nothing")
    with pytest.raises(ConfigError, match="only classifiers have curves"):
        regressor().evaluate(rows, curves=True)
    with pytest.raises(TypeError, match="did you mean 'labelCol'"):
        regressor().evaluate(rows, labelcol="y")


@pytest.mark.slow
def test_names_may_have_dots(rows: DataFrame) -> None:
    plain = regressor().evaluate(rows, weightCol="weight")
    dotted = rows.withColumnsRenamed({"label": "the.label", "weight": "the.weight", "x": "the.x"})
    model = regressor().setFeaturesCol("the.x")
    found = model.evaluate(dotted, labelCol="the.label", weightCol="the.weight")
    assert dict(found) == dict(plain)


def test_no_rows_are_an_error(rows: DataFrame) -> None:
    with pytest.raises(DataError, match="no rows to evaluate"):
        classifier().evaluate(rows.limit(0))


class Crashes(nn.Module):
    """Ends the process of the task."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if TaskContext.get() is not None:
            os._exit(1)
        return x


def test_a_lost_worker_is_told_without_stacks(rows: DataFrame) -> None:
    model = TorchClassifierModel(Crashes(), [X], num_classes=2)
    told = r"evaluate failed: a worker or executor was lost \(.*spark.executor.memoryOverhead"
    with pytest.raises(ClusterError, match=told) as caught:
        model.evaluate(rows)
    assert "\tat " not in str(caught.value)


def test_each_row_has_its_loss(rows: DataFrame) -> None:
    found = classifier().scores(rows, "x", "label", scoreCol="cost").collect()
    assert list(found[0].asDict()) == ["x", "label", "cost"]
    logits = torch.tensor([list(row["x"]) for row in found])
    labels = torch.tensor([row["label"] for row in found])
    expected = nn.functional.cross_entropy(logits, labels, reduction="none")
    np.testing.assert_allclose([row["cost"] for row in found], expected, rtol=1e-6)
    ignoring = nn.CrossEntropyLoss(ignore_index=0)
    some = classifier().scores(rows, "label", loss=ignoring).collect()
    assert [row["loss"] is None for row in some] == [row["label"] == 0 for row in some]


@pytest.mark.slow
def test_scores_beside_vectors_over_files(spark: SparkSession, tmp_path: Path) -> None:
    data = [(i, Vectors.dense(i, 1.0), float(i)) for i in range(5)]
    spark.createDataFrame(data, ["id", "x", "label"]).write.parquet(str(tmp_path / "in"))
    files = spark.read.parquet(str(tmp_path / "in"))
    scored = regressor().scores(files)
    assert scored.columns == ["id", "x", "label", "loss"]
    worst = scored.orderBy(F.desc("loss"), "id").first()
    assert worst is not None
    assert worst["loss"] == 1.0
    assert regressor().evaluate(files)["loss"] == 1.0
    assert TorchModel(nn.Identity(), [X]).scores(files, "id").groupBy().max("loss").first() == (0,)


def test_scores_of_rows_with_two_columns_of_one_name(rows: DataFrame) -> None:
    twice = rows.select("x", "label", F.lit(1).alias("twice"), F.lit(2).alias("twice"))
    scored = classifier().scores(twice)
    assert scored.columns == ["x", "label", "twice", "twice", "loss"]
    assert all(row[2:4] == (1, 2) and row[4] >= 0 for row in scored.collect())


def test_scores_are_checked(rows: DataFrame) -> None:
    with pytest.raises(DataError, match='"absent" is not in the DataFrame'):
        classifier().scores(rows, "absent")
    with pytest.raises(DataError, match='"weight" is in the DataFrame already'):
        classifier().scores(rows, scoreCol="weight")

    def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.sum(1) - target).abs().mean()

    with pytest.raises(Exception, match="let it return the loss of each sample"):
        TorchModel(nn.Identity(), [X]).scores(rows, loss=mean, labelCol="label").collect()


@pytest.mark.slow
def test_rows_that_all_have_weight_0_are_told(rows: DataFrame) -> None:
    with pytest.raises(DataError, match="no row counts: all have weight 0"):
        classifier().evaluate(rows.withColumn("weight", F.lit(0.0)), weightCol="weight")


def test_tasks_that_add_up_refuse_states_that_are_too_large_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measures = Measures(
        task=CLASSIFICATION, loss="cross_entropy", num_classes=2,
        metrics={"auroc": classification.MulticlassAUROC(2)}, curves=(1,),
    )  # fmt: skip
    rows, sizes = [], set()
    for _ in range(3):
        evaluator = Evaluator(measures, torch.device("cpu"))
        logits, labels = torch.randn(3, 2), torch.tensor([0, 1, 1])
        evaluator.update(logits, logits, labels, None, 3)
        part = evaluator.part()
        sizes.add(part.listed_bytes()["auroc"])
        rows.append({"part": 0, "payload": part.to_bytes()})
    (size,) = sizes
    unpacked: list[bytes] = []
    unpack = Part.from_bytes

    def counted(data: bytes) -> Part:
        unpacked.append(data)
        return unpack(data)

    monkeypatch.setattr(Part, "from_bytes", counted)
    batch = pa.RecordBatch.from_pylist(rows)
    errors = []
    for most in (3 * size, size):
        monkeypatch.setattr(evaluate_rows, "MOST_LISTED_BYTES", most)
        (row,) = next(AddTask(measures)(iter([batch]))).to_pylist()
        errors.append(unpack(row["payload"]).error)
    assert errors[0] is None
    assert errors[1] is not None and errors[1][0] == "ConfigError"
    assert "'auroc' keeps something" in errors[1][1]
    assert len(unpacked) == 3 + 2  # the third was not even looked at


@pytest.mark.slow
def test_the_driver_gets_states_of_metrics_as_one_part(
    many: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    add = evaluate_model.united

    def counted(parts: Any, measures: Measures) -> Part:
        given = list(parts)
        seen.append(len(given))
        return add(given, measures)

    monkeypatch.setattr(evaluate_model, "united", counted)
    column = Column(name="features", role="feature", dtype="float64", shape=(4,))
    model = TorchClassifierModel(nn.Linear(4, 3).double(), [column], num_classes=3)
    auroc = {"auroc": classification.MulticlassAUROC(3)}
    model.evaluate(many.repartition(5), metrics=auroc)
    model.evaluate(many.repartition(5))
    assert seen[0] == 1 and 1 <= seen[1] <= 5

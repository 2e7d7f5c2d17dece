from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator import TorchClassifier, TorchEstimator, TorchRegressor
from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
from sparkdl.spark.frames.shard_table import ShardTable
from sparkdl.spark.params.param_table import INFERENCE_BATCH_SIZE

pytestmark = [
    pytest.mark.spark,
    pytest.mark.gang,
]


def make_classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))


def make_line() -> nn.Module:
    return nn.Linear(2, 1)


@pytest.fixture(scope="module")
def points(spark: SparkSession) -> DataFrame:
    """Two inputs, a class that tells their sum's sign, and a linear target."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 2)).tolist()
    rows = [(i, a, b, float(a + b > 0), 2 * a - b) for i, (a, b) in enumerate(x)]
    df = spark.createDataFrame(rows, "id int, a double, b double, label double, target double")
    return df.withColumn("features", F.array("a", "b")).repartition(2).cache()


def classifier(**params: Any) -> TorchClassifier:
    defaults = {
        "module": make_classifier, "learningRate": 0.05, "epochs": 5, "batchSize": 20,
        "numWorkers": 1, "seed": 1, "verbose": 0,
    }  # fmt: skip
    return TorchClassifier(**{**defaults, **params})


@pytest.mark.slow
def test_fit_and_transform(points: DataFrame) -> None:
    model = classifier(numWorkers=2, epochs=8).fit(points)
    assert isinstance(model, TorchClassifierModel)
    out = model.transform(points)
    assert out.where("prediction = label").count() > 180
    assert model.numClasses == 2
    assert not model.module.training
    assert len(model.summary.history) == 8
    assert model.summary.world_size == 2
    assert model.summary.rows == 200


@pytest.mark.slow
def test_a_pandas_frame_is_taken(points: DataFrame) -> None:
    rows = points.toPandas()
    model = classifier().fit(rows)
    assert model.summary.rows == 200
    out = model.transform(rows)
    assert out.columns[: len(rows.columns)] == list(rows.columns)
    assert out.where("prediction = label").count() > 150
    assert model.evaluate(rows)["accuracy"] > 0.75
    rows["features"] = [1, "two"] * 100
    with pytest.raises(DataError, match="values of one type that Arrow and Spark know"):
        model.transform(rows)
    with pytest.raises(ConfigError, match="a model takes a DataFrame of Spark or pandas; received"):
        model.transform([1.0])


@pytest.mark.slow
def test_the_model_takes_over_columns_but_not_the_training_batch_and_leaves_the_module(
    points: DataFrame,
) -> None:
    torch.manual_seed(0)
    module = make_classifier()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    estimator = classifier(
        module=module, epochs=1, predictionCol="p", probabilityCol="", inputCols=["features"]
    )
    model = estimator.fit(points)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert model.module is not module
    assert model.uid == estimator.uid
    assert model.getInputCols() == ["features"]
    assert model.transform(points).columns == [*points.columns, "p", "rawPrediction"]
    assert model.getBatchSize() == INFERENCE_BATCH_SIZE


@pytest.mark.slow
def test_regressor_learns_a_line(points: DataFrame) -> None:
    regressor = TorchRegressor(
        module=make_line, labelCol="target", learningRate=0.1, epochs=10, batchSize=20,
        numWorkers=1, verbose=0,
    )  # fmt: skip
    model = regressor.fit(points)
    assert isinstance(model, TorchRegressorModel)
    error = RegressionEvaluator(labelCol="target").evaluate(model.transform(points))
    assert error < 0.1


@pytest.mark.slow
def test_evaluate_repeats_the_validation_of_training(points: DataFrame) -> None:
    rows = points.withColumn("held_out", F.col("id") % 4 == 0).withColumn("w", F.col("id") % 3)
    regressor = TorchRegressor(
        module=make_line, labelCol="target", weightCol="w", loss="l1", epochs=1, numWorkers=2,
        validationIndicatorCol="held_out", verbose=0, metrics=["MAPE", "r2"],
    )  # fmt: skip
    model = regressor.fit(rows)
    found = model.evaluate(rows.where("held_out"), metrics=["mape", "mse"])
    last = model.summary.history[-1]
    assert {"val_mape", "val_r2"} < set(last)
    assert found["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert found["mape"] == pytest.approx(last["val_mape"], rel=1e-5)
    assert found["mse"] > 0
    assert found.rows == 50


@pytest.mark.slow
def test_drawn_validation_rows_are_always_the_same(points: DataFrame) -> None:
    still = {"learningRate": 1e-30, "epochs": 1, "validationFraction": 0.25}
    one = classifier(**still).fit(points).summary
    two = classifier(**still, numWorkers=2, metrics=["f1", "AUROC"]).fit(points.coalesce(1)).summary
    assert 30 < one.validation_rows == two.validation_rows < 70
    assert one.rows + one.validation_rows == 200
    first, second = one.history[0], two.history[0]
    assert first["val_loss"] == pytest.approx(second["val_loss"], rel=1e-6)
    assert 0 <= first["val_accuracy"] <= 1
    assert {"val_f1", "val_auroc"} < set(second) and "val_accuracy" not in second


@pytest.mark.slow
def test_estimator_without_label_reconstructs_its_inputs(points: DataFrame) -> None:
    estimator = TorchEstimator(
        module=nn.Linear(2, 2), epochs=10, learningRate=0.1, batchSize=20, numWorkers=1, verbose=0
    )
    model = estimator.fit(points)
    assert type(model) is TorchModel
    rows = model.transform(points).select("features", "prediction").collect()
    np.testing.assert_allclose(
        [row["prediction"] for row in rows], [row["features"] for row in rows], atol=0.3
    )


@pytest.mark.slow
def test_param_maps(points: DataFrame) -> None:
    estimator = classifier(epochs=1)
    maps = [{estimator.epochs: 1}, {estimator.epochs: 2, estimator.predictionCol: "p"}]
    one, two = estimator.fit(points, maps)
    assert [len(model.summary.history) for model in (one, two)] == [1, 2]
    assert two.getPredictionCol() == "p"
    assert estimator.getEpochs() == 1


def test_pipeline_with_save_and_load(points: DataFrame, tmp_path: Path) -> None:
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="assembled")
    pipeline = Pipeline(stages=[assembler, classifier(featuresCol="assembled", epochs=2)])
    pipeline.write().save(str(tmp_path / "pipeline"))
    loaded = Pipeline.load(str(tmp_path / "pipeline"))
    model = loaded.fit(points)
    model.write().overwrite().save(str(tmp_path / "model"))
    again = PipelineModel.load(str(tmp_path / "model"))
    expected = [row.probability for row in model.transform(points).orderBy("id").collect()]
    assert [row.probability for row in again.transform(points).orderBy("id").collect()] == expected


def test_cross_validator_in_parallel(
    points: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fits on a fold share its spool."""
    tables: list[ShardTable] = []
    first = ShardTable.__init__

    def noted(self: ShardTable, *args: Any, **kwargs: Any) -> None:
        first(self, *args, **kwargs)
        tables.append(self)

    monkeypatch.setattr(ShardTable, "__init__", noted)
    estimator = classifier(epochs=3)
    grid = ParamGridBuilder().addGrid(estimator.learningRate, [1e-6, 0.05]).build()
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    search.write().save(str(tmp_path / "search"))
    found = CrossValidator.load(str(tmp_path / "search")).fit(points)
    assert found.avgMetrics[1] > max(0.8, found.avgMetrics[0])
    assert found.bestModel.transform(points).where("prediction = label").count() > 170
    assert len(tables) == 3  # one for each fold, and one for the best


@pytest.mark.classic
def test_wrong_values_are_refused_before_any_job(spark: SparkSession, points: DataFrame) -> None:
    tracker = spark.sparkContext.statusTracker()
    before = tracker.getJobIdsForGroup(None)
    with pytest.raises(ConfigError, match="epochs"):
        classifier(epochs=0).fit(points)
    with pytest.raises(DataError, match='"absent" is not in the DataFrame'):
        classifier(featuresCol="absent").fit(points)
    with pytest.raises(ConfigError, match=r"less than 1; received 1\.0"):
        classifier(validationFraction=1).fit(points)
    with pytest.raises(ConfigError, match="either validationFraction or validationIndicatorCol"):
        classifier(validationFraction=0.1, validationIndicatorCol="v").fit(points)
    with pytest.raises(ConfigError, match="unknown metric 'aurocc'; did you mean 'auroc'"):
        classifier(metrics=["aurocc"], validationFraction=0.1).fit(points)
    assert tracker.getJobIdsForGroup(None) == before

"""Rows that cannot be trained on, or measured, are refused before any job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.ml import Pipeline
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import functions as F
from torch import nn

from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator import TorchClassifier, TorchEstimator, TorchRegressor
from sparkdl.model import TorchRegressorModel
from sparkdl.runner import TorchRunner
from sparkdl.spark.session.compat import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    x = F.array(F.col("id").cast("double"), F.lit(1.0))
    return spark.range(4).select(x.alias("features"), F.lit(1.0).alias("label"))


def num_jobs(spark: SparkSession) -> int | None:
    """Jobs that the session has had so far; Spark Connect does not tell."""
    if is_connect(spark):
        return None
    tracker = spark.sparkContext._jsc.sc().statusTracker()  # type: ignore[union-attr]
    return max(tracker.getJobIdsForGroup(None), default=-1)


OUTPUTS: list[tuple[type, dict[str, Any], list[str], str]] = [
    (TorchRegressor, {}, ["prediction"], 'column "prediction" is in the DataFrame already'),
    (TorchRegressor, {"predictionCol": "p"}, ["P"], 'column "P" is in the DataFrame already'),
    (TorchEstimator, {"labelCol": "label"}, ["prediction"], '"prediction" is in'),
    (TorchClassifier, {}, ["probability", "rawPrediction"],
     'columns "rawPrediction", "probability" are in the DataFrame already; drop them'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "params", "there", "message"), OUTPUTS)
def test_an_output_column_that_is_there_is_refused_before_any_job(
    spark: SparkSession, rows: DataFrame, kind: Any, params: dict[str, Any], there: list[str],
    message: str,
) -> None:  # fmt: skip
    estimator = kind(module=nn.Linear(2, 1), verbose=0, **params)
    scored = rows.select("*", *(F.lit(0.5).alias(name) for name in there))
    before = num_jobs(spark)
    for call in (estimator.fit, estimator.explain):
        with pytest.raises(DataError) as caught:
            call(scored)
        assert message in str(caught.value)
        assert estimator.uid.partition("_")[0] in str(caught.value)
    assert num_jobs(spark) == before


def test_a_stage_of_a_pipeline_refuses_it_too(spark: SparkSession, rows: DataFrame) -> None:
    scored = rows.select(F.lit(1.0).alias("a"), "label", F.lit(0.0).alias("prediction"))
    stages = [
        VectorAssembler(inputCols=["a"], outputCol="features"),
        TorchRegressor(module=nn.Linear(1, 1), verbose=0),
    ]
    before = num_jobs(spark)
    with pytest.raises(DataError, match='"prediction" is in the DataFrame already'):
        Pipeline(stages=stages).fit(scored)
    assert num_jobs(spark) == before


def test_a_column_that_is_turned_off_may_be_there(rows: DataFrame) -> None:
    from sparkdl.spark.params.param_table import output_columns

    estimator = TorchClassifier(module=nn.Identity, probabilityCol="", rawPredictionCol="r")
    assert output_columns(estimator) == ("prediction", "r")


def test_a_stream_is_told_as_such_before_anything_else(spark: SparkSession) -> None:
    stream = spark.readStream.format("rate").load().select(
        F.array(F.col("value").cast("double")).alias("features"), F.lit(1.0).alias("label")
    )  # fmt: skip
    # What else is wrong, such as a module that is not set, is told later.
    estimator = TorchRegressor(module=nn.Linear(1, 1), verbose=0)
    column = Column(name="features", role="feature", dtype="float32", shape=(1,))
    model = TorchRegressorModel(nn.Linear(1, 1), [column])
    calls: list[Callable[[], Any]] = [
        lambda: estimator.fit(stream),
        lambda: estimator.explain(stream),
        lambda: model.evaluate(stream),
        lambda: TorchRunner(num_workers=1, data=stream),
        lambda: TorchRunner(num_workers=1, data={"train": stream}),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"this is a stream, .*use foreachBatch"):
            call()
    assert model.transform(stream).isStreaming  # these need no table
    assert model.scores(stream).isStreaming

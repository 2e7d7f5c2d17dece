"""How well does a fitted model predict the rows of a DataFrame?

Spark sums up, in one pass over the predictions; `scores` turns the sums into measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparkdl.errors import ConfigError, DataError
from sparkdl.scores import (
    ClassificationScores,
    RegressionScores,
    classification_scores,
    regression_scores,
)
from sparkdl.spark.columns import quoted, require
from sparkdl.spark.session import is_case_sensitive

Scores = ClassificationScores | RegressionScores

_SMALLEST_PROBABILITY = 1e-15
"""A probability of 0 would make the log loss infinite; scikit-learn and Spark clip as well."""


def score(model: Any, rows: DataFrame, label_col: str, weight_col: str | None) -> Scores:
    """How a model's predictions compare with the labels, in one pass over the predictions.

    Raises:
        ConfigError: the model is neither a classifier nor a regressor.
        DataError: labels are missing, null, or no class numbers.
    """
    from sparkdl.model import TorchClassifierModel, TorchRegressorModel

    case = is_case_sensitive(rows.sparkSession)
    for column in (label_col, weight_col):
        if column is not None:
            require(rows.schema, column, is_case_sensitive=case)
    if rows.filter(F.col(quoted(label_col)).isNull()).count():
        raise DataError(f"column '{label_col}' has null labels; filter these rows out")
    weight = F.lit(1.0) if weight_col is None else F.col(quoted(weight_col)).cast("double")
    if isinstance(model, TorchClassifierModel):
        return _score_classifier(model, rows, label_col, weight)
    if isinstance(model, TorchRegressorModel):
        return _score_regressor(model, rows, label_col, weight)
    raise ConfigError(
        f"a {type(model).__name__} cannot be evaluated: there is no common measure for its "
        f"output; use the predict job and compute your own"
    )


def _score_classifier(
    model: Any, rows: DataFrame, label_col: str, weight: Column
) -> ClassificationScores:
    label = F.col(quoted(label_col)).cast("double")
    predictions = model.transform(rows)
    probability_col = model.getOrDefault("probabilityCol")
    log_loss = F.lit(None).cast("double")
    if probability_col:
        predictions = vectors_to_arrays(predictions)
        class_number = F.col(quoted(label_col)).try_cast("int")
        chance = F.get(F.col(quoted(probability_col)), class_number)
        log_loss = -F.log(F.greatest(chance, F.lit(_SMALLEST_PROBABILITY)))
    predicted = F.col(quoted(model.getPredictionCol()))
    groups = (
        predictions.groupBy(label.alias("label"), predicted.alias("predicted"))
        .agg(F.sum(weight).alias("rows"), F.sum(weight * log_loss).alias("log_loss"))
        .collect()
    )
    for group in groups:
        if not group["label"].is_integer() or group["label"] < 0:
            raise DataError(f"column '{label_col}' has the label {group['label']}: no class number")
    counts: Mapping[tuple[int, int], float] = {
        (int(group["label"]), int(group["predicted"])): group["rows"] for group in groups
    }
    total = sum(group["log_loss"] for group in groups) if probability_col else None
    return classification_scores(counts, total)


def _score_regressor(
    model: Any, rows: DataFrame, label_col: str, weight: Column
) -> RegressionScores:
    label = F.col(quoted(label_col)).cast("double")
    # Two passes over the labels: the sum of squares alone would lose digits.
    mean = rows.agg(F.sum(weight * label) / F.sum(weight)).first()[0]  # type: ignore[index]
    error = F.col(quoted(model.getPredictionCol())) - label
    sums = (
        model.transform(rows)
        .agg(
            F.sum(weight).alias("weight"),
            F.sum(weight * error * error).alias("squared_error"),
            F.sum(weight * F.abs(error)).alias("absolute_error"),
            F.sum(weight * (label - F.lit(mean)) * (label - F.lit(mean))).alias("label_variance"),
        )
        .first()
    )
    return regression_scores(**{key: value or 0.0 for key, value in sums.asDict().items()})


def vectors_to_arrays(rows: DataFrame) -> DataFrame:
    """``rows`` with Spark ML vectors as arrays, which every reader understands."""
    vectors = [item.name for item in rows.schema.fields if isinstance(item.dataType, VectorUDT)]
    return rows.withColumns({name: vector_to_array(F.col(quoted(name))) for name in vectors})

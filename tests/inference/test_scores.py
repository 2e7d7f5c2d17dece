from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics

from sparkdl.errors import SparkDLError
from sparkdl.inference.scores import BUILT_IN, Evaluation, RegressionScores, classification_scores
from sparkdl.train.objective.roc_curves import ScoreTable

LABELS = [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
PREDICTIONS = [0, 0, 1, 1, 1, 2, 0, 2, 2, 2]


def counts() -> dict[tuple[int, int], float]:
    pairs = list(zip(LABELS, PREDICTIONS, strict=True))
    return {pair: float(pairs.count(pair)) for pair in pairs}


def test_classification_scores_are_those_of_scikit_learn() -> None:
    scores = classification_scores(counts(), 5.0)
    expected = metrics.precision_recall_fscore_support(LABELS, PREDICTIONS, zero_division=0)
    assert scores.accuracy == metrics.accuracy_score(LABELS, PREDICTIONS)
    assert scores.log_loss == 0.5
    for label, *values in zip(range(4), *expected, strict=True):
        found = scores.per_class[label]
        assert [found.precision, found.recall, found.f1, found.rows] == pytest.approx(values)
    assert scores.confusion[2] == {0: 1.0, 2: 3.0}
    assert scores.confusion[2][1] == 0.0


def test_a_class_that_is_only_predicted_has_a_line_too() -> None:
    scores = classification_scores({(0, 5): 2.0}, 0.0)
    assert scores.accuracy == 0
    assert scores.per_class[5].rows == 0
    assert scores.per_class[5].f1 == 0


def test_scores_are_text() -> None:
    text = classification_scores(counts(), 5.0).lines()
    assert text[0] == "accuracy  0.7000"
    assert len(text) == 4 + 4


def binary() -> Evaluation:
    table = ScoreTable()
    table.add(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]), np.ones(4))
    return Evaluation(
        rows=4,
        loss=0.25,
        scores=classification_scores({(0, 0): 1.0, (0, 1): 1.0, (1, 1): 2.0}, 1.0),
        metrics={"f1": 0.8, "per_class_f1": [0.5, math.nan]},
        curves={1: table.curve()},
        num_classes=2,
    )


def test_an_evaluation_is_a_mapping_of_its_measures() -> None:
    found = binary()
    assert dict(found) == {
        "loss": 0.25,
        "accuracy": 0.75,
        "log_loss": 0.25,
        "roc_auc": 0.75,
        "average_precision": pytest.approx(5 / 6),
        "f1": 0.8,
        "per_class_f1": found.metrics["per_class_f1"],
    }
    assert len(found) == 7
    assert found.get("acc") is None and "acc" not in found
    with pytest.raises(KeyError, match=r"no value 'acc'; did you mean 'accuracy'\?"):
        found["acc"]
    assert found.confusion[0] == {0: 1.0, 1: 1.0}
    assert set(found) - set(found.metrics) <= BUILT_IN


def test_an_evaluation_is_json_and_text() -> None:
    found = binary()
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["rows"] == 4
    assert values["per_class_f1"] == [0.5, None]
    assert values["per_class"]["1"]["recall"] == 1.0
    assert values["curves"]["1"]["roc_auc"] == 0.75
    assert set(values) - set(found.metrics) <= BUILT_IN
    text = repr(found).splitlines()
    assert text[:2] == ["rows              4", "loss              0.25"]
    assert "roc_auc           0.75" in text
    assert "accuracy          0.7500" in text  # below the others
    assert "log loss" not in repr(found)  # it is the loss
    assert "log loss          0.2500" in repr(replace(found, loss=0.5))


def test_a_regression_has_no_confusion_and_no_curves() -> None:
    scores = RegressionScores(rmse=1.0, mae=0.5, r2=math.nan)
    found = Evaluation(rows=2, loss=1.0, scores=scores)
    assert list(found) == ["loss", "rmse", "mae", "r2"]
    assert repr(found).splitlines()[1:3] == ["loss      1", "rmse      1"]
    assert found.to_dict()["r2"] is None
    with pytest.raises(SparkDLError, match="only classifiers"):
        _ = found.confusion
    with pytest.raises(SparkDLError, match="no curves to draw"):
        found.plot()


def test_curves_are_drawn(tmp_path: Path) -> None:
    figure = binary().plot(tmp_path / "curves.png")
    assert [axis.get_title() for axis in figure.axes] == ["ROC", "precision and recall"]
    assert (tmp_path / "curves.png").stat().st_size > 1000

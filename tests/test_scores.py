from __future__ import annotations

import json
import math

import pytest
from sklearn import metrics

from sparkdl.errors import DataError
from sparkdl.scores import classification_scores, regression_scores

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


def test_a_class_that_is_only_predicted_has_a_line_too() -> None:
    scores = classification_scores({(0, 5): 2.0}, None)
    assert scores.log_loss is None
    assert scores.accuracy == 0
    assert scores.per_class[5].rows == 0
    assert scores.per_class[5].f1 == 0


def test_regression_scores() -> None:
    scores = regression_scores(
        weight=4.0, squared_error=4.0, absolute_error=2.0, label_variance=16.0
    )
    assert (scores.rmse, scores.mae, scores.r2) == (1.0, 0.5, 0.75)


def test_equal_labels_have_no_variance_to_explain() -> None:
    scores = regression_scores(
        weight=2.0, squared_error=1.0, absolute_error=1.0, label_variance=0.0
    )
    assert math.isnan(scores.r2)
    assert scores.to_dict()["r2"] is None


def test_scores_are_json_and_text() -> None:
    scores = classification_scores(counts(), 5.0)
    assert json.loads(json.dumps(scores.to_dict()))["per_class"]["2"]["recall"] == 0.75
    text = scores.lines()
    assert text[0] == "accuracy  0.7000"
    assert len(text) == 4 + 4


def test_no_rows_are_an_error() -> None:
    with pytest.raises(DataError, match="no rows to evaluate"):
        classification_scores({}, None)
    with pytest.raises(DataError, match="no rows to evaluate"):
        regression_scores(weight=0.0, squared_error=0, absolute_error=0, label_variance=0)

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn import metrics

from sparkdl.train.objective.roc_curves import ScoreTable, limit_for

generator = np.random.default_rng(0)
ROWS = 600
LABELS = generator.integers(0, 2, ROWS).astype(bool)
SCORES = np.clip(generator.normal(0.4 + 0.2 * LABELS, 0.2), 0, 1).round(2)  # many ties
WEIGHTS = generator.choice([0.5, 1.0, 3.0], ROWS)
ONES = np.ones(ROWS)


def table(cuts: int, weights: np.ndarray, limit: int = 100_000) -> ScoreTable:
    whole = ScoreTable(limit=limit)
    for start in range(cuts):
        part = ScoreTable(limit=limit)
        for begin in range(start, ROWS, 17 * cuts):
            rows = slice(begin, begin + 17 * cuts, cuts)
            part.add(SCORES[rows], LABELS[rows], weights[rows])
        whole.merge(part)
    return whole


@pytest.mark.parametrize("cuts", [1, 4, 600])
@pytest.mark.parametrize("weights", [ONES, WEIGHTS])
def test_curves_are_those_of_scikit_learn(cuts: int, weights: np.ndarray) -> None:
    curve = table(cuts, weights).curve()
    false, true, thresholds = metrics.roc_curve(
        LABELS, SCORES, sample_weight=weights, drop_intermediate=False
    )
    np.testing.assert_allclose(curve.false_positive_rate, false[1:], rtol=0, atol=1e-14)
    np.testing.assert_allclose(curve.true_positive_rate, true[1:], rtol=0, atol=1e-14)
    np.testing.assert_array_equal(curve.thresholds, thresholds[1:])
    precision, recall, _ = metrics.precision_recall_curve(LABELS, SCORES, sample_weight=weights)
    np.testing.assert_allclose(curve.precision[::-1], precision[:-1], rtol=0, atol=1e-14)
    np.testing.assert_allclose(curve.true_positive_rate[::-1], recall[:-1], rtol=0, atol=1e-14)
    area = metrics.roc_auc_score(LABELS, SCORES, sample_weight=weights)
    assert curve.roc_auc == pytest.approx(area, abs=1e-13)
    mean = metrics.average_precision_score(LABELS, SCORES, sample_weight=weights)
    assert curve.average_precision == pytest.approx(mean, abs=1e-13)
    assert curve.is_exact
    assert curve.roc_auc_error == 0


@pytest.mark.parametrize("cuts", [1, 4, 600])
def test_bins_depend_on_the_rows_alone_and_say_how_far_off_they_are(cuts: int) -> None:
    curve = table(cuts, ONES, limit=40).curve()
    once = table(1, ONES, limit=40).curve()
    assert not curve.is_exact
    assert len(curve.thresholds) <= 33
    for name in ("thresholds", "positive", "negative"):
        np.testing.assert_array_equal(getattr(curve, name), getattr(once, name))
    area = metrics.roc_auc_score(LABELS, SCORES)
    assert 0 < abs(curve.roc_auc - area) <= curve.roc_auc_error < 0.02


@pytest.mark.parametrize("cuts", [1, 3])
def test_a_table_at_its_limit_is_exact(cuts: int) -> None:
    num_scores = len(np.unique(SCORES))
    assert table(cuts, ONES, limit=num_scores).curve().is_exact
    assert not table(cuts, ONES, limit=num_scores - 1).curve().is_exact


def test_tables_stay_small() -> None:
    grown = ScoreTable(limit=100)
    for _ in range(50):
        grown.add(generator.random(60), LABELS[:60], ONES[:60])
        assert sum(columns.shape[1] for columns in grown.columns) <= 300
    assert grown.curve().positive.sum() == 50 * LABELS[:60].sum()


def test_one_kind_of_rows_or_nan_has_no_area() -> None:
    for labels, scores in ((LABELS | True, SCORES), (LABELS, np.where(SCORES > 0.5, np.nan, 0.1))):
        whole = ScoreTable()
        whole.add(scores, labels, ONES)
        curve = whole.curve()
        assert math.isnan(curve.roc_auc)
        assert math.isnan(curve.average_precision)
        assert curve.to_dict()["roc_auc"] is None
    assert math.isnan(ScoreTable().curve().roc_auc)


def test_as_plain_values_with_few_points() -> None:
    values = table(1, ONES).curve().to_dict(points=5)
    assert values["is_exact"]
    assert [len(points) for points in values["points"].values()] == [5] * 4
    assert values["points"]["true_positive_rate"][-1] == 1.0


def test_many_tables_share_the_room() -> None:
    assert limit_for(1) == 100_000
    assert limit_for(10) == 10_000
    assert limit_for(10_000) == 1_000

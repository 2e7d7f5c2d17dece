"""How good are predictions, given the sums that one pass over them yields?

Pure arithmetic; `job` collects the sums with Spark. Every measure is a mean over rows, weighted
if there are weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import DataError


@dataclass(frozen=True, kw_only=True)
class ClassScores:
    """Precision, recall and F1 of one class; rows is how many have it as their label."""

    precision: float
    recall: float
    f1: float
    rows: float


@dataclass(frozen=True, kw_only=True)
class ClassificationScores:
    """What a classifier's predictions are worth."""

    accuracy: float
    log_loss: float | None
    """Mean of ``-log(probability of the label)``; None without a probability column."""
    per_class: Mapping[int, ClassScores]
    confusion: Mapping[int, Mapping[int, float]]
    """label -> prediction -> rows (or sum of weights)."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON, whose keys are strings."""
        return {
            "accuracy": self.accuracy,
            "log_loss": self.log_loss,
            "per_class": {str(label): vars(scores) for label, scores in self.per_class.items()},
            "confusion": {
                str(label): {str(predicted): rows for predicted, rows in row.items()}
                for label, row in self.confusion.items()
            },
        }

    def lines(self) -> list[str]:
        """For a terminal."""
        text = [f"accuracy  {self.accuracy:.4f}"]
        if self.log_loss is not None:
            text.append(f"log loss  {self.log_loss:.4f}")
        text.append("")
        text.append(f"{'class':>8} {'precision':>10} {'recall':>8} {'f1':>8} {'rows':>10}")
        for label, scores in self.per_class.items():
            text.append(
                f"{label:>8} {scores.precision:>10.4f} {scores.recall:>8.4f} "
                f"{scores.f1:>8.4f} {scores.rows:>10,.10g}"
            )
        return text


@dataclass(frozen=True, kw_only=True)
class RegressionScores:
    """What a regressor's predictions are worth."""

    rmse: float
    mae: float
    r2: float
    """Share of the labels' variance that is explained; NaN if all labels are equal."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON, which has no NaN."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}

    def lines(self) -> list[str]:
        """For a terminal."""
        return [f"{name:<5} {value:.6g}" for name, value in vars(self).items()]


def classification_scores(
    counts: Mapping[tuple[int, int], float], log_loss_sum: float | None
) -> ClassificationScores:
    """Scores from a confusion matrix.

    Args:
        counts: ``(label, prediction)`` -> rows, or sum of their weights.
        log_loss_sum: sum over rows of ``-log(probability of the label)`` times weight.

    Raises:
        DataError: there are no rows.
    """
    total = _positive_total(sum(counts.values()))
    classes = sorted({label for pair in counts for label in pair})
    confusion = {
        label: {p: counts[label, p] for p in classes if (label, p) in counts} for label in classes
    }
    return ClassificationScores(
        accuracy=sum(counts.get((label, label), 0.0) for label in classes) / total,
        log_loss=None if log_loss_sum is None else log_loss_sum / total,
        per_class={label: _class_scores(counts, classes, label) for label in classes},
        confusion=confusion,
    )


def _class_scores(
    counts: Mapping[tuple[int, int], float], classes: list[int], label: int
) -> ClassScores:
    right = counts.get((label, label), 0.0)
    rows = sum(counts.get((label, predicted), 0.0) for predicted in classes)
    predicted = sum(counts.get((other, label), 0.0) for other in classes)
    return ClassScores(
        precision=right / predicted if predicted else 0.0,
        recall=right / rows if rows else 0.0,
        f1=2 * right / (rows + predicted) if rows + predicted else 0.0,
        rows=rows,
    )


def regression_scores(
    *, weight: float, squared_error: float, absolute_error: float, label_variance: float
) -> RegressionScores:
    """Scores from sums over rows.

    Args:
        weight: number of rows, or sum of their weights.
        squared_error: sum of squared errors, times weight.
        absolute_error: sum of absolute errors, times weight.
        label_variance: sum of squared distances of the labels from their mean, times weight.

    Raises:
        DataError: there are no rows.
    """
    total = _positive_total(weight)
    return RegressionScores(
        rmse=math.sqrt(squared_error / total),
        mae=absolute_error / total,
        r2=1 - squared_error / label_variance if label_variance > 0 else math.nan,
    )


def _positive_total(total: float | None) -> float:
    if not total:
        raise DataError("there are no rows to evaluate; check [data] and its select expressions")
    return total

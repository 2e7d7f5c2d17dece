"""ROC and precision-recall curves: how well scores tell one class from the others.

A table holds, for each different score, how many rows of the class and of the others have it:
from that the curves follow exactly, and tables of parts add up to that of the whole. A table with
more than `ScoreTable.limit` different scores is cut into bins of equal width, once and for all, so
that what comes out depends on the rows alone and not on how they are partitioned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparkdl.runtime.json_values import finite

MOST_SCORES = 100_000
"""Different scores that all tables of an evaluation may hold together; 24 bytes each."""
_LEAST_LIMIT = 1_000


def limit_for(num_tables: int) -> int:
    """Return how many different scores each of several tables may hold."""
    return max(_LEAST_LIMIT, MOST_SCORES // max(1, num_tables))


@dataclass
class ScoreTable:
    """Weights of the rows of one class, and of the others, by score; grows with `add`."""

    limit: int = MOST_SCORES
    is_exact: bool = True
    columns: list[torch.Tensor] = field(default_factory=list)
    """``(3, scores)`` each: scores in ``[0, 1]``; the weight of the class's rows with that score;
    the weight of the others. After `settle` there is one, of different scores, ascending."""
    waiting: int = 0
    """Scores that were added since."""

    def add(self, scores: np.ndarray, is_class: np.ndarray, weights: np.ndarray) -> None:
        """Take note of rows; three arrays ``(rows,)``."""
        positive = np.where(is_class, weights, 0.0)
        self._put(np.stack([scores.astype(np.float64), positive, weights - positive]))

    def merge(self, other: ScoreTable) -> None:
        """Take note of what another table has seen."""
        columns = other.settle()
        self.is_exact &= other.is_exact
        self._put(columns)

    def _put(self, columns: np.ndarray) -> None:
        self.columns.append(torch.from_numpy(columns))
        self.waiting += columns.shape[1]
        if self.waiting > 2 * self.limit:  # sorting seldom costs less than sorting often
            self.settle()

    def settle(self) -> np.ndarray:
        """Unite all that was added, and return it."""
        columns = self._by_score(np.concatenate([np.empty((3, 0)), *self.columns], axis=1))
        if self.is_exact and columns.shape[1] > self.limit:
            self.is_exact = False
            columns = self._by_score(columns)
        self.columns, self.waiting = [torch.from_numpy(columns)], 0
        return columns

    def _by_score(self, columns: np.ndarray) -> np.ndarray:
        scores, positive, negative = columns
        if not self.is_exact:
            num_bins = 2 ** (self.limit.bit_length() - 1)
            scores = np.floor(scores * num_bins) / num_bins
        different, place = np.unique(scores, return_inverse=True)
        weights = [np.bincount(place, w, len(different)) for w in (positive, negative)]
        return np.stack([different, *weights])

    def curve(self) -> Curve:
        """The curves that follow."""
        scores, positive, negative = self.settle()[:, ::-1].copy()
        return Curve(
            thresholds=scores, positive=positive, negative=negative, is_exact=self.is_exact
        )


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One class against the others, at every threshold from the highest score down.

    A row counts as predicted if its score is at least the threshold. Properties are arrays
    ``(thresholds,)``. Definitions and names are those of scikit-learn.
    """

    thresholds: np.ndarray
    """Different scores, descending; where ``is_exact`` is False the lower bounds of bins."""
    positive: np.ndarray
    """Rows of the class, or their weights, with that score."""
    negative: np.ndarray
    is_exact: bool

    @property
    def true_positive_rate(self) -> np.ndarray:
        """Share of the class that is predicted; the same as recall."""
        return _share(np.cumsum(self.positive))

    @property
    def false_positive_rate(self) -> np.ndarray:
        """Share of the other rows that is predicted."""
        return _share(np.cumsum(self.negative))

    @property
    def precision(self) -> np.ndarray:
        """Share of the predicted rows that are of the class."""
        right = np.cumsum(self.positive)
        predicted = right + np.cumsum(self.negative)
        shares: np.ndarray = np.zeros_like(right)
        np.divide(right, predicted, out=shares, where=predicted > 0)
        return shares

    @property
    def roc_auc(self) -> float:
        """Area under the ROC curve; NaN where a kind of rows is missing or a score is NaN."""
        if not self._is_defined:
            return math.nan
        above = np.cumsum(self.positive) - self.positive / 2
        area = float((self.negative * above).sum())
        return area / float(self.positive.sum() * self.negative.sum())

    @property
    def roc_auc_error(self) -> float:
        """Largest distance of `roc_auc` from the exact area; 0 where the curve is exact.

        Scores of a bin count as equal, which is wrong by half of its pairs at most.
        """
        if self.is_exact or not self._is_defined:
            return 0.0
        pairs = float((self.positive * self.negative).sum())
        return pairs / 2 / float(self.positive.sum() * self.negative.sum())

    @property
    def average_precision(self) -> float:
        """Mean of the precisions, weighted by the increase in recall."""
        if not self._is_defined:
            return math.nan
        return float((self.positive * self.precision).sum() / self.positive.sum())

    @property
    def _is_defined(self) -> bool:
        return bool(self.positive.sum() > 0 and self.negative.sum() > 0) and not bool(
            np.isnan(self.thresholds).any()
        )

    def to_dict(self, points: int = 200) -> dict[str, Any]:
        """As plain values for JSON: the areas, and at most so many points of the curve."""
        chosen = np.unique(np.linspace(0, max(len(self.thresholds) - 1, 0), points).astype(int))
        arrays = {
            "threshold": self.thresholds,
            "true_positive_rate": self.true_positive_rate,
            "false_positive_rate": self.false_positive_rate,
            "precision": self.precision,
        }
        names = ("roc_auc", "roc_auc_error", "average_precision", "is_exact")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        values["points"] = {name: a[chosen[: len(a)]].tolist() for name, a in arrays.items()}
        return dict(finite(values))


def _share(cumulated: np.ndarray) -> np.ndarray:
    total = cumulated[-1] if len(cumulated) else 0.0
    return cumulated / total if total > 0 else np.full_like(cumulated, np.nan)

"""Computes the metrics that have names, of rows that may have weights, as scikit-learn does.

Each is made of sums over rows in float64, or of the scores of all rows. It has what `metric_states`
wants of a torchmetrics.Metric.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparkdl.train.objective.metric_states import spread_of_ranks, sum_of_ranks
from sparkdl.train.objective.roc_curves import Curve, ScoreTable

_NO_LIMIT = 2**62
_OF_ROUNDING = 1e-28
"""Part of the squared mean that rounding may leave of a spread of 0."""
_LEAST_LABEL = 1.17e-6
"""Labels nearer to 0 count as this far from it, where errors are divided by labels."""


class WeightedMetric(ABC):
    """A metric's name and what it has seen of the rows."""

    _reductions: ClassVar[Mapping[str, Any]] = {"sums": sum_of_ranks}

    def __init__(self, name: str, device: torch.device) -> None:
        """Keep the name, one of `named_metrics`; the rows come on ``device``."""
        self.name, self.device = name, device
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self._update_count = 0
        self.sums = torch.zeros(0, dtype=torch.float64, device=self.device)

    def update(self, output: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """Take note of a batch.

        Args:
            output: numbers like the target's, or a classifier's probabilities.
            target: ``(batch, ...)``.
            weight: by how much each row counts, ``(batch,)``; None: all alike.
        """
        ones = torch.ones(target.shape, dtype=torch.float64, device=target.device)
        if weight is not None:
            ones *= weight.to(ones).view(-1, *[1] * (target.dim() - 1))
        self._add(output, target, ones)
        self._update_count += 1

    def compute(self) -> Tensor:
        """The value; NaN where no row tells."""
        seen = self._update_count > 0
        return self._value() if seen else torch.tensor(torch.nan, dtype=torch.float64)

    @abstractmethod
    def _add(self, output: Tensor, target: Tensor, weight: Tensor) -> None:
        """Take note of a batch; ``weight`` has the target's shape."""

    @abstractmethod
    def _value(self) -> Tensor:
        """The value of what was seen in one or more batches."""

    def _add_sums(self, sums: Tensor) -> None:
        if self._update_count:
            sums = self._reductions["sums"](torch.stack([self.sums, sums]))
        self.sums = sums


class OfErrors(WeightedMetric):
    """A mean of errors over all numbers."""

    def _add(self, output: Tensor, target: Tensor, weight: Tensor) -> None:
        label = target.double()
        errors = _ERRORS[self.name](label - output.double(), label)
        self._add_sums(torch.stack([(weight * errors).sum(), weight.sum()]))

    def _value(self) -> Tensor:
        mean = self.sums[0] / self.sums[1]
        return mean.sqrt() if self.name == "rmse" else mean


class OfSpread(WeightedMetric):
    """The mean over the columns of the share of the labels' spread that is explained."""

    _reductions: ClassVar[Mapping[str, Any]] = {"sums": spread_of_ranks}

    def _add(self, output: Tensor, target: Tensor, weight: Tensor) -> None:
        label = target.double()
        parts = [(weight > 0).double().sum(0), total := weight.sum(0)]
        for values in (label, label - output.double()):
            mean = _ratio((weight * values).sum(0), total)
            parts += [mean, (weight * (values - mean) ** 2).sum(0)]
        self._add_sums(torch.stack([part.flatten() for part in parts]))

    def _value(self) -> Tensor:
        rows, weight, label, spread, error, lost = self.sums
        nothing = weight * _OF_ROUNDING
        is_spread, bias = spread > nothing * label**2, weight * error**2
        if self.name == "explained_variance":
            is_lost = lost > nothing * error**2
        else:
            lost = lost + bias
            is_lost = lost > 0
        share = torch.where(is_spread, 1 - lost / spread, (~is_lost).double())
        return share.masked_fill(rows < 2, torch.nan).mean()


_ERRORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mae": lambda error, _: error.abs(),
    "mape": lambda error, label: error.abs() / label.abs().clamp_min(_LEAST_LABEL),
    "mse": lambda error, _: error**2,
    "rmse": lambda error, _: error**2,
}
"""Values that each metric takes the mean of."""


class OfClasses(WeightedMetric):
    """The metrics that follow from the rows by class: those right, predicted, and labeled so.

    Of two classes it is the metric of class 1, of more the mean over those that occur.
    """

    def __init__(
        self, name: str, device: torch.device, num_classes: int, ignore_index: int | None
    ) -> None:
        """Keep ``num_classes``; targets with ``ignore_index`` or that are no class do not count.

        Of two classes the output is the probability of class 1, in the target's shape; of more it
        is ``(batch, classes, ...)``.
        """
        self._num_classes, self._ignored = num_classes, ignore_index
        super().__init__(name, device)

    def _counted(self, target: Tensor, weight: Tensor) -> Tensor:
        """The weights of targets that count, ``(numbers,)``; 0 for those that do not."""
        known = (target >= 0) & (target < self._num_classes)
        if self._ignored is not None:
            known &= target != self._ignored
        return weight.masked_fill(~known, 0.0).flatten()

    def _add(self, output: Tensor, target: Tensor, weight: Tensor) -> None:
        counted, label = self._counted(target, weight), target.flatten()
        if self._num_classes == 2:
            # A loss may not say whether they are logits, which only all rows together show.
            forms, is_nan = [output > 0.5, output > 0.0], output.isnan()
        else:
            forms, is_nan = [output.argmax(1)], output.softmax(1).isnan().any(1)
        taken = counted.masked_fill(is_nan.flatten(), 0.0)  # a row with NaN is taken for no class
        places = label.clamp(0, self._num_classes - 1)
        pairs = [(places, counted)]
        for form in forms:
            predicted = form.long().flatten()
            pairs += [(places, taken.masked_fill(predicted != label, 0.0)), (predicted, taken)]
        sums = [torch.bincount(p, w, minlength=self._num_classes) for p, w in pairs]
        if len(forms) > 1:
            sums.append(((output < 0) | (output > 1)).sum().to(sums[0]).expand(2))
        self._add_sums(torch.stack(sums))

    def _value(self) -> Tensor:
        labeled, right, predicted, *logits = self.sums.unbind()
        if logits and logits[-1][0] > 0:
            right, predicted = logits[:2]
        total = labeled.sum()
        if not total:
            return total / total
        if self.name == "accuracy":
            return right.sum() / total
        if self.name == "cohen_kappa":
            by_chance = (predicted * labeled).sum() / total**2
            return (right.sum() / total - by_chance) / (1 - by_chance)
        if self.name == "mcc":
            together = right.sum() * total - (predicted * labeled).sum()
            spreads = [total**2 - (count**2).sum() for count in (predicted, labeled)]
            return _ratio(together, (spreads[0] * spreads[1]).clamp_min(0).sqrt())
        if self.name == "f1":
            values = _ratio(2 * right, predicted + labeled)
        elif self.name == "specificity":
            values = _ratio(total - predicted - labeled + right, total - labeled)
        else:
            values = _ratio(right, predicted if self.name == "precision" else labeled)
        return values[1] if self._num_classes == 2 else values[predicted + labeled > 0].mean()


class OfScores(OfClasses):
    """The areas below the curves of each class against the others; it keeps all scores."""

    _reductions: ClassVar[Mapping[str, Any]] = {"scores": None, "labels": None, "weights": None}

    def reset(self) -> None:
        """Forget all rows."""
        super().reset()
        self.scores: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.weights: list[Tensor] = []

    def _add(self, output: Tensor, target: Tensor, weight: Tensor) -> None:
        counted = self._counted(target, weight)
        scores = (
            output.flatten() if self._num_classes == 2 else output.movedim(1, -1).flatten(0, -2)
        )
        chosen = counted > 0
        self.scores.append(scores[chosen])
        self.labels.append(target.flatten()[chosen])
        self.weights.append(counted[chosen])

    def _value(self) -> Tensor:
        scores, labels, weights = (
            torch.cat(values).cpu().numpy() for values in (self.scores, self.labels, self.weights)
        )
        if self._num_classes == 2:
            areas = [self._area(scores, labels == 1, weights)]
        else:
            columns = range(self._num_classes)
            areas = [self._area(scores[:, c], labels == c, weights) for c in columns]
        return torch.tensor(areas, dtype=torch.float64).nanmean()

    def _area(self, scores: np.ndarray, is_class: np.ndarray, weights: np.ndarray) -> float:
        table = ScoreTable(limit=_NO_LIMIT)
        table.add(scores, is_class, weights)
        curve: Curve = table.curve()
        return curve.roc_auc if self.name == "auroc" else curve.average_precision


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """A share, which is 0 of nothing."""
    return torch.where(whole > 0, part / whole, 0.0)

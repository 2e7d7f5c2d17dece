"""Measures of how good predictions are, given the sums over rows that `evaluate_rows` makes.

This is pure arithmetic. Every measure is a mean over rows, weighted if there are weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparkdl.errors import SparkDLError, import_or, unknown_names
from sparkdl.runtime.json_values import finite

if TYPE_CHECKING:
    import matplotlib.figure

    from sparkdl.train.objective.roc_curves import Curve

_NAME_COLUMNS = 9
"""Least width of the measures' names in text."""


class Scores(Protocol):
    """The measures of predictions of one kind."""

    def measures(self) -> dict[str, float]:
        """Return the numbers by name."""

    def tables(self) -> dict[str, Any]:
        """Return what else there is, for JSON: keys are strings."""

    def lines(self, loss: float = math.nan, *, width: int = _NAME_COLUMNS) -> list[str]:
        """Return text for a terminal, without what is equal to the ``loss`` that stands above."""


@dataclass(frozen=True, kw_only=True)
class ClassScores:
    """Precision, recall and F1 of one class; rows is how many have it as their label."""

    precision: float
    recall: float
    f1: float
    rows: float


@dataclass(frozen=True, kw_only=True)
class ClassificationScores:
    """The measures of a classifier's predictions."""

    accuracy: float
    log_loss: float
    """Mean of ``-log(probability of the label)``."""
    per_class: Mapping[int, ClassScores]
    confusion: Mapping[int, Mapping[int, float]]
    """label -> prediction -> rows (or sum of weights), 0 for what was never predicted for it."""

    def measures(self) -> dict[str, float]:
        return {"accuracy": self.accuracy, "log_loss": self.log_loss}

    def tables(self) -> dict[str, Any]:
        return {
            "per_class": {str(label): vars(scores) for label, scores in self.per_class.items()},
            "confusion": {
                str(label): {str(predicted): rows for predicted, rows in row.items()}
                for label, row in self.confusion.items()
            },
        }

    def lines(self, loss: float = math.nan, *, width: int = _NAME_COLUMNS) -> list[str]:
        is_loss = math.isclose(self.log_loss, loss, rel_tol=1e-4)
        return [
            f"{'accuracy':<{width}} {self.accuracy:.4f}",
            *([] if is_loss else [f"{'log loss':<{width}} {self.log_loss:.4f}"]),
            "",
            f"{'class':>8} {'precision':>10} {'recall':>8} {'f1':>8} {'rows':>10}",
            *(
                f"{label:>8} {scores.precision:>10.4f} {scores.recall:>8.4f} "
                f"{scores.f1:>8.4f} {scores.rows:>10,.10g}"
                for label, scores in self.per_class.items()
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class RegressionScores:
    """The measures of a regressor's predictions."""

    rmse: float
    mae: float
    r2: float
    """Share of the labels' variance that is explained; NaN if all labels are equal."""

    def measures(self) -> dict[str, float]:
        return dict(vars(self))

    def tables(self) -> dict[str, Any]:
        return {}

    def lines(self, loss: float = math.nan, *, width: int = _NAME_COLUMNS) -> list[str]:
        return [f"{name:<{width}} {value:.6g}" for name, value in vars(self).items()]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Evaluation(Mapping[str, Any]):
    """The result of evaluating a model on some rows; ``model.evaluate`` gives it.

    As a mapping it holds the measures by name: ``loss``; ``accuracy`` and ``log_loss``, or
    ``rmse``, ``mae`` and ``r2``; ``roc_auc`` and ``average_precision`` of class 1 where there are
    two classes; ``loss_<label>`` where there are several labels; and the torchmetrics that were
    asked for.
    """

    rows: int
    """Rows that were measured."""
    loss: float
    """Mean of the rows' losses, weighted as in training."""
    loss_by_label: Mapping[str, float] = field(default_factory=dict)
    """With several labels the mean of each one's losses, without its weight in the sum."""
    scores: Scores | None = None
    """Scores of classifiers and regressors, with ``confusion`` and ``per_class``."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics asked for: numbers, or lists of numbers. Only those by name know weights."""
    curves: Mapping[int, Curve] = field(default_factory=dict)
    """Class -> its ROC and precision-recall curves against all others."""
    num_classes: int = 0
    """Classes of a classifier; 0: the model is none."""

    @property
    def confusion(self) -> Mapping[int, Mapping[int, float]]:
        """Label -> prediction -> rows, or sum of weights.

        Raises:
            SparkDLError: the model is no classifier.
        """
        if not isinstance(self.scores, ClassificationScores):
            raise SparkDLError("only classifiers have a confusion matrix")
        return self.scores.confusion

    def __getitem__(self, name: str) -> Any:
        values = self._values()
        if name in values:
            return values[name]
        raise KeyError(unknown_names("the evaluation has no value", [name], values))

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {"loss": self.loss}
        values |= {f"loss_{label}": loss for label, loss in self.loss_by_label.items()}
        if self.scores is not None:
            values |= self.scores.measures()
        if self.num_classes == 2 and 1 in self.curves:
            curve = self.curves[1]
            values |= {"roc_auc": curve.roc_auc, "average_precision": curve.average_precision}
        return {**values, **self.metrics}

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON, whose keys are strings and which has no NaN."""
        values = {"rows": self.rows, **self._values()}
        if self.scores is not None:
            values |= self.scores.tables()
        if self.curves:
            values["curves"] = {str(number): c.to_dict() for number, c in self.curves.items()}
        return dict(finite(values))

    def lines(self) -> list[str]:
        """For a terminal."""
        values = {"rows": f"{self.rows:,}", "loss": f"{self.loss:.6g}"}
        own = set(self._values()) - set(self.metrics) - {"loss"}
        own -= set(self.scores.measures()) if self.scores is not None else set()
        for name in (*sorted(own), *self.metrics):
            value = self[name]
            values[name] = f"{value:.6g}" if isinstance(value, float) else str(value)
        width = max(_NAME_COLUMNS, *map(len, values))
        text = [f"{name:<{width}} {value}" for name, value in values.items()]
        return text + (self.scores.lines(self.loss, width=width) if self.scores is not None else [])

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def plot(self, path: str | Path | None = None) -> matplotlib.figure.Figure:
        """Draw the ROC and precision-recall curves.

        Args:
            path: file to write (the suffix chooses the format); None writes none.

        Raises:
            SparkDLError: there are no curves, or matplotlib is not installed.
        """
        if not self.curves:
            raise SparkDLError(
                "there are no curves to draw; evaluate a classifier with curves=True"
            )
        remedy = "plot() needs matplotlib; install it with: pip install matplotlib"
        with import_or(SparkDLError(remedy)):
            from matplotlib.figure import Figure
        figure = Figure(figsize=(10.0, 4.0), layout="constrained")
        roc, precision = figure.subplots(1, 2)
        for number, curve in self.curves.items():
            label = f"class {number}, area {curve.roc_auc:.4f}"
            rates = curve.false_positive_rate, curve.true_positive_rate
            roc.step([0.0, *rates[0]], [0.0, *rates[1]], where="post", label=label)
            precision.step(rates[1], curve.precision, where="post", label=f"class {number}")
        roc.set(title="ROC", xlabel="false positive rate", ylabel="true positive rate")
        precision.set(title="precision and recall", xlabel="recall", ylabel="precision")
        roc.legend()
        if path is not None:
            figure.savefig(path)
        return figure


BUILT_IN = frozenset(
    ("rows", "loss", "accuracy", "log_loss", "rmse", "mae", "r2", "roc_auc", "average_precision",
     "curves", "per_class", "confusion")
)  # fmt: skip
"""Names that metrics of the user's cannot have."""


NO_CLASS = -1
"""Class that a row is taken for whose output is NaN."""


class _Row(dict[int, float]):
    """A class's row of a confusion matrix: of many thousand predictions most do not occur."""

    def __missing__(self, prediction: int) -> float:
        """Nothing was taken for it."""
        return 0.0


def classification_scores(
    counts: Mapping[tuple[int, int], float], log_loss_sum: float
) -> ClassificationScores:
    """Scores from a confusion matrix.

    ``counts`` has, by ``(label, prediction)``, which may be `NO_CLASS`, rows, or the sums of their
    weights, which are not all 0; ``log_loss_sum`` is the sum over rows of
    ``-log(probability of the label)`` times weight.
    """
    total = sum(counts.values())
    classes = sorted({c for pair in counts for c in pair if c != NO_CLASS or c == pair[0]})
    confusion = {label: _Row() for label in classes}
    predicted = dict.fromkeys(classes, 0.0)
    for (label, prediction), rows in sorted(counts.items()):
        confusion[label][prediction] = rows
        if prediction != NO_CLASS:
            predicted[prediction] += rows
    return ClassificationScores(
        accuracy=sum(row[label] for label, row in confusion.items()) / total,
        log_loss=log_loss_sum / total,
        per_class={
            label: _class_scores(row[label], sum(row.values()), predicted[label])
            for label, row in confusion.items()
        },
        confusion=confusion,
    )


def _class_scores(right: float, rows: float, predicted: float) -> ClassScores:
    return ClassScores(
        precision=right / predicted if predicted else 0.0,
        recall=right / rows if rows else 0.0,
        f1=2 * right / (rows + predicted) if rows + predicted else 0.0,
        rows=rows,
    )

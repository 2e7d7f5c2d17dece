"""What a task of an evaluation finds out about its rows, and how the parts of all tasks add up.

A `Part` holds sums, counts and states of metrics, never rows. The parts of any cut of the rows add
up to the same whole: counts exactly, other sums to about 1e-12 of their size. Curves are exact, or
cut into bins by a rule that depends on the union alone (`roc_curves`); the states of torchmetrics
are united by their own rules (`train.objective.metrics`).
"""

from __future__ import annotations

import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkdl.config import Task
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference.predict import class_probabilities, likeliest_class
from sparkdl.inference.roc_curves import ScoreTable, limit_for
from sparkdl.inference.scores import (
    ClassificationScores,
    Evaluation,
    RegressionScores,
    classification_scores,
    regression_scores,
)
from sparkdl.train.objective.label_losses import LossSum, loss_of, sums_of
from sparkdl.train.objective.loss import ClassLoss, LossFunction
from sparkdl.train.objective.metrics import Metrics, State, listed_bytes
from sparkdl.train.objective.training_step import taken

MOST_LISTED_BYTES = 64 << 20
"""Largest size of all states of torchmetrics that grow by the row, over all rows."""
_SMALLEST_PROBABILITY = 1e-15
"""A probability of 0 would make the log loss infinite; scikit-learn and Spark clip as well."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What an evaluation shall find out; picklable."""

    task: Task
    loss: Any
    """As the user gave it; see `train.objective.loss.resolve_loss`. With several labels a dict."""
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """By how much each label's loss counts."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Name -> torchmetrics.Metric, or a callable that makes one."""
    num_classes: int = 0
    """Classes that the module tells apart; 0: it is no classifier."""
    curves: tuple[int, ...] = ()
    """Classes whose curves are wanted."""

    def make_loss(self, device: torch.device = _CPU) -> LossFunction:
        """The loss, as training has it."""
        loss = loss_of(self.loss, self.task, self.loss_weights)
        loss.to(device)
        return loss

    def make_metrics(self, loss: LossFunction, device: torch.device = _CPU) -> Metrics:
        """Fresh metrics, in float64."""
        return Metrics(self.metrics, self.task, loss.predictions, device, is_double=True)


def chosen_curves(curves: bool | Sequence[int] | None, num_classes: int) -> tuple[int, ...]:
    """The classes whose curves are wanted; see `TorchModel.evaluate`.

    Raises:
        ConfigError: the model does not tell them apart.
    """
    if curves is None or isinstance(curves, bool):
        if curves and not num_classes:
            raise ConfigError("only classifiers have curves; leave out curves=True")
        return tuple(range(num_classes)) if curves else (1,) * (curves is None and num_classes == 2)
    wrong = [number for number in curves if number not in range(num_classes)]
    if wrong:
        raise ConfigError(f"curves must be classes from 0 to {num_classes - 1}; received {wrong}")
    return tuple(dict.fromkeys(curves))


@dataclass
class Part:
    """What was found out about some of the rows."""

    rows: int = 0
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums over rows by name; ``loss <label>`` for each of several labels."""
    confusion: defaultdict[tuple[int, int], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    """``(label, prediction)`` -> rows, or sum of weights."""
    labels: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of a regression's labels: weight, mean, and weighted squared distances from the mean."""
    metrics: dict[str, list[State]] = field(default_factory=dict)
    curves: dict[int, ScoreTable] = field(default_factory=dict)

    def merge(self, other: Part) -> None:
        """Add another part, whose rows come after this one's; see also `united`."""
        self.rows += other.rows
        for name, value in other.sums.items():
            self.sums[name] += value
        for pair, weight in other.confusion.items():
            self.confusion[pair] += weight
        self.labels = _moments_of_both(self.labels, other.labels)
        for name, states in other.metrics.items():
            self.metrics.setdefault(name, []).extend(states)
        for number, table in other.curves.items():
            self.curves.setdefault(number, ScoreTable(limit=table.limit)).merge(table)

    def listed_bytes(self) -> dict[str, int]:
        """Size of the states of metrics that grow by the row."""
        return {
            name: sum(listed_bytes(state) for _, state in states)
            for name, states in self.metrics.items()
        }

    def to_bytes(self) -> bytes:
        """For a row of Spark's."""
        buffer = io.BytesIO()
        tables = {
            number: (table.limit, table.is_exact, torch.from_numpy(table.settled()))
            for number, table in self.curves.items()
        }
        sums = (dict(self.sums), dict(self.confusion), self.labels)
        torch.save((self.rows, *sums, self.metrics, tables), buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """Inverse of `to_bytes`; nothing is executed."""
        rows, sums, confusion, labels, metrics, tables = torch.load(
            io.BytesIO(data), weights_only=True
        )
        return cls(
            rows=rows,
            sums=defaultdict(float, sums),
            confusion=defaultdict(float, confusion),
            labels=labels,
            metrics=metrics,
            curves={
                number: ScoreTable(limit, is_exact, columns.numpy())
                for number, (limit, is_exact, columns) in tables.items()
            },
        )


def _moments_of_both(
    one: tuple[float, float, float], other: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Unite weighted moments (Chan, Golub, LeVeque: "Updating formulae ...", 1979)."""
    weight = one[0] + other[0]
    if not weight > 0:
        return one
    share, distance = other[0] / weight, other[1] - one[1]
    squares = one[2] + other[2] + distance**2 * one[0] * share
    return weight, one[1] + distance * share, squares


def united(parts: Iterable[Part], measures: Measures) -> Part:
    """The sum of parts, in their order, which are taken one by one.

    Raises:
        ConfigError: states of torchmetrics became too large.
    """
    whole, sizes = Part(), Counter[str]()
    for part in parts:
        sizes.update(part.listed_bytes())
        check_listed(sizes)
        whole.merge(part)
    metrics = measures.make_metrics(measures.make_loss())
    whole.metrics = {name: metrics.united(name, states) for name, states in whole.metrics.items()}
    return whole


def evaluation(part: Part, measures: Measures) -> Evaluation:
    """What follows from the whole.

    Raises:
        DataError: there are no rows.
        ConfigError: a metric's states cannot be united.
    """
    if not part.rows:
        raise DataError("there are no rows to evaluate; check where they come from, and filters")
    sums, loss = part.sums, measures.make_loss()
    divisor = sums["loss_weight"] if sums["loss_weight"] > 0 else math.nan
    by_label: dict[str, float] = {}
    total = sums["loss"]
    if isinstance(loss, LossSum):
        by_label = {name: sums[f"loss {name}"] / divisor for name in loss.parts}
        total = sum(weight * sums[f"loss {name}"] for name, weight in loss.weights.items())
    metrics = measures.make_metrics(loss)
    scores: ClassificationScores | RegressionScores | None = None
    if measures.task == "classification":
        scores = classification_scores(part.confusion, sums["log_loss"])
    elif measures.task == "regression":
        scores = regression_scores(
            weight=part.labels[0],
            squared_error=sums["squared_error"],
            absolute_error=sums["absolute_error"],
            label_variance=part.labels[2],
        )
    return Evaluation(
        rows=part.rows,
        loss=total / divisor,
        loss_by_label=by_label,
        scores=scores,
        metrics={name: metrics.value(name, states) for name, states in part.metrics.items()},
        curves={number: table.curve() for number, table in sorted(part.curves.items())},
        num_classes=measures.num_classes,
    )


class Evaluator:
    """The evaluation of one task's rows: it is shown batches, and gathers a `Part`."""

    def __init__(self, measures: Measures, device: torch.device) -> None:
        self._measures = measures
        self._loss = measures.make_loss(device)
        self._metrics = measures.make_metrics(self._loss, device)
        self._metrics.reset()
        limit = limit_for(len(measures.curves))
        self._part = Part(curves={number: ScoreTable(limit) for number in measures.curves})

    def update(
        self, output: Any, predicted: Any, target: Any, weight: torch.Tensor | None, num_rows: int
    ) -> None:
        """Take note of a batch.

        Args:
            output: what the module returned.
            predicted: the tensor that becomes the prediction; of classes and numbers only.
            target: what the loss compares with.
            weight: ``(batch,)``, on the CPU.
            num_rows: samples.
        """
        weights = torch.ones(num_rows, dtype=torch.float64) if weight is None else weight.double()
        self._part.rows += num_rows
        meant = taken(self._loss, output)
        self._add_loss(meant, target, weights, weight)
        self._metrics.update(meant, target)
        if self._measures.task == "classification":
            self._add_classes(predicted, target, weights)
        elif self._measures.task == "regression":
            self._add_numbers(predicted, target, weights)

    def check(self) -> None:
        """Refuse to go on when metrics keep too much; called from time to time.

        Raises:
            ConfigError: states of torchmetrics that grow by the row became too large.
        """
        check_listed(self._metrics.listed_bytes())

    def part(self) -> Part:
        """All that was found out."""
        seen = self._metrics.seen()
        self._part.metrics = {name: [state] for name, state in seen.items()}
        return self._part

    def _add_loss(
        self, output: Any, target: Any, weights: torch.Tensor, weight: torch.Tensor | None
    ) -> None:
        loss, sums = self._loss, self._part.sums
        names = [f"loss {name}" for name in loss.parts] if isinstance(loss, LossSum) else ["loss"]
        target, unknown = _known_targets(loss, output, target, self._measures)
        found = _losses(loss, output, target, unknown)
        if found is not None:
            losses, counts = found
            counted = (counts > 0) & (weights > 0)  # infinity times nothing would be no number
            for name, values in zip(names, losses, strict=True):
                sums[name] += float((values * weights)[counted].sum())
            sums["loss_weight"] += float((counts * weights).sum())
            return
        total, count, by_label = sums_of(loss, output, target, weight)
        for name, rows, value in zip(names, unknown, by_label or (total,), strict=True):
            costs_infinitely = rows is not None and bool(rows.cpu()[weights > 0].any())
            sums[name] += math.inf if costs_infinitely else float(value)
        sums["loss_weight"] += float(count)

    def _add_classes(self, predicted: Any, target: torch.Tensor, weights: torch.Tensor) -> None:
        labels = target.cpu().long()
        counted = (labels != _ignored(self._loss)) & (weights > 0)
        labels, weights = labels[counted], weights[counted]
        classes = likeliest_class(predicted).cpu()[counted]
        chances = class_probabilities(predicted).cpu()[counted]
        part, num_classes = self._part, chances.shape[1]
        different, place = torch.unique(labels, return_inverse=True)
        pairs, place = torch.unique(place * num_classes + classes, return_inverse=True)
        totals = torch.bincount(place, weights=weights, minlength=len(pairs))
        for pair, total in zip(pairs.tolist(), totals.tolist(), strict=True):
            part.confusion[int(different[pair // num_classes]), pair % num_classes] += total
        chance = chances.gather(1, labels.clamp(0, num_classes - 1)[:, None])[:, 0]
        chance = torch.where(labels < num_classes, chance, 0.0).clamp(min=_SMALLEST_PROBABILITY)
        part.sums["log_loss"] += float((-chance.log() * weights).sum())
        for number, table in part.curves.items():
            table.add(chances[:, number].numpy(), (labels == number).numpy(), weights.numpy())

    def _add_numbers(self, predicted: Any, target: torch.Tensor, weights: torch.Tensor) -> None:
        counted = weights > 0
        weights = weights[counted]
        labels = target.double().cpu().reshape(-1)[counted]
        errors = predicted.double().cpu().reshape(-1)[counted] - labels
        part, weight = self._part, float(weights.sum())
        part.sums["squared_error"] += float((weights * errors**2).sum())
        part.sums["absolute_error"] += float((weights * errors.abs()).sum())
        mean = float((weights * labels).sum()) / weight if weight else 0.0
        moments = weight, mean, float((weights * (labels - mean) ** 2).sum())
        part.labels = _moments_of_both(part.labels, moments)


def row_losses(
    loss: LossFunction, output: Any, target: Any, measures: Measures
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Losses of a batch's samples and by how much each counts, ``(batch,)`` each, in float64.

    The loss of a class that the module does not know is infinite.

    Returns:
        None if the loss knows sums only.
    """
    target, unknown = _known_targets(loss, output, target, measures)
    found = _losses(loss, output, target, unknown)
    if found is None:
        return None
    losses, counts = found
    if not isinstance(loss, LossSum):
        return losses[0], counts
    return sum(w * x for w, x in zip(loss.weights.values(), losses, strict=True)), counts  # type: ignore[return-value]


def _losses(
    loss: LossFunction, output: Any, target: Any, unknown: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor], torch.Tensor] | None:
    """The samples' losses on each label, infinite where it is unknown, and how much they count."""
    counts = None
    if isinstance(loss, LossSum):
        by_label = loss.rows_by_label(output, target)
        if by_label is None:
            return None
        losses = list(by_label.values())
    else:
        rows = loss.rows(output, target)
        if rows is None:
            return None
        losses, counts = [rows[0]], rows[1]
    found = [
        values.double().cpu() if mask is None else
        torch.where(mask.cpu(), torch.inf, values.double().cpu())
        for values, mask in zip(losses, unknown, strict=True)
    ]  # fmt: skip
    return found, torch.ones_like(found[0]) if counts is None else counts.double().cpu()


def _known_targets(
    loss: LossFunction, output: Any, target: Any, measures: Measures
) -> tuple[Any, list[torch.Tensor | None]]:
    """Targets that the loss takes, and by label in which rows, ``(batch,)``, there were others."""
    if not isinstance(loss, LossSum):
        num_classes = measures.num_classes if measures.task == "classification" else 0
        known, unknown = _known(loss, output, target, num_classes)
        return known, [unknown]
    pairs = {name: _known(part, value, target[name]) for name, part, value in loss.pairs(output)}
    return {name: known for name, (known, _) in pairs.items()}, [mask for _, mask in pairs.values()]


def _known(
    loss: LossFunction, output: Any, target: Any, num_classes: int = 0
) -> tuple[Any, torch.Tensor | None]:
    if not num_classes:
        is_number = isinstance(loss, ClassLoss) and isinstance(target, torch.Tensor)
        if not is_number or (target.shape == output.shape and target.is_floating_point()):
            return target, None
        num_classes = output.shape[1]
    unknown = ((target >= num_classes) | (target < 0)) & (target != _ignored(loss))
    return torch.where(unknown, 0, target), unknown.unsqueeze(-1).flatten(1).any(1)


def _ignored(loss: LossFunction) -> int:
    return loss.ignore_index if isinstance(loss, ClassLoss) else -1


def check_listed(sizes: Mapping[str, int]) -> None:
    """Refuse states that grow by the row, with their sizes by metric, if they are too large.

    Raises:
        ConfigError: they are.
    """
    if sum(sizes.values()) <= MOST_LISTED_BYTES:
        return
    name = max(sizes, key=lambda name: sizes[name])
    raise ConfigError(
        f"metric {name!r} keeps something of every row, which came to more than "
        f"{MOST_LISTED_BYTES >> 20} MiB; give it a fixed size (thresholds=... of torchmetrics' "
        f"curves), or leave it out: evaluate makes ROC and precision-recall curves itself "
        f"(curves=True)"
    )

"""What does one task find out about the rows that it evaluates, and how do parts add up?

A `Part` holds sums, counts and states, never rows. Parts of any cut of the rows add up to the same
whole, but for the rounding of single rows: sums are compensated (`compensated`), tables are exact
or cut into bins by a rule that depends on the union alone (`curves`), torchmetrics are united by
the rules of their own states (`train.metrics`).
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparkdl.config import Task
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference.exact_sums import Moments, Sums, exact_sum
from sparkdl.inference.predict import class_probabilities, likeliest_class
from sparkdl.inference.roc_curves import ScoreTable, limit_for
from sparkdl.inference.scores import (
    ClassificationScores,
    Evaluation,
    RegressionScores,
    classification_scores,
    regression_scores,
)
from sparkdl.train.objective.label_losses import LossSum, loss_of
from sparkdl.train.objective.loss import ClassLoss, LossFunction
from sparkdl.train.objective.metrics import Metrics, State, on_cpu
from sparkdl.train.objective.training_step import taken

LISTED_BYTES = 64 << 20
"""Largest size of all states of torchmetrics that grow by the row, over all rows."""
_SMALLEST_PROBABILITY = 1e-15
"""A probability of 0 would make the log loss infinite; scikit-learn and Spark clip as well."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What an evaluation shall find out; picklable."""

    task: Task
    loss: Any
    """As the user gave it; see `train.loss.resolve_loss`. With several labels a dict by label."""
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
        loss = loss_of(self)
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
    sums: Sums = field(default_factory=Sums)
    labels: Moments = field(default_factory=Moments)
    """Of a regression's labels."""
    metrics: dict[str, list[State]] = field(default_factory=dict)
    curves: dict[int, ScoreTable] = field(default_factory=dict)

    def merge(self, other: Part) -> None:
        """Add another part, whose rows come after this one's; see also `united`."""
        self.rows += other.rows
        self.sums.merge(other.sums)
        self.labels.merge(other.labels)
        for name, states in other.metrics.items():
            self.metrics.setdefault(name, []).extend(states)
        for number, table in other.curves.items():
            self.curves.setdefault(number, ScoreTable(limit=table.limit)).merge(table)

    def listed_bytes(self) -> dict[str, int]:
        """Size of the states of metrics that grow by the row."""
        return {
            name: sum(_listed(value) for _, state in states for value in state.values())
            for name, states in self.metrics.items()
        }

    def to_bytes(self) -> bytes:
        """For a row of Spark's."""
        buffer = io.BytesIO()
        tables = {number: _tensors(table.to_dict()) for number, table in self.curves.items()}
        labels = (self.labels.weight, self.labels.mean, self.labels.squares)
        torch.save((self.rows, self.sums.to_dict(), labels, self.metrics, tables), buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """Inverse of `to_bytes`; nothing is executed."""
        rows, sums, labels, metrics, tables = torch.load(io.BytesIO(data), weights_only=True)
        return cls(
            rows=rows,
            sums=Sums.from_dict(sums),
            labels=Moments(*labels),
            metrics=metrics,
            curves={number: ScoreTable(**_arrays(table)) for number, table in tables.items()},
        )


def united(parts: Sequence[Part], measures: Measures) -> Part:
    """The sum of parts, in their order.

    Raises:
        ConfigError: states of torchmetrics became too large.
    """
    whole = Part()
    for part in parts:
        whole.merge(part)
    metrics = measures.make_metrics(measures.make_loss())
    whole.metrics = {name: metrics.united(name, states) for name, states in whole.metrics.items()}
    check_listed(whole.listed_bytes())
    return whole


def evaluation(part: Part, measures: Measures) -> Evaluation:
    """What follows from the whole.

    Raises:
        DataError: there are no rows.
        ConfigError: a metric's states cannot be united.
    """
    if not part.rows:
        raise DataError("there are no rows to evaluate; check where they come from, and filters")
    sums = part.sums
    metrics = measures.make_metrics(measures.make_loss())
    divisor = sums["loss_weight"] if sums["loss_weight"] > 0 else math.nan
    loss = measures.make_loss()
    by_label: dict[str, float] = {}
    total = sums["loss"]
    if isinstance(loss, LossSum):
        by_label = {name: sums[f"loss {name}"] / divisor for name in loss.names}
        total = math.fsum(loss.weights[name] * sums[f"loss {name}"] for name in loss.names)
    return Evaluation(
        rows=part.rows,
        loss=total / divisor,
        loss_by_label=by_label,
        scores=_scores(part, measures.task),
        metrics={name: metrics.value(name, states) for name, states in part.metrics.items()},
        curves={number: table.curve() for number, table in sorted(part.curves.items())},
        num_classes=measures.num_classes,
    )


def _scores(part: Part, task: Task) -> ClassificationScores | RegressionScores | None:
    sums = part.sums
    if task == "classification":
        counts = {pair: sums[pair] for pair in sums if isinstance(pair, tuple)}
        return classification_scores(counts, sums["log_loss"])
    if task == "regression":
        return regression_scores(
            weight=sums["weight"],
            squared_error=sums["squared_error"],
            absolute_error=sums["absolute_error"],
            label_variance=part.labels.squares,
        )
    return None


class Evaluator:
    """One task's evaluation: shown batches, it gathers a `Part`."""

    def __init__(self, measures: Measures, device: torch.device) -> None:
        self._measures = measures
        self._loss = measures.make_loss(device)
        self._metrics = measures.make_metrics(self._loss, device)
        self._metrics.reset()
        limit = limit_for(len(measures.curves))
        self._part = Part(curves={number: ScoreTable(limit=limit) for number in measures.curves})

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
        weights = np.ones(num_rows) if weight is None else weight.double().numpy()
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
        seen = on_cpu(self._metrics.seen())
        self._part.metrics = {name: [state] for name, state in seen.items()}
        return self._part

    def _add_loss(
        self, output: Any, target: Any, weights: np.ndarray, weight: torch.Tensor | None
    ) -> None:
        sums = self._part.sums
        if isinstance(self._loss, LossSum):
            self._add_label_losses(self._loss, output, target, weights, weight)
            return
        losses = row_losses(self._loss, output, target, self._measures)
        if losses is None:
            loss_sum, count = self._loss(output, target, weight)
            sums.add("loss", float(loss_sum))
            sums.add("loss_weight", float(count))
            return
        values, counts = losses
        counted = (counts > 0) & (weights > 0)  # infinity times nothing would be no number
        sums.add("loss", exact_sum((values[counted] * weights[counted]).tolist()))
        sums.add("loss_weight", exact_sum((counts * weights).tolist()))

    def _add_label_losses(
        self,
        loss: LossSum,
        output: Any,
        target: Any,
        weights: np.ndarray,
        weight: torch.Tensor | None,
    ) -> None:
        """The losses of all labels; their sum follows from them."""
        sums, counted = self._part.sums, weights > 0
        target, unknown = _known_labels(loss, output, target)
        for name, rows in unknown.items():
            if bool(rows.cpu().numpy()[counted].any()):
                sums.add(f"loss {name}", math.inf)
        by_label = loss.rows_by_label(output, target)
        if by_label is None:
            _, count, totals = loss.apart(output, target, weight)
            for name, total in zip(loss.names, totals, strict=True):
                sums.add(f"loss {name}", float(total))
            sums.add("loss_weight", float(count))
            return
        for name, losses in by_label.items():
            values = losses.double().cpu().numpy()[counted] * weights[counted]
            sums.add(f"loss {name}", exact_sum(values.tolist()))
        sums.add("loss_weight", exact_sum(weights.tolist()))

    def _add_classes(self, predicted: Any, target: torch.Tensor, weights: np.ndarray) -> None:
        labels = target.cpu().numpy().astype(np.int64)
        counted = (labels != _ignored(self._loss)) & (weights > 0)
        labels, weights = labels[counted], weights[counted]
        classes = likeliest_class(predicted).cpu().numpy()[counted]
        chances = class_probabilities(predicted).cpu().numpy()[counted]
        sums = self._part.sums
        sums.add("weight", exact_sum(weights.tolist()))
        pairs, place = np.unique(np.stack([labels, classes], 1), axis=0, return_inverse=True)
        totals = np.bincount(place.reshape(-1), weights=weights, minlength=len(pairs))
        for (label, number), total in zip(pairs.tolist(), totals.tolist(), strict=True):
            sums.add((label, number), total)
        known = labels < chances.shape[1]
        chance = np.where(known, chances[np.arange(len(labels)), np.where(known, labels, 0)], 0.0)
        losses = -np.log(np.maximum(chance, _SMALLEST_PROBABILITY))
        sums.add("log_loss", exact_sum((losses * weights).tolist()))
        for number, table in self._part.curves.items():
            table.add(chances[:, number], labels == number, weights)

    def _add_numbers(self, predicted: Any, target: torch.Tensor, weights: np.ndarray) -> None:
        counted = weights > 0
        labels = target.double().cpu().reshape(-1).numpy()[counted]
        errors = predicted.double().cpu().reshape(-1).numpy()[counted] - labels
        weights = weights[counted]
        sums = self._part.sums
        sums.add("weight", exact_sum(weights.tolist()))
        sums.add("squared_error", exact_sum((weights * errors**2).tolist()))
        sums.add("absolute_error", exact_sum((weights * np.abs(errors)).tolist()))
        self._part.labels.merge(Moments.of(labels.tolist(), weights.tolist()))


def row_losses(
    loss: LossFunction, output: Any, target: Any, measures: Measures
) -> tuple[np.ndarray, np.ndarray] | None:
    """Losses of a batch's samples and by how much each counts, ``(batch,)`` each, in float64.

    The loss of a class that the module does not know is infinite.

    Returns:
        None if the loss knows sums only.
    """
    if isinstance(loss, LossSum):
        target, by_label = _known_labels(loss, output, target)
        unknown = torch.stack(list(by_label.values())).any(0) if by_label else None
    else:
        num_classes = measures.num_classes if measures.task == "classification" else 0
        target, unknown = _known(loss, output, target, num_classes)
    rows = loss.rows(output, target)
    if rows is None:
        return None
    losses, counts = (None if value is None else value.double().cpu() for value in rows)
    assert losses is not None
    if unknown is not None:
        losses = torch.where(unknown.cpu(), torch.inf, losses)
    return losses.numpy(), np.ones(len(losses)) if counts is None else counts.numpy()


def alone(losses: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The loss of a batch that consists of one row, for each row; NaN where none would count."""
    found: np.ndarray = np.full_like(losses, np.nan)
    np.divide(losses, counts, out=found, where=counts > 0)
    return found


def _known(
    loss: LossFunction, output: Any, target: Any, num_classes: int = 0
) -> tuple[Any, torch.Tensor | None]:
    """Targets that the loss takes, and in which rows, ``(batch,)``, there were others."""
    if not num_classes:
        is_number = isinstance(loss, ClassLoss) and isinstance(target, torch.Tensor)
        if not is_number or (target.shape == output.shape and target.is_floating_point()):
            return target, None
        num_classes = output.shape[1]
    unknown = ((target >= num_classes) | (target < 0)) & (target != _ignored(loss))
    return torch.where(unknown, 0, target), unknown.unsqueeze(-1).flatten(1).any(1)


def _known_labels(
    loss: LossSum, output: Any, target: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The same for several labels."""
    pairs = {
        name: _known(loss.part(name), loss.output_for(name, output), target[name])
        for name in loss.names
    }
    unknown = {name: mask for name, (_, mask) in pairs.items() if mask is not None}
    return {name: pair[0] for name, pair in pairs.items()}, unknown


def _ignored(loss: LossFunction) -> int:
    return loss.ignore_index if isinstance(loss, ClassLoss) else -1


def _listed(value: Any) -> int:
    return sum(t.nbytes for t in value) if isinstance(value, list) else 0


def check_listed(sizes: Mapping[str, int]) -> None:
    """Refuse states, with their sizes by metric, that are too large to be gathered."""
    if sum(sizes.values()) <= LISTED_BYTES:
        return
    name = max(sizes, key=lambda name: sizes[name])
    raise ConfigError(
        f"metric {name!r} keeps something of every row, which came to more than "
        f"{LISTED_BYTES >> 20} MiB; give it a fixed size (thresholds=... of torchmetrics' curves), "
        f"or leave it out: evaluate makes ROC and precision-recall curves itself (curves=True)"
    )


def _tensors(table: Mapping[str, Any]) -> dict[str, Any]:
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in table.items()}


def _arrays(table: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in table.items()}

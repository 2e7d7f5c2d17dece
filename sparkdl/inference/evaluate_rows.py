"""The evaluation of rows in a task, and how the parts of all tasks add up.

A `Part` holds sums, counts and states of metrics, never rows. The parts of any cut of the rows add
up to the same whole: counts exactly, other sums to about 1e-12 of their size. Curves are exact, or
cut into bins by a rule that depends on the union alone (`roc_curves`); the states of torchmetrics
are united by their own rules (`train.objective.metrics`).
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch

from sparkdl import errors
from sparkdl.config import Task
from sparkdl.data.column_readers import BadRows, read
from sparkdl.data.column_rules import refuse_bad, stored_dtype
from sparkdl.data.plan import Column, SpoolColumn
from sparkdl.data.ragged import Ragged
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference.scores import Evaluation
from sparkdl.inputs import Tensor
from sparkdl.train.objective.label_losses import LossSum, loss_of
from sparkdl.train.objective.loss import CallableLoss, ClassLoss, LossFunction, LossRows, Sums
from sparkdl.train.objective.metric_states import State, listed_bytes
from sparkdl.train.objective.metrics import Metrics
from sparkdl.train.objective.roc_curves import ScoreTable, limit_for
from sparkdl.train.objective.training_step import taken

MOST_LISTED_BYTES = 64 << 20
"""Largest size of all states of torchmetrics that grow by the row, over all rows."""
_CPU = torch.device("cpu")
_OF_BATCH = " of a record batch"


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Names the measures that an evaluation shall find out; picklable."""

    task: Task
    loss: Any
    """As the user gave it; see `train.objective.loss.resolve_loss`. With several labels a dict."""
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each label's loss."""
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
    """The classes whose curves are wanted, or ConfigError; see `TorchModel.evaluate`."""
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
    """The results of an evaluation for some of the rows."""

    sums: dict[str | tuple[int, int], float] = field(default_factory=dict)
    """Sums over rows by name: ``rows``, ``loss`` or ``loss <label>`` for each of several labels,
    ``log_loss`` ...; under ``(label, prediction)`` the rows with these, or their weights."""
    labels: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Moments of a regression's labels: weight, mean, weighted squared distances from the mean."""
    metrics: dict[str, list[State]] = field(default_factory=dict)
    curves: dict[int, ScoreTable] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    """Name and text of the error of ours that kept the rest from being found out."""

    def add(self, name: str | tuple[int, int], value: float) -> None:
        """Add to a sum."""
        self.sums[name] = self.sums.get(name, 0) + value

    def merge(self, other: Part) -> None:
        """Add another part, whose rows come after this one's; see also `united`."""
        for name, value in other.sums.items():
            self.add(name, value)
        self.labels = united_moments(self.labels, other.labels)
        for metric, states in other.metrics.items():
            self.metrics.setdefault(metric, []).extend(states)
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
        for table in self.curves.values():
            table.settle()
        tables = {number: vars(table) for number, table in self.curves.items()}
        torch.save({**vars(self), "curves": tables}, buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """Inverse of `to_bytes`; nothing is executed."""
        found = torch.load(io.BytesIO(data), weights_only=True)
        tables = {number: ScoreTable(**table) for number, table in found["curves"].items()}
        return cls(**{**found, "curves": tables})


def united_moments(
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

    ConfigError if states of torchmetrics became too large, SparkDLError for what went wrong in the
    first part that failed.
    """
    whole, sizes = Part(), Counter[str]()
    for part in parts:
        if part.error is not None:
            name, text = part.error
            raise getattr(errors, name)(text)
        sizes.update(part.listed_bytes())
        check_listed(sizes)
        whole.merge(part)
    metrics = measures.make_metrics(measures.make_loss())
    whole.metrics = {name: metrics.united(name, states) for name, states in whole.metrics.items()}
    return whole


def evaluation(part: Part, measures: Measures) -> Evaluation:
    """Compute the evaluation from the united parts.

    DataError if there are no rows, or none that counts; ConfigError if a metric's states cannot be
    united.
    """
    sums, loss = part.sums, measures.make_loss()
    if not sums:
        raise DataError("there are no rows to evaluate; check where they come from, and filters")
    weights = loss.weights if isinstance(loss, LossSum) else {}
    total = sum(w * sums[f"loss {n}"] for n, w in weights.items()) if weights else sums["loss"]
    divisor = sums["loss_weight"] or math.nan
    metrics = measures.make_metrics(loss)
    scores = measures.task.scores(part)
    if measures.task.has_one_label and scores is None:
        raise DataError(
            "no row counts: all have weight 0 or a class that the loss ignores; check the "
            "weights, and filters"
        )
    return Evaluation(
        rows=int(sums["rows"]),
        loss=total / divisor,
        loss_by_label={name: sums[f"loss {name}"] / divisor for name in weights},
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
        """Take note of a batch of ``num_rows`` samples; ``weight`` is ``(batch,)``, on the CPU.

        ``output`` is what the module returned, ``target`` what the loss compares with,
        ``predicted``, of classes and numbers only, the tensor that becomes the prediction.
        """
        weights = torch.ones(num_rows, dtype=torch.float64) if weight is None else weight.double()
        self._part.add("rows", num_rows)
        meant = taken(self._loss, output)
        count = 0.0
        for label in _label_losses(self._loss, meant, target, self._measures):
            total, count = label.sums(weight, weights)
            self._part.add(label.name, total)
        self._part.add("loss_weight", count)
        self._metrics.update(meant, target, weight)
        if self._measures.task.has_one_label:
            ignored = _ignored(self._loss)
            self._measures.task.add_rows(self._part, predicted, target, weights, ignored)

    def check(self) -> None:
        """Raise ConfigError if metrics keep too much; called from time to time."""
        check_listed(self._metrics.listed_bytes())

    def part(self) -> Part:
        """All that was found out."""
        seen = self._metrics.state_dict()
        self._part.metrics = {name: [state] for name, state in seen.items()}
        return self._part


@dataclass(frozen=True)
class _LabelLoss:
    """The loss of one label, and what it compares in a batch."""

    name: str
    """In `Part.sums`."""
    factor: float | None
    """Weight of the loss where there are several labels; None: it is the only one."""
    loss: LossFunction
    output: Any
    target: Any
    """With class 0 in place of those that the module does not know."""
    unknown: torch.Tensor | None
    """In which rows, ``(batch,)``, there were such: they cost infinitely."""

    def rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Losses of the samples and by how much each counts; None: the loss knows sums only."""
        return self._counted(self.loss.rows(self.output, self.target))

    def _counted(self, found: LossRows | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        if found is None:
            return None
        losses, counts = found[0].double().cpu(), found[1]
        if self.unknown is not None:
            losses = torch.where(self.unknown.cpu(), torch.inf, losses)
        return losses, torch.ones_like(losses) if counts is None else counts.double().cpu()

    def sums(self, weight: torch.Tensor | None, weights: torch.Tensor) -> tuple[float, float]:
        """Sums of the losses and of what counts; ``weights`` are 1 where there is no ``weight``."""
        sums: Sums | None = None
        if isinstance(self.loss, CallableLoss):  # called once: it may count its calls
            of_rows, sums = self.loss.rows_or_sums(self.output, self.target, weight)
            found = self._counted(of_rows)
        else:
            found = self.rows()
        if found is None:
            total, count = self.loss(self.output, self.target, weight) if sums is None else sums
            is_unknown = self.unknown is not None and bool(self.unknown.cpu()[weights > 0].any())
            counted = count if self.factor is None else weights.sum()
            return math.inf if is_unknown else float(total), float(counted)
        losses, counts = found
        kept = (counts > 0) & (weights > 0)  # infinity times nothing would be no number
        return float((losses * weights)[kept].sum()), float((counts * weights).sum())


def _label_losses(
    loss: LossFunction, output: Any, target: Any, measures: Measures
) -> Iterator[_LabelLoss]:
    """The loss of each label; ``output`` is what the loss takes of the module's."""
    if isinstance(loss, LossSum):
        for name, part, seen in loss.pairs(output):
            known = _known(part, seen, target[name])
            yield _LabelLoss(f"loss {name}", loss.weights[name], part, seen, *known)
    else:
        known = _known(loss, output, target, measures.num_classes)
        yield _LabelLoss("loss", None, loss, output, *known)


def row_losses(loss: LossFunction, output: Any, target: Any, measures: Measures) -> pa.Array:
    """The loss of a batch of each row alone, in float64; null where the row counts for nothing.

    The loss of a class that the module does not know is infinite. ConfigError if the loss knows
    sums only.
    """
    total: Any = 0.0
    counts = torch.empty(0)
    for label in _label_losses(loss, taken(loss, output), target, measures):
        found = label.rows()
        if found is None:
            raise ConfigError(
                "the loss gives one number for a whole batch, so single rows have no loss; let it "
                "return the loss of each sample, (batch,)"
            )
        losses, counts = found
        total = total + (losses if label.factor is None else label.factor * losses)
    return pa.array((total / counts).numpy(), mask=(counts == 0).numpy())


def _known(
    loss: LossFunction, output: Any, target: Any, num_classes: int = 0
) -> tuple[Any, torch.Tensor | None]:
    """The target with class 0 for unknown ones, and which rows, ``(batch,)``, had such."""
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
    """Raise ConfigError if states that grow by the row, of these sizes by metric, are too large."""
    if sum(sizes.values()) <= MOST_LISTED_BYTES:
        return
    name = max(sizes, key=lambda name: sizes[name])
    raise ConfigError(
        f"metric {name!r} keeps something of every row, which came to more than "
        f"{MOST_LISTED_BYTES >> 20} MiB; give it a fixed size (thresholds=... of torchmetrics' "
        f"curves), or leave it out: evaluate makes ROC and precision-recall curves itself "
        f"(curves=True)"
    )


def read_labels(array: pa.Array, asked: SpoolColumn) -> tuple[Column, torch.Tensor | Ragged]:
    """One value per row of a label, or of the weights, and the column that they make.

    DataError for a null, a value that is not finite, a negative weight, or a value that is no class
    number where one is needed; or rows that do not fit the label's shape.
    """
    try:
        rows = read(array, asked.kind, where=_OF_BATCH)
    except BadRows as error:
        raise DataError(error.findings.message(asked.name)) from None
    found = rows.parts[-1] if isinstance(rows, Ragged) else rows
    if rows is found:
        refuse_bad(found, asked, lambda row: f"row {row}{_OF_BATCH}")
    values = found.astype(stored_dtype(asked, found.dtype))
    shape = (rows.shape or ()) if isinstance(rows, Ragged) else values.shape[1:]
    column = asked.found(shape, values.dtype.name)
    if isinstance(rows, Ragged):
        return column, Ragged((*rows.parts[:-1], values), rows.offsets, rows.shape)
    if isinstance(asked.kind, Tensor) and asked.kind.shape is not None and len(values):
        column = column.reshaped(asked.kind.shape)
        values = values.reshape(len(values), *column.shape)
    return column, torch.from_numpy(values)

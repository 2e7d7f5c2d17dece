"""The metrics that users name: what each means for two classes, for more, and for numbers.

A name becomes a metric once an output of the module is known, which says how many classes there
are; the driver sees one when it tries the module on some rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.config import Task
from sparkdl.errors import ConfigError, unknown
from sparkdl.train.objective.label_losses import LossSum, of_label
from sparkdl.train.objective.loss import ClassLoss, LossFunction, ModuleLoss
from sparkdl.train.objective.training_step import StepLoss
from sparkdl.train.objective.weighted_metrics import (
    OfClasses,
    OfErrors,
    OfScores,
    OfSpread,
    WeightedMetric,
)

ACCURACY = "accuracy"

_OF_SCORES = ("auroc", "average_precision")
"""Metrics that keep the scores of all rows."""
_OF_SPREAD = ("explained_variance", "r2")
"""Metrics that compare with the spread of the labels."""
OF_CLASSES = (
    ACCURACY, "auroc", "average_precision", "cohen_kappa", "f1", "mcc", "precision", "recall",
    "specificity",
)  # fmt: skip
_OF_ROUNDING = 1e-2
"""Amount by which probabilities of bfloat16 may fail to add up to 1."""
OF_NUMBERS = ("explained_variance", "mae", "mape", "mse", "r2", "rmse")


@dataclass(frozen=True, kw_only=True)
class NamedMetric:
    """The metric that a name stands for."""

    name: str
    num_classes: int | None = None
    """That the module tells apart; None: it is a metric of numbers."""
    ignore_index: int | None = None
    """The class number of targets that do not count."""

    def make(self, device: torch.device) -> WeightedMetric:
        """The metric, before any rows."""
        if self.num_classes is None:
            is_share = self.name in _OF_SPREAD
            return (OfSpread if is_share else OfErrors)(self.name, device)
        kind = OfScores if self.name in _OF_SCORES else OfClasses
        return kind(self.name, device, self.num_classes, self.ignore_index)

    def sees(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        """Probabilities and class numbers as the metric wants them; of two classes those of 1.

        Numbers for each class that do not add up to 1 are logits, of a loss that does not say so.
        """
        if output.shape != target.shape and output.dim() > 1 and output.shape[1] > 1:
            if bool(((output.sum(1) - 1).abs() > _OF_ROUNDING).any()):
                output = output.softmax(1)
            if self.num_classes == 2:
                output = output[:, 1]
        return output, target.long()


def flat(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str | None, Any]]:
    """Each metric with its name in the history and the label that it is of, if it is of one."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            for inner, metric in value.items():
                yield f"{name}_{inner}", name, metric
        else:
            yield name, None, value


def default_metrics(task: Task, loss: LossFunction) -> dict[str, NamedMetric]:
    """Return the metrics of a user who named none.

    None if a training step computes the loss, since a metric would run the module once more.
    """
    names = () if isinstance(loss, StepLoss) else task.default_metrics
    return {name: NamedMetric(name=name) for name in names}


def metric_names(metrics: Mapping[str, Any] | None, task: Task) -> list[str]:
    """The names that the history will have, without ``val_``."""
    if metrics is None:
        return [*task.default_metrics]
    return [name for name, _, _ in flat(metrics)]


def check_names(metrics: Mapping[str, Any] | None, task: Task, loss: LossFunction) -> None:
    """Raise ConfigError for names that are unknown, or are of another task."""
    for key, label, name in flat(metrics or {}):
        if not isinstance(name, str):
            continue
        name, of_classes = name.lower(), name.lower() in OF_CLASSES
        part = _loss_of(loss, key, label)
        compares = task.compares - ({"numbers"} if isinstance(part, ClassLoss) else set())
        known = [*OF_CLASSES] * ("classes" in compares) + [*OF_NUMBERS] * ("numbers" in compares)
        if name in known:
            continue
        if of_classes or name in OF_NUMBERS:
            raise ConfigError(
                f"metric {key!r}: {name!r} compares {'classes' if of_classes else 'numbers'}, "
                f"which this label is not; known here: {', '.join(known)}"
            )
        else:
            raise unknown("metric", name, known, "; for others pass a torchmetrics.Metric")


def resolved(
    metrics: Mapping[str, Any] | None,
    loss: LossFunction,
    output: Any,
    labels: Sequence[str] = (),
) -> dict[str, Any] | None:
    """The user's metrics with a `NamedMetric` in place of each name; None stays None.

    ``loss`` says which part of the output a label is compared with, and ``output`` is what the
    module returned for some rows, as the loss takes it; ``labels`` are the names of several.
    ConfigError if a name does not fit the output.
    """
    if metrics is None:
        return None
    found: dict[str, Any] = {}
    for key, label, metric in flat(metrics):
        if isinstance(metric, str):
            metric = _resolved(key, label, metric.lower(), loss, output, labels)
        if label is None:
            found[key] = metric
        else:
            found.setdefault(label, {})[key.removeprefix(f"{label}_")] = metric
    return found


def _resolved(
    key: str,
    label: str | None,
    name: str,
    loss: LossFunction,
    output: Any,
    labels: Sequence[str],
) -> NamedMetric:
    if name in OF_NUMBERS:
        return NamedMetric(name=name)
    part = _loss_of(loss, key, label)
    with torch.no_grad():
        seen = loss.predictions(output)
    seen = of_label(seen, label, labels) if label is not None else seen
    if not isinstance(seen, torch.Tensor):
        raise ConfigError(
            f"metric {key!r}: {name!r} needs one tensor, and the module returns "
            f"{type(seen).__name__}; pass a torchmetrics.Metric of your own"
        )
    # Losses of torch's kind that are none of classes compare each number with one of the target.
    is_binary = isinstance(part, ModuleLoss) and not isinstance(part, ClassLoss)
    num_classes = 2 if is_binary or seen.dim() == 1 else max(2, seen.shape[1])
    ignored = part.ignore_index if isinstance(part, ClassLoss) else None
    return NamedMetric(name=name, num_classes=num_classes, ignore_index=ignored)


def _loss_of(loss: LossFunction, key: str, label: str | None) -> LossFunction:
    """The loss that compares what a metric does; ConfigError if that is none of several labels."""
    loss = loss.shown if isinstance(loss, StepLoss) else loss
    if not isinstance(loss, LossSum):
        return loss
    if label not in loss.parts:
        raise ConfigError(
            f"metric {key!r} must be of one of the labels {list(loss.parts)}: "
            f"metrics={{{next(iter(loss.parts))!r}: [{key!r}]}}"
        )
    return loss.parts[label]

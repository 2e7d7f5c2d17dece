"""What a LightningModule logs, as sums over samples that add up over batches, ranks and rounds."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.train.objective.metric_states import merged, scalar, seen_by, united

if TYPE_CHECKING:
    from torchmetrics import Metric

REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda a, b: a + b,  # of value times weight
    "sum": lambda a, b: a + b,
    "min": min,
    "max": max,
}
_OWN = ("epoch", "steps", "learning_rate", "seconds")
"""Entries of the history that nobody else may fill."""


class Logs:
    """What one rank has logged since the epoch, or the evaluation, began.

    Attributes:
        without_loss: batches of validation rows whose step gave no loss.
    """

    def __init__(self) -> None:
        self.without_loss = 0
        self._numbers: dict[str, tuple[str, Any, float]] = {}
        """Name -> reduction; the values so far, with their weights for a mean; the weights."""
        self._metrics: dict[str, str] = {}
        """Name -> path of the metric in the module."""

    def number(self, name: str, value: float | torch.Tensor, weight: float, reduce: str) -> None:
        """Take note of a number, which counts ``weight`` times in a mean.

        Raises:
            ConfigError: the name is taken, or was used in another way.
        """
        self._check(name, self._metrics, self._numbers.get(name, (reduce,))[0] != reduce)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            value = float(value)  # numbers take a tenth of the time of small tensors
        elif isinstance(value, torch.Tensor):
            value = value.double()
        value = value * weight if reduce == "mean" else value
        if name in self._numbers:
            _, before, weight_before = self._numbers[name]
            value, weight = REDUCTIONS[reduce](before, value), weight_before + weight
        self._numbers[name] = reduce, value, weight

    def metric(self, name: str, path: str) -> None:
        """Take note of a metric that is a part of the module.

        Raises:
            ConfigError: the name is taken, or was used in another way.
        """
        self._check(name, self._numbers, self._metrics.get(name, path) != path)
        self._metrics[name] = path

    def _check(self, name: str, others: Mapping[str, Any], is_other: bool) -> None:
        if name in _OWN:
            raise ConfigError(
                f"self.log({name!r}): the history has an entry of that name already; use another"
            )
        if name in others or is_other:
            raise ConfigError(f"self.log({name!r}) was called in two ways that differ")

    def reset_metrics(self, module: nn.Module) -> None:
        """Have the metrics that were logged forget all samples."""
        for path in self._metrics.values():
            _metric(module, path).reset()

    def state_dict(self) -> dict[str, Any]:
        """What was logged, as plain values; metrics by their names only."""
        return {
            "numbers": {
                name: [reduce, float(value), float(weight)]
                for name, (reduce, value, weight) in self._numbers.items()
            },
            "metrics": dict(self._metrics),
            "without_loss": self.without_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._numbers = {
            name: (reduce, value, weight)
            for name, (reduce, value, weight) in state["numbers"].items()
        }
        self._metrics = dict(state["metrics"])
        self.without_loss = state["without_loss"]

    def packed(self, module: nn.Module) -> bytes:
        """What was logged, with the states of the metrics, for `values`."""
        metrics, state = metrics_of(module), self.state_dict()
        state["metrics"] = {
            name: [path, [seen_by(metrics[path])]] for name, path in self._metrics.items()
        }
        return _bytes(state)


def added(parts: Iterable[bytes], module: nn.Module) -> bytes:
    """What several ranks, or several rounds, have logged, together.

    Args:
        parts: what `Logs.packed` or `added` gave, in the order of ranks.
        module: has the metrics that were logged.
    """
    total: dict[str, Any] = {"numbers": {}, "metrics": {}, "without_loss": 0}
    for data in parts:
        part = torch.load(io.BytesIO(data), weights_only=True)
        total["without_loss"] += part["without_loss"]
        for name, (reduce, value, weight) in part["numbers"].items():
            if name in total["numbers"]:
                _, before, weight_before = total["numbers"][name]
                value, weight = REDUCTIONS[reduce](before, value), weight_before + weight
            total["numbers"][name] = [reduce, value, weight]
        for name, (path, states) in part["metrics"].items():
            total["metrics"].setdefault(name, [path, []])[1].extend(states)
    for entry in total["metrics"].values():
        entry[1] = united(_metric(module, entry[0]), entry[1])
    return _bytes(total)


def fill(record: dict[str, float], parts: Iterable[bytes], module: nn.Module) -> None:
    """Enter what all ranks have logged into a record of the history.

    What a module logs as ``loss`` or ``val_loss`` takes the place of the loop's own, and without a
    loss there is no ``val_loss``.
    """
    total = torch.load(io.BytesIO(added(parts, module)), weights_only=True)
    if total["without_loss"]:
        record.pop("val_loss", None)
    for name, (reduce, value, weight) in total["numbers"].items():
        record[name] = value / weight if reduce == "mean" else value
    for name, (path, states) in total["metrics"].items():
        record[name] = scalar(name, merged(_metric(module, path), states).compute())


def as_text(data: bytes) -> str:
    """Packed logs for JSON."""
    return base64.b64encode(data).decode()


def from_text(text: str) -> bytes:
    """Inverse of `as_text`."""
    return base64.b64decode(text)


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """The torchmetrics in a module, by their paths."""
    if "torchmetrics" not in sys.modules:  # then there are none
        return {}
    from torchmetrics import Metric, MetricCollection

    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.values()  # those that share a state have it now
    return {path: part for path, part in module.named_modules() if isinstance(part, Metric)}


def _metric(module: nn.Module, path: str) -> Metric:
    metric: Any = module.get_submodule(path)
    return metric  # type: ignore[no-any-return]


def _bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()

"""The logs of a LightningModule, as values that add up over batches, ranks and rounds."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.train.objective.metric_states import (
    Number,
    packed,
    scalar,
    values_of,
    with_number,
)

if TYPE_CHECKING:
    from torchmetrics import Metric

WITHOUT_LOSS = "batches without a loss"
"""Number of the validation batches whose step gave no loss; no entry of the history."""
_OWN = ("epoch", "steps", "learning_rate", "seconds")
"""Entries of the history that nobody else may fill."""


class Logs:
    """The logs of one rank since the epoch, or the evaluation, began."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._numbers: dict[str, Number] = {}
        self._metrics: dict[str, str] = {}
        """Name -> path of the metric in the module."""

    def number(self, name: str, value: float | torch.Tensor, weight: float, reduce: str) -> None:
        """Take note of a number, which counts ``weight`` times in a mean.

        ConfigError if the name is taken, or was used in another way.
        """
        before = self._numbers.get(name)
        self._check(name, self._metrics, before is not None and before[0] != reduce)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            value = float(value)  # numbers take a tenth of the time of small tensors
        elif isinstance(value, torch.Tensor):
            value = value.double()
        value = value * weight if reduce == "mean" else value
        self._numbers[name] = with_number(before, (reduce, value, weight))

    def metric(self, name: str, path: str) -> None:
        """Take note of a metric that is a part of the module; ConfigError as from `number`."""
        self._check(name, self._numbers, self._metrics.get(name, path) != path)
        self._metrics[name] = path

    def _check(self, name: str, others: Mapping[str, Any], is_other: bool) -> None:
        if name in _OWN:
            raise ConfigError(
                f"self.log({name!r}): the history has an entry of that name already; use another"
            )
        if name in others or is_other:
            raise ConfigError(f"self.log({name!r}) was called in two ways that differ")

    def reset_metrics(self) -> None:
        """Have the metrics that were logged forget all samples."""
        for path in self._metrics.values():
            _metric(self._module, path).reset()

    def state_dict(self) -> dict[str, Any]:
        """Return what was logged, as plain values; metrics by their names only."""
        return {"numbers": self._plain(), "metrics": dict(self._metrics)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._numbers = {name: tuple(number) for name, number in state["numbers"].items()}
        self._metrics = dict(state["metrics"])

    def packed(self) -> bytes:
        """Pack what was logged, with what the metrics have seen; see `metric_states`."""
        metrics_of(self._module)
        metrics = {n: (path, _metric(self._module, path)) for n, path in self._metrics.items()}
        return packed(self._plain(), metrics)

    def _plain(self) -> dict[str, Number]:
        return {
            name: (reduce, float(value), float(weight))
            for name, (reduce, value, weight) in self._numbers.items()
        }


def joined_logs(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join what several ranks' `Logs.state_dict` returned."""
    numbers: dict[str, Number] = {}
    metrics: dict[str, str] = {}
    for state in states:
        for name, number in state["numbers"].items():
            numbers[name] = with_number(numbers.get(name), tuple(number))
        metrics.update(state["metrics"])
    return {"numbers": numbers, "metrics": metrics}


def fill(record: dict[str, float], parts: Iterable[bytes], module: nn.Module) -> None:
    """Enter what all ranks have logged into a record of the history.

    What a module logs as ``loss`` or ``val_loss`` takes the place of the loop's own, and without a
    loss there is no ``val_loss``.
    """
    numbers, metrics = values_of(parts, module.get_submodule)
    if numbers.pop(WITHOUT_LOSS, 0):
        record.pop("val_loss", None)
    record.update(numbers)
    record.update({name: scalar(name, metric.compute()) for name, metric in metrics.items()})


def as_text(data: bytes) -> str:
    """Packed values for JSON."""
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


def _metric(module: nn.Module, path: str) -> Any:
    return module.get_submodule(path)

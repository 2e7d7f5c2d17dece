from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics import classification

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import CUSTOM, Task
from sparkdl.errors import ConfigError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.train.objective.metrics import Metrics


def make(metrics: dict[str, Any], task: Task = REGRESSION, predictions: Any = None) -> Metrics:
    return Metrics(metrics, task, predictions or (lambda o: o), torch.device("cpu"))


def test_values_over_batches_and_reset() -> None:
    metrics = make({"mse": torchmetrics.MeanSquaredError})
    for _ in range(2):
        metrics.reset()
        metrics.update(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 0.0]))
        metrics.update(torch.tensor([[3.0]]), torch.tensor([0.0]))
        assert metrics.compute(LocalCommunicator()) == {"mse": pytest.approx(14 / 3)}


def test_users_own_metric_is_not_touched() -> None:
    own = torchmetrics.MeanSquaredError()
    metrics = make({"mse": own})
    metrics.update(torch.ones(2), torch.zeros(2))
    assert own.update_count == 0


def test_logits_inside_zero_and_one_are_still_logits() -> None:
    metrics = make({"auc": classification.BinaryAccuracy}, CLASSIFICATION, torch.sigmoid)
    metrics.update(torch.tensor([[0.1], [0.4]]), torch.tensor([1.0, 1.0]))
    assert metrics.compute(LocalCommunicator()) == {"auc": 1.0}


def test_custom_task_passes_everything_on() -> None:
    seen = []

    class Seen(torchmetrics.MeanMetric):
        def update(self, output: Any, target: Any) -> None:
            seen.append((output, target))
            super().update(1.0)

    output, target = torch.zeros(2, 1), torch.zeros(2)
    metrics = make({"seen": Seen}, CUSTOM, torch.sigmoid)
    metrics.update(output, target)
    assert seen[0][0] is output
    assert seen[0][1] is target


def test_half_precision_outputs_are_widened() -> None:
    metrics = make({"mse": torchmetrics.MeanSquaredError})
    metrics.update(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.001]))
    assert metrics.compute(LocalCommunicator())["mse"] == pytest.approx(1e-6, rel=0.01)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"mse": 3}, "must be a torchmetrics.Metric"),
        ({"mse": dict}, "must be a torchmetrics.Metric"),
        ({"mse": lambda output, label: 0.0}, "'output'.* make a subclass of torchmetrics.Metric"),
        ({"f1": classification.MulticlassF1Score}, "without arguments .*'num_classes'"),
        ({"loss": torchmetrics.MeanSquaredError}, "has that name already"),
        ({"all": torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()])}, "must be a"),
        ({"sum": torchmetrics.MeanSquaredError() + torchmetrics.MeanAbsoluteError()}, "made of"),
    ],
)
def test_what_is_no_metric_is_refused(metrics: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(metrics)


def test_metric_of_several_numbers_is_refused() -> None:
    metrics = make({"per_class": classification.MulticlassAccuracy(3, average=None)}, CUSTOM)
    metrics.update(torch.rand(4, 3), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ConfigError, match=r"'per_class' must compute one number.*\(3,\)"):
        metrics.compute(LocalCommunicator())

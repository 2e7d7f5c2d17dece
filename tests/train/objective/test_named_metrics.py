from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sklearn import metrics as judge
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import Task, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.train.objective.label_losses import loss_of
from sparkdl.train.objective.loss import LossFunction
from sparkdl.train.objective.metrics import Metrics, check_metrics
from sparkdl.train.objective.named_metrics import default_metrics, metric_names, resolved
from sparkdl.train.objective.training_step import StepLoss

CLASSES = ["accuracy", "AUROC", "average_precision", "cohen_kappa", "F1", "mcc", "precision",
           "recall", "specificity"]  # fmt: skip


def values(
    names: Any, task: Task, loss: Any, output: Any, target: Any, **config: Any
) -> dict[str, float]:
    """The metrics of two batches, by way of the names."""
    if isinstance(names, list):
        names = {name.lower(): name for name in names}
    objective = loss_of(loss, task, {})
    made = resolved(names, objective, output)
    metrics = Metrics.of(TrainConfig(task=task, metrics=made), objective, torch.device("cpu"))
    check_metrics(TrainConfig(task=task, metrics=names), objective)
    metrics.reset()
    for rows in (slice(None, 7), slice(7, None)):
        metrics.update(part(output, rows), part(target, rows))
    return metrics.compute(LocalCommunicator())


def part(value: Any, rows: slice) -> Any:
    if isinstance(value, dict):
        return {name: item[rows] for name, item in value.items()}
    return value[rows]


def drawn(num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_classes)
    logits = torch.randn(60, num_classes, generator=generator)
    target = torch.randint(0, num_classes, (60,), generator=generator)
    return logits + 1.5 * nn.functional.one_hot(target, num_classes), target


def expected(probabilities: Any, target: Any, average: str) -> dict[str, float]:
    """What scikit-learn says."""
    predicted = probabilities.argmax(1)
    scores = probabilities[:, 1] if average == "binary" else probabilities
    one_hot = nn.functional.one_hot(target)
    return {
        "accuracy": judge.accuracy_score(target, predicted),
        "auroc": judge.roc_auc_score(target, scores, multi_class="ovr"),
        "average_precision": judge.average_precision_score(
            target if average == "binary" else one_hot, scores
        ),
        "cohen_kappa": judge.cohen_kappa_score(target, predicted),
        "f1": judge.f1_score(target, predicted, average=average),
        "mcc": judge.matthews_corrcoef(target, predicted),
        "precision": judge.precision_score(target, predicted, average=average),
        "recall": judge.recall_score(target, predicted, average=average),
    }


@pytest.mark.parametrize("num_classes", [2, 4])
def test_those_of_classes_are_scikit_learns(num_classes: int) -> None:
    logits, target = drawn(num_classes)
    average = "binary" if num_classes == 2 else "macro"
    want = expected(logits.softmax(1), target, average)
    for task in ("classification", "custom"):
        got = values(CLASSES, task, "cross_entropy", logits, target)  # type: ignore[arg-type]
        assert list(got) == [name.lower() for name in CLASSES]
        for name, value in want.items():
            assert got[name] == pytest.approx(value, abs=1e-5), name
        assert 0.5 < got["specificity"] < 1


@pytest.mark.parametrize("task", ["classification", "custom"])
def test_one_output_is_of_two_classes(task: Task) -> None:
    logits, target = drawn(2)
    single = logits[:, 1:] - logits[:, :1]
    labels = target.float() if task == "custom" else target
    got = values(CLASSES, task, "bce_with_logits", single, labels)
    assert got == pytest.approx(values(CLASSES, task, "cross_entropy", logits, target), abs=1e-5)


def test_those_of_numbers_are_scikit_learns() -> None:
    target = torch.linspace(1, 5, 20)
    output = (target + torch.sin(target))[:, None]
    got = values(["mae", "mse", "RMSE", "mape", "r2"], "regression", "mse", output, target)
    pair = target, output[:, 0]
    assert got == pytest.approx(
        {
            "mae": judge.mean_absolute_error(*pair),
            "mse": judge.mean_squared_error(*pair),
            "rmse": judge.mean_squared_error(*pair) ** 0.5,
            "mape": judge.mean_absolute_percentage_error(*pair),
            "r2": judge.r2_score(*pair),
        },
        rel=1e-5,
    )


def test_each_label_has_its_own() -> None:
    logits, target = drawn(3)
    output = {"kind": logits, "good": logits[:, 0], "price": logits[:, 1:2]}
    labels = {"kind": target, "good": (target == 0).float(), "price": logits[:, 1] + 0.5}
    names = {"kind": {"f1": "f1"}, "good": {"acc": "accuracy"}, "price": {"mae": "mae"}}
    losses = {"kind": "cross_entropy", "good": "bce_with_logits", "price": "mse"}
    got = values(names, "custom", losses, output, labels)
    assert got == pytest.approx(
        {
            "kind_f1": judge.f1_score(target, logits.argmax(1), average="macro"),
            "good_acc": judge.accuracy_score(labels["good"], logits[:, 0] > 0),
            "price_mae": 0.5,
        },
        abs=1e-6,
    )
    assert metric_names(names, "custom") == list(got)


def test_targets_that_the_loss_ignores_do_not_count() -> None:
    logits, target = drawn(3)
    names = {"f1": "f1", "hits": "accuracy"}
    for task in ("classification", "custom"):
        some = torch.where(torch.arange(60) < 20, -100, target)
        got = values(names, task, "cross_entropy", logits, some)  # type: ignore[arg-type]
        assert got["hits"] == pytest.approx(
            judge.accuracy_score(target[20:], logits[20:].argmax(1)), abs=1e-6
        )


def test_a_classifier_has_its_accuracy_unless_the_user_says_otherwise() -> None:
    loss = loss_of("cross_entropy", "classification", {})
    logits, target = drawn(3)
    assert list(values(None, "classification", "cross_entropy", logits, target)) == ["accuracy"]
    assert values({}, "classification", "cross_entropy", logits, target) == {}
    assert default_metrics("custom", loss) == {}
    assert default_metrics("classification", StepLoss(lambda *_: 0, loss)) == {}
    assert metric_names(None, "classification") == ["accuracy"]
    assert metric_names(None, "custom") == []


BY_LABEL = {"kind": "cross_entropy", "price": "mse"}


@pytest.mark.parametrize(
    ("metrics", "task", "loss", "message"),
    [
        ({"m": "acuracy"}, "classification", "cross_entropy", "did you mean 'accuracy'.*known: "),
        ({"m": "mae"}, "classification", "cross_entropy", "compares numbers.*known here: acc"),
        ({"m": "f1"}, "regression", "mse", "compares classes.*known here: explained_variance"),
        ({"m": "rmse"}, "custom", "cross_entropy", "compares numbers"),
        ({"kind": {"m": "rmse"}}, "custom", BY_LABEL, "'kind_m': 'rmse' compares numbers"),
        ({"f1": "f1"}, "custom", BY_LABEL, r"must be of one of the labels.*\{'kind': \['f1'\]\}"),
        ({"other": {"f1": "f1"}}, "custom", BY_LABEL, "must be of one of the labels"),
    ],
)
def test_names_that_do_not_fit_are_refused_on_the_driver(
    metrics: Any, task: Task, loss: Any, message: str
) -> None:
    objective: LossFunction = loss_of(loss, task, {})
    with pytest.raises(ConfigError, match=message):
        check_metrics(TrainConfig(task=task, metrics=metrics), objective)


def test_an_output_of_several_tensors_is_refused() -> None:
    loss = loss_of(lambda output, target: output["a"].sum(), "custom", {})
    with pytest.raises(ConfigError, match="needs one tensor, and the module returns dict"):
        resolved({"f1": "f1"}, loss, {"a": torch.zeros(2)})


@pytest.mark.parametrize("num_classes", [2, 3])
def test_what_no_row_tells_is_not_a_number(num_classes: int) -> None:
    logits, target = drawn(num_classes)
    none = torch.full_like(target, -100)
    got = values(["auroc", "average_precision"], "classification", "cross_entropy", logits, none)
    assert all(map(math.isnan, got.values()))
    one = values(["r2", "mae"], "regression", "mse", torch.ones(1), torch.zeros(1))
    assert math.isnan(one["r2"])
    assert one["mae"] == 1

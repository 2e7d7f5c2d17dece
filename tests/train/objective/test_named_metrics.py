from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sklearn import metrics as judge
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import CUSTOM, Task, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.train.objective.label_losses import loss_of
from sparkdl.train.objective.loss import LossFunction
from sparkdl.train.objective.metrics import Metrics, check_metrics
from sparkdl.train.objective.named_metrics import default_metrics, metric_names, resolved
from sparkdl.train.objective.training_step import StepLoss

CLASSES = ["accuracy", "AUROC", "average_precision", "cohen_kappa", "F1", "mcc", "precision",
           "recall", "specificity"]  # fmt: skip


def values(
    names: Any,
    task: Task,
    loss: Any,
    output: Any,
    target: Any,
    weight: torch.Tensor | None = None,
) -> dict[str, float]:
    """The metrics of two batches, by way of the names."""
    if isinstance(names, list):
        names = {name.lower(): name for name in names}
    objective = loss_of(loss, task, {})
    labels = list(target) if isinstance(target, dict) else ()
    made = resolved(names, objective, output, labels)
    metrics = Metrics.of(TrainConfig(task=task, metrics=made), objective, torch.device("cpu"))
    check_metrics(TrainConfig(task=task, metrics=names), objective)
    metrics.reset()
    for rows in (slice(None, 7), slice(7, None)):
        weights = None if weight is None else weight[rows]
        metrics.update(part(output, rows), part(target, rows), weights)
    return metrics.compute(LocalCommunicator())


def part(value: Any, rows: slice) -> Any:
    if isinstance(value, dict):
        return {name: item[rows] for name, item in value.items()}
    return tuple(one[rows] for one in value) if isinstance(value, tuple) else value[rows]


def drawn(num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_classes)
    logits = torch.randn(60, num_classes, generator=generator)
    target = torch.randint(0, num_classes, (60,), generator=generator)
    return logits + 1.5 * nn.functional.one_hot(target, num_classes), target


def expected(probabilities: Any, target: Any, weight: Any) -> dict[str, float]:
    """What scikit-learn says."""
    predicted, is_pair = probabilities.argmax(1), probabilities.shape[1] == 2
    average = "binary" if is_pair else "macro"
    scores = probabilities[:, 1] if is_pair else probabilities
    one_hot = nn.functional.one_hot(target)
    others = [
        judge.recall_score(target != c, predicted != c, sample_weight=weight)
        for c in ([1] if is_pair else target.unique())
    ]
    by_class = {
        name: judge_of(target, predicted, average=average, sample_weight=weight)
        for name, judge_of in (
            ("f1", judge.f1_score),
            ("precision", judge.precision_score),
            ("recall", judge.recall_score),
        )
    }
    return by_class | {
        "accuracy": judge.accuracy_score(target, predicted, sample_weight=weight),
        "auroc": judge.roc_auc_score(target, scores, multi_class="ovr", sample_weight=weight),
        "average_precision": judge.average_precision_score(
            target if is_pair else one_hot, scores, sample_weight=weight
        ),
        "cohen_kappa": judge.cohen_kappa_score(target, predicted, sample_weight=weight),
        "mcc": judge.matthews_corrcoef(target, predicted, sample_weight=weight),
        "specificity": sum(others) / len(others),
    }


WEIGHTS = [None, torch.tensor([0.25, 1.0, 3.0, 0.5, 2.0]).repeat(12)]


@pytest.mark.parametrize("weight", WEIGHTS, ids=["alike", "weighted"])
@pytest.mark.parametrize("num_classes", [2, 4])
def test_those_of_classes_are_scikit_learns(num_classes: int, weight: Any) -> None:
    logits, target = drawn(num_classes)
    want = expected(logits.softmax(1), target, weight)
    for task in (CLASSIFICATION, CUSTOM):
        got = values(CLASSES, task, "cross_entropy", logits, target, weight)  # type: ignore[arg-type]
        assert list(got) == [name.lower() for name in CLASSES]
        assert got == pytest.approx(want, abs=1e-12)


def no_words(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that does not say whether it gets logits."""
    return nn.functional.cross_entropy(output, target, reduction="none")


def no_words_of_one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The same of a single number."""
    loss = nn.functional.binary_cross_entropy_with_logits
    return loss(output.squeeze(-1), target.to(output.dtype), reduction="none")


@pytest.mark.parametrize("num_classes", [2, 4])
def test_logits_of_a_function_are_those_of_a_loss(num_classes: int) -> None:
    logits, target = drawn(num_classes)
    want = expected(logits.softmax(1), target, None)
    got = values(CLASSES, CUSTOM, no_words, logits, target)
    assert got == pytest.approx(want, abs=1e-12)


def test_one_batch_does_not_decide_what_is_a_logit() -> None:
    output = torch.tensor([0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4, -3.0, 2.0, -1.0]).unsqueeze(1)
    target = (output.squeeze(1) > 0).long()
    got = values(["accuracy", "f1"], CUSTOM, no_words_of_one, output, target)
    assert got == {"accuracy": 1.0, "f1": 1.0}


def test_those_of_positions_count_by_the_weight_of_their_row() -> None:
    logits, target = drawn(4)
    rows, weight = logits.view(20, 3, 4).movedim(2, 1), torch.linspace(0.1, 2, 20)
    got = values(CLASSES, CUSTOM, "cross_entropy", rows, target.view(20, 3), weight)
    want = expected(logits.softmax(1), target, weight.repeat_interleave(3))
    assert got == pytest.approx(want, abs=1e-7)


def test_classes_that_no_row_has_do_not_count() -> None:
    logits, target = drawn(4)
    few = target % 3  # and the last one is never predicted
    logits[:, 3] = -10
    got = values(["f1", "AUROC", "mcc"], CLASSIFICATION, "cross_entropy", logits, few)
    one_hot, chances = nn.functional.one_hot(few, 3), logits.softmax(1)[:, :3]
    assert got == pytest.approx(
        {
            "f1": judge.f1_score(few, logits.argmax(1), average="macro"),
            "auroc": judge.roc_auc_score(one_hot, chances, average="macro"),
            "mcc": judge.matthews_corrcoef(few, logits.argmax(1)),
        },
        abs=1e-12,
    )


@pytest.mark.parametrize("task", [CLASSIFICATION, CUSTOM])
def test_one_output_is_of_two_classes(task: Task) -> None:
    logits, target = drawn(2)
    single = logits[:, 1:] - logits[:, :1]
    labels = target.float() if task == CUSTOM else target
    got = values(CLASSES, task, "bce_with_logits", single, labels)
    assert got == pytest.approx(values(CLASSES, task, "cross_entropy", logits, target), abs=1e-5)


@pytest.mark.parametrize("weight", [None, torch.linspace(0.2, 4, 20)], ids=["alike", "weighted"])
@pytest.mark.parametrize("columns", [1, 3])
def test_those_of_numbers_are_scikit_learns(columns: int, weight: Any) -> None:
    target = torch.linspace(1, 5, 20)[:, None] ** torch.arange(1, columns + 1)
    output = target + torch.sin(target) + 0.3
    names = ["mae", "mse", "RMSE", "mape", "r2", "explained_variance"]
    got = values(names, REGRESSION, "mse", output, target, weight)
    kept: dict[str, Any] = {"sample_weight": weight}
    pair = target.double(), output.double()
    assert got == pytest.approx(
        {
            "mae": judge.mean_absolute_error(*pair, **kept),
            "mse": judge.mean_squared_error(*pair, **kept),
            "rmse": judge.mean_squared_error(*pair, **kept) ** 0.5,
            "mape": judge.mean_absolute_percentage_error(*pair, **kept),
            "r2": judge.r2_score(*pair, **kept),
            "explained_variance": judge.explained_variance_score(*pair, **kept),
        },
        rel=1e-9,
    )


def test_labels_far_from_zero_lose_no_digits() -> None:
    label = 1.7e9 + 100 * torch.sin(torch.arange(40, dtype=torch.float64))
    output, weight = label + 3 * torch.cos(label), torch.linspace(0.2, 4, 40)
    names = ["r2", "explained_variance"]
    for kept in (None, weight):
        got = values(names, REGRESSION, "mse", output, label, kept)
        pair = label, output
        want = judge.r2_score(*pair, sample_weight=kept)
        other = judge.explained_variance_score(*pair, sample_weight=kept)
        assert got == pytest.approx({"r2": want, "explained_variance": other}, rel=1e-9)


def test_labels_that_are_all_alike_explain_all_or_nothing() -> None:
    label = torch.full((20,), 0.1)
    for output, share in ((label, 1.0), (label + torch.linspace(0, 1, 20), 0.0)):
        got = values(["r2", "explained_variance"], REGRESSION, "mse", output, label)
        assert got == {
            "r2": judge.r2_score(label, output),
            "explained_variance": judge.explained_variance_score(label, output),
        }
        assert got["r2"] == share


def test_each_label_has_its_own() -> None:
    logits, target = drawn(3)
    output = {"kind": logits, "good": logits[:, 0], "price": logits[:, 1:2]}
    labels = {"kind": target, "good": (target == 0).float(), "price": logits[:, 1] + 0.5}
    names = {"kind": {"f1": "f1"}, "good": {"acc": "accuracy"}, "price": {"mae": "mae"}}
    losses = {"kind": "cross_entropy", "good": "bce_with_logits", "price": "mse"}
    got = values(names, CUSTOM, losses, output, labels)
    assert got == pytest.approx(
        {
            "kind_f1": judge.f1_score(target, logits.argmax(1), average="macro"),
            "good_acc": judge.accuracy_score(labels["good"], logits[:, 0] > 0),
            "price_mae": 0.5,
        },
        abs=1e-6,
    )
    assert metric_names(names, CUSTOM) == list(got)


def test_a_function_of_all_labels_may_get_a_tuple() -> None:
    logits, target = drawn(3)
    labels = {"kind": target, "price": logits[:, 1] + 0.5}
    names = {"price": {"mae": "mae"}, "kind": {"hits": "accuracy"}}
    got = values(names, CUSTOM, lambda output, labels: 0.0, (logits, logits[:, 1:2]), labels)
    assert got["price_mae"] == pytest.approx(0.5)
    assert got["kind_hits"] == pytest.approx(judge.accuracy_score(target, logits.argmax(1)))
    with pytest.raises(ConfigError, match=r"a tuple of 2 in their order.* returned tuple"):
        values(names, CUSTOM, lambda output, labels: 0.0, (logits,), labels)


def test_targets_that_the_loss_ignores_do_not_count() -> None:
    logits, target = drawn(3)
    names = {"f1": "f1", "hits": "accuracy"}
    for task in (CLASSIFICATION, CUSTOM):
        some = torch.where(torch.arange(60) < 20, -100, target)
        got = values(names, task, "cross_entropy", logits, some)  # type: ignore[arg-type]
        assert got["hits"] == pytest.approx(
            judge.accuracy_score(target[20:], logits[20:].argmax(1)), abs=1e-6
        )


def test_a_classifier_has_its_accuracy_unless_the_user_says_otherwise() -> None:
    loss = loss_of("cross_entropy", CLASSIFICATION, {})
    logits, target = drawn(3)
    assert list(values(None, CLASSIFICATION, "cross_entropy", logits, target)) == ["accuracy"]
    assert values({}, CLASSIFICATION, "cross_entropy", logits, target) == {}
    assert default_metrics(CUSTOM, loss) == {}
    assert default_metrics(CLASSIFICATION, StepLoss(lambda *_: 0, loss)) == {}
    assert metric_names(None, CLASSIFICATION) == ["accuracy"]
    assert metric_names(None, CUSTOM) == []


BY_LABEL = {"kind": "cross_entropy", "price": "mse"}


@pytest.mark.parametrize(
    ("metrics", "task", "loss", "message"),
    [
        ({"m": "acuracy"}, CLASSIFICATION, "cross_entropy", "did you mean 'accuracy'.*known: "),
        ({"m": "mae"}, CLASSIFICATION, "cross_entropy", "compares numbers.*known here: acc"),
        ({"m": "f1"}, REGRESSION, "mse", "compares classes.*known here: explained_variance"),
        ({"m": "rmse"}, CUSTOM, "cross_entropy", "compares numbers"),
        ({"kind": {"m": "rmse"}}, CUSTOM, BY_LABEL, "'kind_m': 'rmse' compares numbers"),
        ({"f1": "f1"}, CUSTOM, BY_LABEL, r"must be of one of the labels.*\{'kind': \['f1'\]\}"),
        ({"other": {"f1": "f1"}}, CUSTOM, BY_LABEL, "must be of one of the labels"),
    ],
)
def test_names_that_do_not_fit_are_refused_on_the_driver(
    metrics: Any, task: Task, loss: Any, message: str
) -> None:
    objective: LossFunction = loss_of(loss, task, {})
    with pytest.raises(ConfigError, match=message):
        check_metrics(TrainConfig(task=task, metrics=metrics), objective)


def test_an_output_of_several_tensors_is_refused() -> None:
    loss = loss_of(lambda output, target: output["a"].sum(), CUSTOM, {})
    with pytest.raises(ConfigError, match="needs one tensor, and the module returns dict"):
        resolved({"f1": "f1"}, loss, {"a": torch.zeros(2)})


@pytest.mark.parametrize("num_classes", [2, 3])
def test_what_no_row_tells_is_not_a_number(num_classes: int) -> None:
    logits, target = drawn(num_classes)
    none = torch.full_like(target, -100)
    got = values(["auroc", "average_precision"], CLASSIFICATION, "cross_entropy", logits, none)
    assert all(map(math.isnan, got.values()))
    one = values(["r2", "mae"], REGRESSION, "mse", torch.ones(1), torch.zeros(1))
    assert math.isnan(one["r2"])
    assert one["mae"] == 1

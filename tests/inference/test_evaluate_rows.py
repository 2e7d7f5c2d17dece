from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import torchmetrics
from sklearn import metrics as sklearn_metrics
from torch import nn
from torchmetrics import classification

from sparkdl.config import CUSTOM
from sparkdl.data.plan import SpoolColumn
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference import evaluate_rows
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.evaluate_rows import (
    Evaluator,
    Measures,
    Part,
    chosen_curves,
    evaluation,
    read_labels,
    row_losses,
    united,
)
from sparkdl.inference.predict import predicted_class
from sparkdl.inference.regression import REGRESSION
from sparkdl.inference.scores import Evaluation
from sparkdl.inputs import Tensor

CPU = torch.device("cpu")
torch.manual_seed(0)
ROWS = 100
LOGITS = torch.randn(ROWS, 3, dtype=torch.float64)
LABELS = (LOGITS + 2 * torch.randn(ROWS, 3)).argmax(1)
WEIGHTS = torch.rand(ROWS, dtype=torch.float64)
NUMBERS = LOGITS[:, 0] * 2 + 100
CUTS: list[list[int]] = [[ROWS], [0, 1, 19, 80], [1] * ROWS]


def evaluated(
    measures: Measures,
    cut: Sequence[int],
    output: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    batch_size: int = 37,
) -> Evaluation:
    """As tasks with so many rows each do it, in two groups."""
    parts, start = [], 0
    for size in cut:
        evaluator = Evaluator(measures, CPU)
        for begin in range(start, start + size, batch_size):
            rows = slice(begin, min(begin + batch_size, start + size))
            evaluator.update(
                output[rows],
                output[rows],
                target[rows],
                None if weight is None else weight[rows],
                len(output[rows]),
            )
        evaluator.check()
        parts.append(Part.from_bytes(evaluator.part().to_bytes()))
        start += size
    groups = [united(parts[::2], measures), united(parts[1::2], measures)]
    sent = [Part.from_bytes(group.to_bytes()) for group in groups]
    return evaluation(united(sent, measures), measures)


def local(metric: torchmetrics.Metric, *arguments: torch.Tensor) -> Any:
    return metric.set_dtype(torch.float64)(*arguments)


@pytest.mark.parametrize("width", [1, 3])
def test_rows_with_nan_are_taken_for_no_class(width: int, caplog: pytest.LogCaptureFixture) -> None:
    """As by the evaluators of Spark and scikit-learn, given the column that transform makes."""
    loss = "cross_entropy" if width == 3 else "bce_with_logits"
    measures = Measures(task=CLASSIFICATION, loss=loss, num_classes=max(2, width))
    logits, labels = LOGITS[:, :width].clone(), LABELS % max(2, width)
    logits[:5, 0] = math.nan
    found = evaluated(measures, [ROWS], logits, labels, WEIGHTS)
    predicted = predicted_class(logits).nan_to_num(nan=9)
    accuracy = sklearn_metrics.accuracy_score(labels, predicted, sample_weight=WEIGHTS.numpy())
    assert found["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert f"NaN for 5 of the {ROWS} rows" in caplog.text
    recall = sklearn_metrics.recall_score(
        labels, predicted, labels=[0], average="macro", sample_weight=WEIGHTS.numpy()
    )
    assert found.scores.per_class[0].recall == pytest.approx(recall, abs=1e-12)
    table = pd.DataFrame.from_dict(found.confusion, orient="index").sort_index(axis=1).fillna(0)
    expected = sklearn_metrics.confusion_matrix(
        labels, predicted, labels=range(measures.num_classes), sample_weight=WEIGHTS.numpy()
    )
    np.testing.assert_allclose(table[list(range(measures.num_classes))], expected, atol=1e-11)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{len(cut)} parts")
@pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["equal", "weighted"])
def test_any_cut_of_a_classifier_gives_what_one_process_does(
    cut: list[int], weight: torch.Tensor | None
) -> None:
    measures = Measures(
        task=CLASSIFICATION,
        loss="cross_entropy",
        metrics={
            "top2": classification.MulticlassAccuracy(3, top_k=2),
            "f1": classification.MulticlassF1Score(3, average=None),
            "auroc": classification.MulticlassAUROC(3),  # keeps every row
            "matthews": classification.MulticlassMatthewsCorrCoef(3),
        },
        num_classes=3,
        curves=(0, 2),
    )
    found = evaluated(measures, cut, LOGITS, LABELS, weight)
    losses = nn.functional.cross_entropy(LOGITS, LABELS, reduction="none")
    weights = torch.ones(ROWS, dtype=torch.float64) if weight is None else weight
    expected = math.fsum((losses * weights).tolist()) / math.fsum(weights.tolist())
    assert found["loss"] == pytest.approx(expected, abs=1e-12)
    chances, w = LOGITS.softmax(1), weights.numpy()
    predictions = LOGITS.argmax(1)
    accuracy = sklearn_metrics.accuracy_score(LABELS, predictions, sample_weight=w)
    assert found["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert found["log_loss"] == pytest.approx(expected, abs=1e-12)
    confusion = sklearn_metrics.confusion_matrix(LABELS, predictions, sample_weight=w)
    ours = [[found.confusion[i].get(j, 0.0) for j in range(3)] for i in range(3)]
    np.testing.assert_allclose(ours, confusion, rtol=0, atol=1e-11)
    for number in (0, 2):
        area = sklearn_metrics.roc_auc_score(number == LABELS, chances[:, number], sample_weight=w)
        assert found.curves[number].roc_auc == pytest.approx(area, abs=1e-12)
    for name, metric in measures.metrics.items():
        reference = local(metric.clone(), chances, LABELS).tolist()
        np.testing.assert_allclose(found[name], reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{len(cut)} parts")
@pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["equal", "weighted"])
def test_any_cut_of_a_regression_gives_what_one_process_does(
    cut: list[int], weight: torch.Tensor | None
) -> None:
    target = NUMBERS + LOGITS[:, 1]
    wanted = {"mae": torchmetrics.MeanAbsoluteError, "r2_score": torchmetrics.R2Score}
    if len(cut) < ROWS:  # torchmetrics' own way of uniting its means fails for single rows
        wanted["pearson"] = torchmetrics.PearsonCorrCoef
    measures = Measures(task=REGRESSION, loss="mse", metrics=wanted)
    output = NUMBERS.reshape(-1, 1)
    found = evaluated(measures, cut, output, target, weight)
    w = None if weight is None else weight.numpy()
    squared = sklearn_metrics.mean_squared_error(target, NUMBERS, sample_weight=w)
    assert found["loss"] == pytest.approx(squared, rel=1e-12)
    assert found["rmse"] == pytest.approx(math.sqrt(squared), rel=1e-12)
    assert found["r2"] == pytest.approx(
        sklearn_metrics.r2_score(target, NUMBERS, sample_weight=w), abs=1e-12
    )
    for name, made in measures.metrics.items():
        reference = float(local(made(), NUMBERS, target))
        # R2Score takes the difference of sums near 10^6, whose last bits depend on their order.
        assert found[name] == pytest.approx(reference, abs=1e-9)


def test_batches_do_not_matter() -> None:
    measures = Measures(task=CLASSIFICATION, loss="cross_entropy", num_classes=3, curves=(1,))
    values = {
        size: evaluated(measures, [ROWS], LOGITS, LABELS, WEIGHTS, batch_size=size)["loss"]
        for size in (1, 7, ROWS)
    }
    assert max(values.values()) - min(values.values()) < 1e-12


def test_class_weights_and_ignored_classes_count_as_in_torchs_mean() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0]).double(), ignore_index=2)
    measures = Measures(task=CLASSIFICATION, loss=loss, num_classes=3)
    found = evaluated(measures, [20, 80], LOGITS, LABELS, None)
    assert found["loss"] == pytest.approx(float(loss(LOGITS, LABELS)), abs=1e-12)
    assert sum(sum(row.values()) for row in found.confusion.values()) == (LABELS != 2).sum()


def test_a_class_that_the_module_does_not_know_is_wrong_and_costs_infinitely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    measures = Measures(task=CLASSIFICATION, loss="cross_entropy", num_classes=3)
    target = LABELS.clone()
    target[7] = 5
    found = evaluated(measures, [ROWS], LOGITS, target, None)
    assert found["loss"] == math.inf
    assert 30 / ROWS < found["log_loss"] < math.inf
    assert found.confusion[5] == {int(LOGITS[7].argmax()): 1.0}
    assert found.to_dict()["loss"] is None
    (told,) = caplog.messages
    assert told.startswith(f"1 of the {ROWS} rows have a class that the module does not know, such")
    assert "such as 5: their loss is infinite" in told


def test_a_loss_of_sums_is_added_up_and_has_no_rows() -> None:
    def pair(output: torch.Tensor, target: torch.Tensor) -> Any:
        return (output - target).abs().sum(), float(2 * len(output))

    measures = Measures(task=CUSTOM, loss=pair)
    found = evaluated(measures, [40, 60], NUMBERS, NUMBERS + 1, None)
    assert found["loss"] == pytest.approx(0.5, abs=1e-12)
    assert list(found) == ["loss"]
    with pytest.raises(ConfigError, match="single rows have no loss"):
        row_losses(measures.make_loss(), NUMBERS, NUMBERS, measures)


@pytest.mark.parametrize("shape", ["scalar", "pair", "rows"])
def test_a_loss_is_called_once_for_each_batch(shape: str) -> None:
    """It may count its calls."""
    calls: list[int] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        calls.append(len(target))
        losses = len(calls) * (output - target) ** 2
        return {"scalar": losses.mean(), "pair": (losses.sum(), len(target)), "rows": losses}[shape]

    measures = Measures(task=CUSTOM, loss=loss)
    target = torch.zeros(ROWS, dtype=torch.float64)
    found = evaluated(measures, [ROWS], NUMBERS, target, None, batch_size=40)
    assert calls == [40, 40, 20]
    parts = [number * (one**2).sum() for number, one in enumerate(NUMBERS.split(40), start=1)]
    assert found.to_dict()["loss"] == pytest.approx(float(sum(parts)) / ROWS, rel=1e-12)


def test_the_losses_of_rows() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0]).double(), ignore_index=2)
    measures = Measures(task=CLASSIFICATION, loss=loss, num_classes=3)
    losses = row_losses(measures.make_loss(), LOGITS, LABELS, measures).to_pylist()
    for row in range(20):
        expected = float(loss(LOGITS[row : row + 1], LABELS[row : row + 1]))
        assert losses[row] == (None if math.isnan(expected) else pytest.approx(expected, rel=1e-12))


class Means(torchmetrics.Metric):
    """Takes the mean of the ranks' means."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.mean = output.mean()

    def compute(self) -> torch.Tensor:
        return self.mean


def test_metrics_whose_parts_cannot_be_united_exactly_are_refused() -> None:
    measures = Measures(task=REGRESSION, loss="mse", metrics={"means": Means})
    with pytest.raises(ConfigError, match=r"'means' \(Means\) takes means over ranks"):
        evaluated(measures, [40, 60], NUMBERS, NUMBERS, None)


def test_metrics_that_keep_every_row_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    measures = Measures(
        task=CLASSIFICATION, loss="cross_entropy", num_classes=3,
        metrics={"auroc": classification.MulticlassAUROC(3)},
    )  # fmt: skip
    size = ROWS * 4 * 8
    monkeypatch.setattr(evaluate_rows, "MOST_LISTED_BYTES", size)
    evaluated(measures, [50, 50], LOGITS, LABELS, None)
    monkeypatch.setattr(evaluate_rows, "MOST_LISTED_BYTES", size - 1)
    with pytest.raises(ConfigError, match="'auroc' keeps something of every row"):
        evaluated(measures, [50, 50], LOGITS, LABELS, None)  # only together they are too many
    with pytest.raises(ConfigError, match="'auroc' keeps something of every row"):
        evaluated(measures, [ROWS], LOGITS, LABELS, None)


def test_metrics_with_weights_of_their_own_keep_their_dtype() -> None:
    class Learnt(torchmetrics.MeanMetric):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            super().update(self.layer(output))

    measures = Measures(task=CUSTOM, loss="mse", metrics={"learnt": Learnt()})
    output = NUMBERS.float().reshape(-1, 1)
    assert isinstance(evaluated(measures, [ROWS], output, output, None)["learnt"], float)


def test_no_rows_are_an_error() -> None:
    measures = Measures(task=REGRESSION, loss="mse")
    with pytest.raises(DataError, match="no rows to evaluate"):
        evaluation(united([], measures), measures)


def test_without_weight_there_is_no_loss() -> None:
    measures = Measures(task=CUSTOM, loss="mse")
    found = evaluated(measures, [ROWS], NUMBERS, NUMBERS, torch.zeros(ROWS))
    assert math.isnan(found["loss"])
    with pytest.raises(DataError, match="no row counts: all have weight 0"):
        evaluated(Measures(task=REGRESSION, loss="mse"), [9], NUMBERS, NUMBERS, torch.zeros(ROWS))


def test_equal_labels_have_no_variance_to_explain() -> None:
    measures = Measures(task=REGRESSION, loss="mse")
    found = evaluated(measures, [20, 80], NUMBERS, torch.ones(ROWS), None)
    assert math.isnan(found["r2"])
    assert found.to_dict()["r2"] is None


def test_a_row_without_weight_may_be_anything() -> None:
    some = slice(0, 50)
    weight, target = torch.ones(50), LABELS[some].clone()
    target[7], weight[7] = 5, 0  # a class that the module does not know
    measures = Measures(task=CLASSIFICATION, loss="cross_entropy", num_classes=3)
    others = torch.arange(50) != 7
    expected = nn.functional.cross_entropy(LOGITS[some][others], target[others])
    found = evaluated(measures, [50], LOGITS[some], target, weight)
    assert found["loss"] == pytest.approx(float(expected), abs=1e-12)
    assert 5 not in found.confusion

    predicted = NUMBERS[some].clone()
    predicted[7] = math.nan
    truth = NUMBERS[some] + 1
    found = evaluated(Measures(task=REGRESSION, loss="mse"), [50], predicted, truth, weight)
    assert [found[name] for name in ("loss", "mae", "rmse")] == [1, 1, 1]
    assert math.isfinite(found["r2"])


@pytest.mark.parametrize(
    ("curves", "num_classes", "expected"),
    [
        (None, 2, (1,)),
        (None, 3, ()),
        (None, 0, ()),
        (True, 3, (0, 1, 2)),
        (False, 2, ()),
        ([2, 0, 2], 3, (2, 0)),
    ],
)
def test_which_curves_are_made(curves: Any, num_classes: int, expected: tuple[int, ...]) -> None:
    assert chosen_curves(curves, num_classes) == expected


@pytest.mark.parametrize(
    ("curves", "num_classes", "message"),
    [(True, 0, "only classifiers"), ([3], 3, r"from 0 to 2; received \[3\]")],
)
def test_curves_of_other_classes_are_refused(curves: Any, num_classes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_curves(curves, num_classes)


def test_labels_and_weights_are_checked() -> None:
    label = SpoolColumn(name="y", role="label", dtype="int64", as_classes=True)
    number = SpoolColumn(name="y", role="label", dtype="float32")
    weight = SpoolColumn(name="w", role="weight", dtype="float64")
    for asked, values in ((label, [1.0, 2.0]), (weight, [0.0, 2.0])):
        column, rows = read_labels(pa.array(values), asked)
        assert isinstance(rows, torch.Tensor) and rows.tolist() == values
        assert (column.name, column.dtype, column.shape) == (asked.name, asked.dtype, ())
    assert len(read_labels(pa.array([], pa.float64()), label)[1]) == 0
    classes = r'"y" must hold whole, non-negative class indices \(.*\), but 1 row does not'
    for asked, wrong, message in (
        (label, [2.0, 1.5], rf"{classes} \(first: 1.5 in row 1 of a record batch\)"),
        (label, [-1.0], rf"{classes} \(first: -1.0"),
        (label, [1e300], rf"{classes} \(first: 1e\+300"),
        (label, [1.0, None], '"y" has 1 null row'),
        (number, [1.0, math.nan], '"y" must hold finite numbers, .*first: nan'),
        (weight, [-1.0], '"w" must hold finite numbers that are not negative, .*first: -1.0'),
        (weight, [math.inf], '"w" must hold finite numbers .*first: inf'),
        (weight, [math.nan], '"w" must hold finite numbers .*first: nan'),
    ):
        with pytest.raises(DataError, match=message):
            read_labels(pa.array(wrong), asked)


def test_labels_have_the_shape_that_was_asked_for() -> None:
    mask = SpoolColumn(
        name="mask", role="label", dtype="float32", argument="mask",
        specification=Tensor("mask", shape=(2, 3)),
    )  # fmt: skip
    flat = pa.list_(pa.float32())
    column, rows = read_labels(pa.array([[1.0, 2, 3, 4, 5, 6]] * 4, flat), mask)
    assert isinstance(rows, torch.Tensor)
    assert column.shape == (2, 3)
    assert rows.tolist() == [[[1, 2, 3], [4, 5, 6]]] * 4
    assert len(read_labels(pa.array([], flat), mask)[1]) == 0
    with pytest.raises(DataError, match=r'"mask" has 5 values .* shape \(2, 3\) cannot hold'):
        read_labels(pa.array([[1.0, 2, 3, 4, 5]], flat), mask)


@pytest.mark.parametrize("has_rows", [True, False])
def test_classes_that_the_module_does_not_know_have_an_infinite_loss(has_rows: bool) -> None:
    def in_one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output[:, 0] - target).abs().sum()

    losses = {"kind": "cross_entropy", "other": "cross_entropy", "price": "l1"}
    several = Measures(task=CUSTOM, loss=losses if has_rows else {**losses, "price": in_one})
    kinds, prices = torch.tensor([0, 3, -100, 2]), torch.zeros(4, dtype=torch.float64)
    target = {"kind": kinds, "other": torch.tensor([0, 1, 2, -100]), "price": prices}
    logits = LOGITS[:4]
    output = {"kind": logits, "other": logits, "price": logits[:, :1]}
    cases = [(None, True), (torch.tensor([1.0, 0, 1, 1]), False)]
    for weight, is_infinite in cases if has_rows else cases[:1]:  # else weights are refused
        evaluator = Evaluator(several, CPU)
        evaluator.update(output, None, target, weight, 4)
        result = evaluation(evaluator.part(), several)
        assert (result["loss_kind"] == math.inf) == is_infinite
        assert (result["loss"] == math.inf) == is_infinite
        assert math.isfinite(result["loss_other"]) and math.isfinite(result["loss_price"])
    if has_rows:
        found = row_losses(several.make_loss(), output, target, several).to_pylist()
        assert [math.isinf(loss) for loss in found] == [False, True, False, False]


def test_nor_does_one_label_of_a_module_of_any_kind_fail_on_them() -> None:
    measures = Measures(task=CUSTOM, loss="cross_entropy")
    tags = torch.tensor([[0, 1], [0, 2], [-100, 1]])  # (batch, length), two classes
    found = row_losses(measures.make_loss(), torch.zeros(3, 2, 2), tags, measures).to_pylist()
    assert [math.isinf(loss) for loss in found] == [False, True, False]
    assert len(row_losses(measures.make_loss(), torch.zeros(0, 2), tags[:0, 0], measures)) == 0

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.train.objective.metric_states import added
from sparkdl.train.objective.metrics import ClassCounts, Metrics
from sparkdl.train.objective.named_metrics import NamedMetric
from tests.gang import Gang

PROBABILITIES = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])


def confusion(output: Any, target: Any) -> list[list[int]] | None:
    counts = ClassCounts(torch.device("cpu"))
    counts.update(output, target)
    return counts.places.tolist() or None


def test_labels_are_rows_and_predictions_columns() -> None:
    assert confusion(PROBABILITIES, torch.tensor([0, 1, 2, 2])) == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert confusion(PROBABILITIES, torch.tensor([[0.0], [1.0], [2.0], [2.0]])) is not None


def test_labels_that_are_no_class_do_not_count() -> None:
    assert confusion(PROBABILITIES, torch.tensor([-100, 1, 7, 2])) == [
        [0, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]


def test_one_probability_is_that_of_class_1() -> None:
    for shape in ((4,), (4, 1)):
        output = torch.tensor([0.1, 0.9, 0.8, 0.5]).view(shape)
        assert confusion(output, torch.tensor([0, 1, 0, 0])) == [[2, 1], [0, 1]]


def test_what_is_no_classification_of_rows_is_passed_over() -> None:
    assert confusion({"a": PROBABILITIES}, torch.zeros(4)) is None
    assert confusion(torch.zeros(2, 3, 4), torch.zeros(2, 4)) is None
    assert confusion(PROBABILITIES, torch.zeros(4, 3)) is None


def test_of_many_classes_only_the_hits_are_counted() -> None:
    output = torch.eye(101)[:3]
    assert confusion(output, torch.tensor([0, 1, 5])) is None
    counts = ClassCounts(torch.device("cpu"))
    counts.update(output, torch.tensor([0, 1, 5]))
    assert counts.hits.tolist() == [2, 3]


def test_rows_count_by_their_weights_and_those_with_nan_are_taken_for_nothing() -> None:
    metrics = make_metrics(accuracy=NamedMetric(name="accuracy"))
    output = torch.cat([PROBABILITIES.log(), torch.full((2, 3), torch.nan)])
    label, weight = torch.tensor([0, 1, 2, 2, 0, 1]), torch.tensor([0.5, 2, 1, 0, 4, 0.25])
    metrics.update(output, label, weight)
    predicted = [0, 1, 1, 2, 9, 9]  # 9: no class
    expected = accuracy_score(label, predicted, sample_weight=weight)
    assert metrics.compute(LocalCommunicator()) == {"accuracy": pytest.approx(expected, abs=1e-12)}
    assert metrics.confusion == [[0.5, 0, 0], [0, 2, 0], [0, 1, 0]]


def test_batches_and_ranks_add_up_and_those_without_rows_are_left_out() -> None:
    metrics = make_metrics()
    empty = metrics.packed()
    for _ in range(2):
        metrics.update(PROBABILITIES[:2].log(), torch.tensor([0, 0]))
        metrics.update(PROBABILITIES[2:].log(), torch.tensor([1, 1]))
    both = added([empty, metrics.packed(), empty], metrics.metric)
    metrics.compute_over([both, metrics.packed()])
    assert metrics.confusion == [[4, 4, 0], [0, 4, 4], [0, 0, 0]]
    driver = make_metrics()
    driver.compute_over([empty, empty])
    assert driver.confusion is None


def test_it_travels_with_the_metrics(gang: Gang) -> None:
    assert gang.run(count_over_ranks) == [[[2, 0], [0, 1]]] * 2


def count_over_ranks(comm: Any) -> Any:
    metrics = make_metrics()
    if comm.rank == 0:
        metrics.update(torch.tensor([[2.0, 1.0], [3.0, 1.0]]), torch.tensor([0, 0]))
    else:
        metrics.update(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    assert metrics.compute(comm) == {}
    return metrics.confusion


def make_metrics(*, counts_classes: bool = True, **named: NamedMetric) -> Metrics:
    return Metrics(
        named, CLASSIFICATION, lambda output: output.softmax(1), torch.device("cpu"),
        counts_classes=counts_classes,
    )  # fmt: skip


def test_nothing_is_counted_unless_asked_for() -> None:
    assert not make_metrics(counts_classes=False)
    plain = Metrics({}, REGRESSION, lambda x: x, torch.device("cpu"), counts_classes=True)
    assert not plain
    assert plain.compute(LocalCommunicator()) == {}
    assert plain.confusion is None

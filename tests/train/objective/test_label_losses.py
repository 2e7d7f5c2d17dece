"""Is the loss of several labels the weighted sum of theirs, however batches are cut?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparkdl.config import CUSTOM
from sparkdl.errors import ConfigError
from sparkdl.train.objective.label_losses import (
    LossSum,
    class_labels,
    for_each,
    loss_of,
    loss_record,
    part_names,
    sums_of,
)

generator = torch.Generator().manual_seed(5)
LOGITS = torch.randn(6, 3, generator=generator)
NUMBERS = torch.randn(6, generator=generator)
TARGET = {"digit": torch.tensor([0, 1, 2, 0, 1, 2]), "size": torch.arange(6.0)}
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def make(**weights: float) -> LossSum:
    loss = loss_of({"digit": "cross_entropy", "size": "mse"}, CUSTOM, weights)
    assert isinstance(loss, LossSum)
    return loss


@pytest.mark.parametrize(
    "output", [{"digit": LOGITS, "size": NUMBERS, "more": None}, (LOGITS, NUMBERS)]
)
def test_it_is_the_weighted_sum(output: Any) -> None:
    loss_sum, weight_sum = make(size=0.5)(output, TARGET, None)
    by_hand = F.cross_entropy(LOGITS, TARGET["digit"]) + 0.5 * F.mse_loss(NUMBERS, TARGET["size"])
    torch.testing.assert_close(loss_sum / weight_sum, by_hand)


def test_sample_weights_weigh_all_labels_and_parts_add_up() -> None:
    loss = make(size=0.5)
    total, weights, parts = sums_of(loss, (LOGITS, NUMBERS), TARGET, WEIGHT)
    by_hand = F.cross_entropy(LOGITS, TARGET["digit"], reduction="none") @ WEIGHT
    torch.testing.assert_close(parts[0], by_hand)
    torch.testing.assert_close(total, parts[0] + 0.5 * parts[1])
    assert float(weights) == 21.0
    halves = [
        sums_of(loss, (LOGITS[s], NUMBERS[s]), {k: v[s] for k, v in TARGET.items()}, WEIGHT[s])
        for s in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(halves[0][0] + halves[1][0], total)


def test_a_pair_has_no_place_in_the_sum() -> None:
    loss = loss_of({"digit": "cross_entropy", "size": lambda o, t: (o.sum(), 2.0)}, CUSTOM, {})
    with pytest.raises(ConfigError, match=r"must return the loss of each sample.* a pair"):
        loss((LOGITS, NUMBERS), TARGET, None)


def test_one_tensor_goes_to_every_loss() -> None:
    loss = loss_of({"a": "mse", "b": "mse"}, CUSTOM, {})
    target = {"a": torch.zeros(4), "b": torch.ones(4)}
    assert float(loss(torch.zeros(4), target, None)[0]) == 4.0


def test_a_padded_label_counts_by_its_own_places_only() -> None:
    logits = torch.randn(2, 3, 4, generator=generator)
    tags = torch.tensor([[0, 1, -100, -100], [2, 1, 0, -100]])
    for losses in ({"tags": "cross_entropy"}, {"tags": "cross_entropy", "other": "cross_entropy"}):
        loss = loss_of(losses, CUSTOM, {})
        whole = loss(logits, dict.fromkeys(losses, tags), None)
        shorter = loss(logits[:, :, :3], dict.fromkeys(losses, tags[:, :3]), None)
        assert list(map(float, whole)) == pytest.approx(list(map(float, shorter)))


@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)])
def test_a_label_alone_has_the_mean_of_torch(weight: torch.Tensor | None) -> None:
    """Of a sequence over all tokens, though workers pad their rows to other lengths."""
    module = nn.CrossEntropyLoss(weight)
    logits = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    tags = torch.tensor([[0, 1, -100, -100], [2, 1, 0, 2]])
    loss = loss_of({"tags": module}, CUSTOM, {})
    expected = module(logits, tags)
    parts = [
        loss(logits[:1, :, :2], {"tags": tags[:1, :2]}, None),
        loss(logits[1:], {"tags": tags[1:]}, None),
    ]
    total, count = (sum(float(part[place]) for part in parts) for place in (0, 1))
    assert total / count == pytest.approx(float(expected), rel=1e-6)
    rows = loss.rows(logits, {"tags": tags})
    assert rows is not None and rows[1] is not None
    assert float(rows[0].sum() / rows[1].sum()) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("output", [{"digit": LOGITS}, (LOGITS,), "nothing"])
def test_an_output_without_some_label_is_refused(output: Any) -> None:
    with pytest.raises(ConfigError, match=r"must return a dict with the labels \['digit', 'size"):
        make()(output, TARGET, None)


def test_what_a_loss_means_for_several_labels() -> None:
    labels = ("a", "b")
    assert for_each("mse", labels) == {"a": "mse", "b": "mse"}
    assert for_each(nn.MSELoss, labels) == {"a": nn.MSELoss, "b": nn.MSELoss}
    assert for_each({"b": "mse", "a": "l1"}, labels) == {"a": "l1", "b": "mse"}
    assert for_each(len, labels) is len
    with pytest.raises(ConfigError, match=r"an entry for each of the labels \['a', 'b'\]"):
        for_each({"a": "mse"}, labels)
    assert class_labels({"a": "cross_entropy", "b": "mse", "c": nn.NLLLoss()}) == {"a", "c"}


def test_the_history_has_the_parts() -> None:
    assert part_names(make()) == ("digit", "size")
    record = loss_record([6.0, 2.0, 4.0, 2.0], ("digit", "size"), "val_")
    assert record == {"val_loss": 3.0, "val_loss_digit": 2.0, "val_loss_size": 1.0}
    assert loss_record([6.0, 2.0], ()) == {"loss": 3.0}

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import CUSTOM, Task
from sparkdl.errors import ConfigError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.train.objective.loss import LOSSES, match_shapes, resolve_loss


def mean_of(loss: Any, output: Any, target: Any, task: Task = CUSTOM) -> float:
    loss_sum, weight_sum = resolve_loss(loss, task)(output, target, None)
    return float(loss_sum) / float(weight_sum)


def weighted_mean(loss: Any, output: Any, target: Any, weight: torch.Tensor) -> float:
    loss_sum, weight_sum = resolve_loss(loss, CUSTOM)(output, target, weight)
    return float(loss_sum) / float(weight_sum)


def in_parts(loss: Any, output: torch.Tensor, target: torch.Tensor) -> float:
    function = resolve_loss(loss, CUSTOM)
    parts = [function(output[a:b], target[a:b], None) for a, b in ((0, 1), (1, 6))]
    return sum(float(s) for s, _ in parts) / sum(float(w) for _, w in parts)


ELEMENTWISE = sorted(set(LOSSES) - {"cross_entropy", "nll"})


def data_for(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    output = torch.rand(6, 4, dtype=torch.float64)
    target = torch.rand(6, 4, dtype=torch.float64)
    if name in ("hinge_embedding", "soft_margin"):
        target = torch.sign(target - 0.5)
    return output, target


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")
def test_every_name_equals_torchs_mean(name: str) -> None:
    output, target = data_for(name)
    expected = float(LOSSES[name]()(output, target))
    assert mean_of(name.upper(), output, target) == pytest.approx(expected, abs=1e-12)
    assert in_parts(name, output, target) == pytest.approx(expected, abs=1e-12)


CLASS_WEIGHT = torch.tensor([0.1, 2.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHT),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHT, ignore_index=0, label_smoothing=0.1),
        nn.NLLLoss(weight=CLASS_WEIGHT, ignore_index=2),
        nn.NLLLoss(),
    ],
)
@pytest.mark.parametrize("tokens", [(), (5,), (2, 3)])
def test_losses_of_class_numbers_equal_torchs_mean(loss: Any, tokens: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    output = torch.randn(6, 3, *tokens, dtype=torch.float64).log_softmax(1)
    target = torch.randint(0, 3, (6, *tokens))
    expected = float(loss(output, target))
    assert mean_of(loss, output, target) == pytest.approx(expected, abs=1e-12)
    assert mean_of(loss, output, target.int()) == pytest.approx(expected, abs=1e-12)
    assert in_parts(loss, output, target) == pytest.approx(expected, abs=1e-12)
    assert loss.reduction == "mean"


def test_negative_ignored_target_with_class_weights() -> None:
    loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHT)
    output = torch.randn(3, 3, dtype=torch.float64)
    target = torch.tensor([0, -100, 2])
    assert mean_of(loss, output, target) == pytest.approx(float(loss(output, target)), abs=1e-12)


def test_class_probabilities() -> None:
    output = torch.randn(6, 3, dtype=torch.float64)
    target = torch.rand(6, 3, dtype=torch.float64).softmax(1)
    loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHT)
    assert mean_of(loss, output, target) == pytest.approx(float(loss(output, target)), abs=1e-12)


def test_weights_count_rows() -> None:
    output, target = torch.randn(3, 2), torch.randn(3, 2)
    weight = torch.tensor([2.0, 0.0, 1.0])
    repeated = torch.tensor([0, 0, 2])
    expected = mean_of("mse", output[repeated], target[repeated])
    assert weighted_mean("mse", output, target, weight) == pytest.approx(expected)
    logits, classes = torch.randn(3, 4), torch.tensor([1, 0, 3])
    expected = mean_of("cross_entropy", logits[repeated], classes[repeated])
    got = weighted_mean("cross_entropy", logits, classes, weight)
    assert got == pytest.approx(expected)


def test_batchmean_sums_over_the_other_dimensions() -> None:
    output, target = data_for("kl_div")
    loss = nn.KLDivLoss(reduction="batchmean")
    assert mean_of(loss, output, target) == pytest.approx(float(loss(output, target)))


def test_of_a_classifier_metrics_see_probabilities_whatever_the_loss_is() -> None:
    def function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target)

    two, one = torch.randn(5, 2), torch.randn(5, 1)
    loss = resolve_loss(function, CLASSIFICATION)
    assert torch.equal(loss.predictions(two), two.softmax(1))
    assert torch.equal(loss.predictions(one), one.sigmoid())
    assert torch.equal(loss.predictions(one[:, 0]), one[:, 0].sigmoid())
    assert resolve_loss(function, REGRESSION).predictions(two) is two


@pytest.mark.parametrize(
    "function",
    [
        lambda o, t: (o - t) ** 2,
        lambda o, t: ((o - t) ** 2).mean(),
        lambda o, t: (((o - t) ** 2).sum(), float(o.numel())),
        lambda o, t: ((o - t) ** 2).mean(1),
    ],
)
def test_callables(function: Any) -> None:
    output, target = data_for("mse")
    assert in_parts(function, output, target) == pytest.approx(mean_of("mse", output, target))


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.scale * (output - target) ** 2


def test_module_without_reduction_is_a_callable_that_is_not_trained() -> None:
    own = OwnLoss()
    with pytest.raises(ConfigError, match=r"'scale'.*requires_grad_\(False\) on the loss"):
        resolve_loss(own, CUSTOM)
    own.requires_grad_(False)
    output, target = data_for("mse")
    output.requires_grad_()
    loss_sum, _ = resolve_loss(own, CUSTOM)(output, target, None)
    loss_sum.backward()
    assert loss_sum.item() == pytest.approx(2 * 6 * mean_of("mse", output.detach(), target))
    assert own.scale.grad is None
    assert output.grad is not None


def test_shapes() -> None:
    column, flat = torch.zeros(5, 1), torch.zeros(5)
    assert [value.shape for value in match_shapes(column, flat)] == [(5,), (5,)]
    assert [value.shape for value in match_shapes(flat, column)] == [(5,), (5,)]
    assert [value.shape for value in match_shapes(column, column)] == [(5, 1), (5, 1)]
    told = r"output has shape \(batch, 1\) but the target has shape \(batch, 2\)"
    with pytest.raises(ConfigError, match=told):
        match_shapes(column, torch.zeros(5, 2))
    for wrong in (torch.zeros(1, 5), torch.zeros(4)):
        with pytest.raises(ConfigError, match=r"output has shape \(5, 1\).*target has shape"):
            match_shapes(column, wrong)
    with pytest.raises(ConfigError, match="one tensor"):
        match_shapes((column, column), flat)


def test_dtypes() -> None:
    output = torch.randn(4, 1)
    assert mean_of("mse", output, torch.zeros(4, dtype=torch.float64)) > 0
    assert mean_of("bce_with_logits", output, torch.tensor([0, 1, 1, 0])) > 0
    exact = mean_of("mse", output.bfloat16(), torch.full((4,), 1.001))
    assert exact == mean_of("mse", output.bfloat16().float(), torch.full((4,), 1.001))


def test_class_targets_may_be_a_column() -> None:
    logits, classes = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    assert mean_of("cross_entropy", logits, classes[:, None]) == mean_of(
        "cross_entropy", logits, classes
    )


def test_predictions() -> None:
    logits = torch.randn(4, 3)
    assert torch.equal(resolve_loss("cross_entropy", CUSTOM).predictions(logits), logits.softmax(1))
    assert torch.equal(resolve_loss("nll", CUSTOM).predictions(logits), logits.exp())
    assert torch.equal(
        resolve_loss("bce_with_logits", CUSTOM).predictions(logits), logits.sigmoid()
    )
    assert resolve_loss("mse", CUSTOM).predictions(logits) is logits
    assert resolve_loss(lambda o, t: o, CUSTOM).predictions(logits) is logits


class Scalar(nn.Module):
    reduction = "mean"

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.mean()


BATCH = (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
LEARNT = torch.zeros(4, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "output", "target", "weight", "message"),
    [
        ("msee", *BATCH, None, "unknown loss 'msee'; did you mean 'mse'. known: bce, "),
        (7, *BATCH, None, "must be a name"),
        (nn.MSELoss(reduction="sum"), *BATCH, None, "reduction='mean'"),
        (Scalar(), *BATCH, None, "returned a scalar"),
        ("cross_entropy", torch.zeros(4), BATCH[1], None, "needs output"),
        ("cross_entropy", BATCH[0], torch.zeros(4), None, "torch.float32"),
        ("cross_entropy", BATCH[0], torch.zeros(4, 2).long(), None, "needs output"),
        (lambda o, t: o.mean(), *BATCH, torch.ones(4), r"return the loss of each sample.*scalar"),
        (lambda o, t: (o.sum(), 4.0), *BATCH, torch.ones(4), r"it returned a pair"),
        (lambda o, t: o[:2], *BATCH, None, r"received \(2, 3\)"),
        (lambda o, t: (o.sum(), o.mean()), LEARNT, BATCH[1], None, "its second value has a grad"),
        (lambda o, t: (o.mean(), {"mse": 1.0}), *BATCH, None, "received tuple"),
        (lambda o, t: 3.0, *BATCH, None, "float"),
    ],
)
def test_what_cannot_be_used_is_refused(
    loss: Any, output: Any, target: Any, weight: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_loss(loss, CUSTOM)(output, target, weight)


def test_class_loss_does_not_fit_a_regression() -> None:
    with pytest.raises(ConfigError, match="regression"):
        resolve_loss("cross_entropy", REGRESSION)


@pytest.mark.parametrize("name", sorted(set(ELEMENTWISE) - {"bce_with_logits"}))
def test_a_classifiers_loss_takes_logits(name: str) -> None:
    """Its outputs are taken as logits: a Sigmoid's are never negative, so all rows are class 1."""
    with pytest.raises(ConfigError, match=r"'bce_with_logits' .* without a final Sigmoid"):
        resolve_loss(name, CLASSIFICATION)
    resolve_loss("bce_with_logits", CLASSIFICATION)


@pytest.mark.parametrize(
    ("loss", "task"),
    [
        ("mse", REGRESSION),
        (nn.KLDivLoss(reduction="batchmean"), REGRESSION),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), ignore_index=1), CUSTOM),
        (lambda output, target: (output - target).abs(), CUSTOM),
    ],
)
def test_rows_add_up_to_the_sums(loss: Any, task: Any) -> None:
    torch.manual_seed(0)
    function = resolve_loss(loss, task)
    output = torch.randn(6, 3)
    is_classes = isinstance(loss, nn.CrossEntropyLoss)
    target = torch.tensor([0, 1, 2, 1, 0, 2]) if is_classes else torch.rand(6, 3)
    rows = function.rows(output, target)
    assert rows is not None
    losses, counts = rows
    assert losses.shape == (6,)
    for weight in (None, torch.rand(6)):
        w = torch.ones(6) if weight is None else weight
        loss_sum, weight_sum = function(output, target, weight)
        torch.testing.assert_close((losses * w).sum(), loss_sum)
        counted = w if counts is None else counts * w
        torch.testing.assert_close(counted.sum(), torch.as_tensor(weight_sum))


@pytest.mark.parametrize("reduce", [torch.mean, lambda values: (values.sum(), 6.0)])
def test_a_loss_of_sums_has_no_rows(reduce: Any) -> None:
    function = resolve_loss(lambda output, target: reduce(output - target), CUSTOM)
    assert function.rows(torch.zeros(6), torch.ones(6)) is None

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.outer_step import OuterOptimizer


def step(rule: OuterOptimizer, change: float) -> torch.Tensor:
    anchor = torch.arange(4, dtype=torch.float64)
    mean = torch.nn.Parameter(anchor + change)
    with torch.no_grad():
        rule.step([anchor], [mean], 0.1)
    assert torch.equal(anchor, torch.arange(4, dtype=torch.float64))
    return mean.detach()


def test_sgd_of_one_goes_to_the_mean() -> None:
    mean = step(OuterOptimizer("SGD", {"lr": 1.0}), 0.5)
    torch.testing.assert_close(mean, torch.arange(4, dtype=torch.float64) + 0.5)


@pytest.mark.parametrize("name", ["sgd", "adam", "Adagrad", "muon"])
def test_it_is_torchs_own_step(name: str) -> None:
    """Two rounds, as if the change over a round were a gradient of torch's."""
    options: dict[str, Any] = {"lr": 0.3}
    if name == "sgd":
        options |= {"momentum": 0.9, "nesterov": True}
    kind = {one.lower(): getattr(torch.optim, one) for one in dir(torch.optim)}[name.lower()]
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = kind([weight], **options)
    rule = OuterOptimizer(name, options)
    anchor = torch.ones(3, 2)
    for change in (0.5, -0.2):
        weight.grad = torch.full_like(weight, -change)
        optimizer.step()
        mean = anchor + change
        weight.grad = anchor - mean
        rule.step([anchor], [mean], 0.1)
        anchor = mean
    torch.testing.assert_close(anchor, weight.detach())


def test_state_survives_also_before_the_next_step() -> None:
    options = {"lr": 0.7, "momentum": 0.9}
    first, second, third = (OuterOptimizer("sgd", options) for _ in range(3))
    assert first.state_dict() == {"optimizer": None}
    step(first, 0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    third.load_state_dict(copy.deepcopy(second.state_dict()))  # passed on by one that never stepped
    expected = step(first, 0.3)
    assert torch.equal(step(second, 0.3), expected)
    assert torch.equal(step(third, 0.3), expected)


def test_state_is_taken_over_by_one_that_has_stepped() -> None:
    first, second = (OuterOptimizer("sgd", {"lr": 0.7, "momentum": 0.9}) for _ in range(2))
    step(first, 0.5)
    step(second, -2.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(step(second, 0.3), step(first, 0.3))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sdg", {"lr": 1.0}, "unknown outer_optimizer 'sdg'; did you mean 'sgd'. known: "),
        ("LBFGS", {"lr": 1.0}, "unknown outer_optimizer"),
        ("sgd", {"lr": 1.0, "betas": 3}, "SGD refused"),
        ("sgd", {"lr": 1.0, "nesterov": True}, "SGD refused"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterOptimizer(name, options)

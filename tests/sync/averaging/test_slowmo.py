from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.slowmo import SlowMo, SlowMoRule
from tests.gang import Gang
from tests.sync.apart import ROWS, SGD, SHAPES, Replicas, assert_close, train_on_rank
from tests.train.runs import but

MOMENTUM = but(SGD, optimizer_params={"momentum": 0.9})


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


@pytest.mark.gang
@pytest.mark.parametrize("rows", [ROWS, [9, 0, 33]])
def test_follows_the_paper(gang3: Gang, rows: list[int]) -> None:
    """Wang et al. 2020: u and the next round's beginning, under a learning rate that falls."""
    beta, alpha = 0.6, 0.9
    reference = Replicas(MOMENTUM, rows, momentum=0.9)
    begin, u = reference.x[0].clone(), torch.zeros_like(reference.x[0])
    for step in range(9):
        reference.step()
        reference.learning_rate = 0.05 * 0.5 ** ((step + 1) // 4)
        if step % 3 == 2:
            gamma = reference.learning_rate
            u = beta * u + (begin - reference.mean()) / gamma
            begin = begin - alpha * gamma * u
            reference.x[:] = begin
    strategy = SlowMo(
        averaging_period=3,
        slow_momentum=beta,
        slow_learning_rate=alpha,
        optimizer_state="keep",
    )
    config = but(MOMENTUM, sync_strategy=strategy, scheduler=falling)
    for mine, _, _ in gang3.run(train_on_rank, config, rows):
        assert_close(mine, begin)


@pytest.mark.gang
@pytest.mark.parametrize("optimizer_state", ["keep", "average", "reset"])
def test_without_momentum_it_is_averaging(gang: Gang, optimizer_state: str) -> None:
    slow = SlowMo(averaging_period=2, slow_momentum=0.0, optimizer_state=optimizer_state)
    plain = LocalSGD(averaging_period=2, optimizer_state=optimizer_state)
    for (mine, _, sent), (theirs, _, theirs_sent) in zip(
        gang.run(train_on_rank, but(MOMENTUM, sync_strategy=slow, epochs=2), [21, 17]),
        gang.run(train_on_rank, but(MOMENTUM, sync_strategy=plain, epochs=2), [21, 17]),
        strict=True,
    ):
        assert_close(mine, theirs)
        assert sent == theirs_sent


@pytest.mark.gang
def test_bytes_are_those_of_the_formula(gang3: Gang) -> None:
    strategy = SlowMo(averaging_period=3)
    expected = strategy.bytes_per_step(SHAPES, 8, 3) * 9
    results = gang3.run(train_on_rank, but(SGD, sync_strategy=strategy), ROWS)
    assert [sent for _, _, sent in results] == [expected] * 3


def test_a_learning_rate_of_zero_leaves_the_mean() -> None:
    rule = SlowMoRule(0.5, 1.0)
    anchor, mean = torch.zeros(3), torch.ones(3)
    rule.step([anchor], [mean], 0.0)
    assert torch.equal(mean, torch.ones(3))
    assert rule.state_dict() == {"momenta": []}


def test_an_optimizer_without_a_learning_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="learning rate"):
        SlowMoRule(0.5, 1.0).step([torch.zeros(3)], [torch.ones(3)], float("nan"))


def test_state_survives() -> None:
    anchor = torch.zeros(3)
    rules = [SlowMoRule(0.5, 1.0), SlowMoRule(0.5, 1.0)]
    rules[0].step([anchor], [anchor + 1], 0.1)
    rules[1].load_state_dict(copy.deepcopy(rules[0].state_dict()))
    means = [anchor + 2, anchor + 2]
    for rule, mean in zip(rules, means, strict=True):
        rule.step([anchor], [mean], 0.1)
    assert torch.equal(*means)


@pytest.mark.parametrize(
    "options",
    [
        {"averaging_period": 0},
        {"slow_momentum": 1.0},
        {"slow_learning_rate": 0.0},
        {"optimizer_state": "drop"},
    ],
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SlowMo(**options)

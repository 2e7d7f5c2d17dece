from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.slowmo import SlowMo, SlowMoRule
from tests.gang import Gang
from tests.sync.apart import ROWS, SGD, Replicas, assert_close, train_on_rank
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


def test_a_learning_rate_of_zero_leaves_the_mean() -> None:
    rule = SlowMoRule(0.5, 1.0)
    anchor, mean = torch.zeros(3), torch.ones(3)
    rule.step([anchor], [mean], 0.0)
    assert torch.equal(mean, torch.ones(3))
    assert rule.state_dict() == {"momenta": []}


def test_an_optimizer_without_a_learning_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="learning rate"):
        SlowMoRule(0.5, 1.0).step([torch.zeros(3)], [torch.ones(3)], float("nan"))


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

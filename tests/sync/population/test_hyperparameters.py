"""Numbers of an optimizer, changed while it trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from sparkdl.errors import ConfigError
from sparkdl.sync.population.hyperparameters import (
    first_values,
    rescaled,
    set_present_rate,
    set_values,
)
from sparkdl.train.optimizers.warmup import warmup


def sgd(*groups: dict[str, Any], **options: Any) -> torch.optim.SGD:
    made = [{"params": [nn.Parameter(torch.ones(2))], **group} for group in groups or ({},)]
    return torch.optim.SGD(made, lr=0.1, **options)


def values(optimizer: torch.optim.Optimizer, key: str) -> list[float]:
    return [group[key] for group in optimizer.param_groups]


def test_groups_keep_their_proportion() -> None:
    optimizer = sgd({}, {"lr": 0.01, "weight_decay": 0.0}, weight_decay=0.5)
    set_values(optimizer, None, {"learning_rate": 0.3, "weight_decay": 1.0})
    assert values(optimizer, "lr") == [0.3, pytest.approx(0.03)]
    assert values(optimizer, "weight_decay") == [1.0, 0.0]
    assert first_values(optimizer, ["weight_decay", "learning_rate"]) == {
        "weight_decay": 1.0,
        "learning_rate": 0.3,
    }


def test_from_zero_all_get_the_value() -> None:
    optimizer = sgd({}, {"momentum": 0.4})
    set_values(optimizer, None, {"momentum": 0.9})
    assert values(optimizer, "momentum") == [0.9, 0.9]


SCHEDULES: dict[str, Callable[[Any], lr_scheduler.LRScheduler]] = {
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.5),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=9),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.7, total_steps=9, cycle_momentum=False),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.4, cycle_momentum=False),
    "in sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.8)],
        milestones=[4],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.8), lr_scheduler.ConstantLR(optimizer, 0.5, 3)]
    ),
    "warm-up": warmup(steps=3, then=partial(lr_scheduler.CosineAnnealingLR, T_max=5)),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_a_schedule_keeps_its_shape_and_place(name: str, at: int) -> None:
    base, double = sgd(), sgd()
    schedules = [SCHEDULES[name](optimizer) for optimizer in (base, double)]
    rate = first_values(double, ["learning_rate"])["learning_rate"]
    for step in range(8):
        if step == at:
            set_values(double, schedules[1], {"learning_rate": 2 * rate})
        factor = 2 if step >= at else 1
        assert values(double, "lr") == [pytest.approx(factor * values(base, "lr")[0])]
        for optimizer, schedule in zip((base, double), schedules, strict=True):
            optimizer.step()
            schedule.step()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_a_present_rate_is_where_the_schedule_goes_on(name: str, at: int) -> None:
    plain, changed = sgd({}, {"lr": 0.05}), sgd({}, {"lr": 0.05})
    schedules = [SCHEDULES[name](optimizer) for optimizer in (plain, changed)]
    factor = 1.0
    for step in range(8):
        if step == at:
            groups = changed.param_groups
            factor = 0.3 / groups[0]["lr"]
            state = rescaled(
                schedules[1].state_dict(), set_present_rate(groups, 0.3, is_scheduled=True)
            )
            schedules[1].load_state_dict(state)
            assert groups[0]["lr"] == 0.3
        assert values(changed, "lr") == pytest.approx([factor * r for r in values(plain, "lr")])
        for optimizer, schedule in zip((plain, changed), schedules, strict=True):
            optimizer.step()
            schedule.step()


def test_a_present_rate_of_zero() -> None:
    optimizer = sgd({}, {"lr": 0.01})
    set_present_rate(optimizer.param_groups, 0.0, is_scheduled=False)
    assert values(optimizer, "lr") == [0.0, 0.0]
    with pytest.raises(ConfigError, match="has set the learning rate to 0"):
        set_present_rate(optimizer.param_groups, 0.3, is_scheduled=True)
    set_present_rate(optimizer.param_groups, 0.3, is_scheduled=False)
    assert values(optimizer, "lr") == [0.3, 0.3]


def test_what_is_there_already_changes_nothing() -> None:
    optimizer = sgd(momentum=0.9)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.7)
    wanted = {"learning_rate": 0.3, "momentum": 0.5}
    set_values(optimizer, schedule, wanted)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    before = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    set_values(optimizer, schedule, wanted)
    assert (optimizer.state_dict(), schedule.state_dict()) == before


@pytest.mark.parametrize("name", ["nesterov", "betas", "learningRate"])
def test_what_is_no_number_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"SGD has no number called '{name}' .* it has learning_"):
        set_values(sgd(), None, {name: 1.0})

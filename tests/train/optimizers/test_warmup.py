from __future__ import annotations

import functools
import json
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import sparkdl
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.inference.regression import REGRESSION
from sparkdl.serialization.json_objects import describe, restore
from tests.train.runs import NUM_FEATURES, Keeper, make_data, run, seeded, weights

COSINE = functools.partial(lr_scheduler.CosineAnnealingLR, T_max=6)
SCHEDULES = [
    functools.partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    COSINE,
    functools.partial(lr_scheduler.ExponentialLR, gamma=0.5),
    functools.partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.5),
    functools.partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=20),
]


def make_optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=9.0, momentum=0.9)


def rates_of(make: Any, num_steps: int, optimizer: torch.optim.Optimizer) -> list[float]:
    """The first group's rate in each of the first steps."""
    scheduler = make(optimizer)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_the_rate_rises_evenly_and_stays() -> None:
    rates = rates_of(sparkdl.warmup(steps=4, start_factor=0.2), 7, make_optimizer(0.5))
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5], abs=1e-15)
    assert rates[4:] == [0.5] * 3


@pytest.mark.parametrize("then", SCHEDULES, ids=lambda then: then.func.__name__)
def test_another_schedule_takes_over_with_its_own_rates(then: Any) -> None:
    expected = rates_of(then, 6, make_optimizer(0.5))
    rates = rates_of(sparkdl.warmup(steps=3, start_factor=0.25, then=then), 9, make_optimizer(0.5))
    ramp = [expected[0] * factor for factor in (0.25, 0.5, 0.75)]
    assert rates == pytest.approx(ramp + expected, abs=1e-15)


def test_each_group_rises_to_its_own_rate() -> None:
    optimizer = make_optimizer(0.5, 2.0)
    rates_of(sparkdl.warmup(steps=2, then=COSINE), 2, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]


def test_one_step_and_the_whole_rate_from_the_start() -> None:
    assert rates_of(sparkdl.warmup(steps=1), 2, make_optimizer(0.5)) == [0.05, 0.5]
    flat = sparkdl.warmup(steps=3, start_factor=1.0)
    assert rates_of(flat, 4, make_optimizer(0.5)) == [0.5] * 4


@pytest.mark.parametrize("then", [None, COSINE, SCHEDULES[0]])
def test_the_factory_is_pickled_and_described_by_its_arguments(then: Any) -> None:
    factory = sparkdl.warmup(steps=4, start_factor=0.25, then=then)
    expected = rates_of(factory, 8, make_optimizer(0.5))
    written = json.dumps(describe(factory))
    for copied in (pickle.loads(pickle.dumps(factory)), restore(json.loads(written))):
        assert rates_of(copied, 8, make_optimizer(0.5)) == expected
    assert written != json.dumps(describe(sparkdl.warmup(steps=5, start_factor=0.25, then=then)))


@pytest.mark.parametrize("stop", [2, 4, 7])
@pytest.mark.parametrize("then", [None, *SCHEDULES])
def test_goes_on_from_its_state_dict(stop: int, then: Any) -> None:
    factory = sparkdl.warmup(steps=4, then=then)
    straight = rates_of(factory, 10, make_optimizer(0.5))
    first, second = make_optimizer(0.5), make_optimizer(0.5)
    scheduler = factory(first)
    for _ in range(stop):
        first.step()
        scheduler.step()
    resumed = factory(second)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    rates = []
    for _ in range(stop, 10):
        rates.append(second.param_groups[0]["lr"])
        second.step()
        resumed.step()
    assert rates == straight[stop:]


@pytest.mark.parametrize("stop", [3, 7])
def test_a_resumed_run_ends_with_the_bits_of_the_uninterrupted_one(stop: int) -> None:
    config = TrainConfig(
        task=REGRESSION,
        optimizer="lamb",
        learning_rate=0.1,
        scheduler=sparkdl.warmup(steps=5, then=COSINE),
        batch_size=4,
        epochs=2,
    )
    data = make_data([20])

    def make_net() -> nn.Module:
        return seeded(lambda: nn.Linear(NUM_FEATURES, 1, dtype=torch.float64))

    keeper, straight, resumed = Keeper(steps=(stop,)), make_net(), make_net()
    outcome = run(straight, config, data, sink=keeper)
    again = run(resumed, config, data, resume=keeper.points[stop])
    assert torch.equal(weights(straight), weights(resumed))
    rates = [record["learning_rate"] for record in outcome.history]
    assert rates == [record["learning_rate"] for record in again.history]
    assert rates[0] == 0.1
    assert rates[1] < 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps of the warm-up must be at least 1; received 0"),
        ({"steps": 3, "start_factor": 0.0}, "start_factor must be above 0 and at most 1"),
        ({"steps": 3, "start_factor": 1.5}, "start_factor must be above 0 and at most 1"),
        ({"steps": 3, "then": "cosine"}, "then must be a callable, .*; received 'cosine'"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sparkdl.warmup(**options)


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lr_scheduler.ReduceLROnPlateau, "is stepped by evaluations"),
        (lambda optimizer: None, "must return an LRScheduler"),
    ],
)
def test_what_cannot_follow_is_refused(then: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sparkdl.warmup(steps=3, then=then)(make_optimizer(0.5))

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.train.optimizers.large_batch import LAMB, LARS
from sparkdl.train.optimizers.optimizers import OPTIMIZERS, make_scheduler, resolve_optimizer
from sparkdl.train.optimizers.warmup import warmup


def made(**options: Any) -> torch.optim.Optimizer:
    return resolve_optimizer(TrainConfig(**options))(nn.Linear(2, 1).parameters())


@pytest.mark.parametrize("name", ["adamw", "AdamW", "ADAMW", torch.optim.AdamW])
def test_name_or_class_with_options(name: Any) -> None:
    optimizer = made(optimizer=name, learning_rate=0.3, optimizer_params={"weight_decay": 0.5})
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["lr"] == 0.3
    assert optimizer.defaults["weight_decay"] == 0.5


def test_without_learning_rate_the_optimizers_own_default_stays() -> None:
    assert made(optimizer="adam").defaults["lr"] == 0.001
    assert made(optimizer="adam", optimizer_params={"lr": 0.7}).defaults["lr"] == 0.7


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_what_is_given_by_name_is_fused(name: str) -> None:
    assert made(optimizer=name).defaults["fused"] is True
    assert made(optimizer=name, optimizer_params={"fused": False}).defaults["fused"] is False
    assert not made(optimizer=name, optimizer_params={"foreach": True}).defaults["fused"]
    assert not made(optimizer=name, precision="fp16").defaults["fused"]
    assert not made(optimizer=OPTIMIZERS[name]).defaults["fused"]
    number = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    assert not resolve_optimizer(TrainConfig(optimizer=name))([number]).defaults["fused"]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_fused_is_the_same_arithmetic(name: str) -> None:
    momentum = {"momentum": 0.9, "nesterov": True} if name == "sgd" else {}
    results = []
    for fused in (True, False):
        parameter = nn.Parameter(torch.linspace(-1, 1, 50, dtype=torch.float64))
        options = {"fused": fused, "weight_decay": 0.1, **momentum}
        config = TrainConfig(optimizer=name, learning_rate=0.1, optimizer_params=options)
        optimizer = resolve_optimizer(config)([parameter])
        for step in range(5):
            parameter.grad = (parameter.detach() * (step + 1)).sin()
            optimizer.step()
        results.append(parameter.detach())
    assert torch.allclose(*results, rtol=0, atol=1e-14)


def test_table_has_what_works_step_by_step() -> None:
    assert {"sgd", "adam", "adamw", "rmsprop", "adagrad"} <= set(OPTIMIZERS)
    assert not {"lbfgs", "optimizer"} & set(OPTIMIZERS)


def test_callable() -> None:
    optimizer = made(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.25))
    assert optimizer.defaults["lr"] == 0.25


class Groupless(torch.optim.Optimizer):
    """Wraps another, and hides its groups."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adan"}, "unknown optimizer 'adan'; did you mean 'adam'. known: adadelta, "),
        ({"optimizer": torch.optim.LBFGS}, "step by step"),
        ({"optimizer": 3}, "must be a name"),
        ({"optimizer": lambda p: p}, "must make a torch.optim.Optimizer"),
        ({"optimizer": Groupless}, "Groupless has no param_groups: call super"),
        ({"optimizer": lambda p: p, "learning_rate": 0.1}, r"set \['lr'\] there"),
        ({"optimizer": "sgd", "optimizer_params": {"betas": 1}}, "refused"),
        ({"optimizer": "sgd", "optimizer_params": {"momentum": -1}}, r"refused (?!.*fused')"),
        ({"learning_rate": 0.1, "optimizer_params": {"lr": 1.0}}, "keep one"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**options)


def test_scheduler() -> None:
    optimizer = made()
    assert make_scheduler(TrainConfig(), optimizer, made, 1) is None
    config = TrainConfig(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3))
    schedule = make_scheduler(config, optimizer, made, 7)
    assert schedule is not None
    assert isinstance(schedule.scheduler, torch.optim.lr_scheduler.StepLR)
    assert schedule.every == 1


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ("cosine", "must be a callable"),
        (lambda o: None, "must return an LRScheduler"),
        (
            lambda o: warmup(o, steps=2, then=torch.optim.lr_scheduler.ReduceLROnPlateau),
            "is stepped by evaluations",
        ),
    ],
)
def test_wrong_scheduler(scheduler: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scheduler(TrainConfig(scheduler=scheduler), made(), made, 1)


@pytest.mark.parametrize(("name", "kind"), [("lars", LARS), ("LAMB", LAMB)])
def test_our_own_optimizers_have_names_too(name: str, kind: type) -> None:
    optimizer = made(optimizer=name, learning_rate=0.3, optimizer_params={"weight_decay": 0.5})
    assert type(optimizer) is kind
    assert optimizer.defaults["weight_decay"] == 0.5

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.train.optimizers.optimizers import make_scheduler, parameter_groups, resolve_optimizer
from sparkdl.train.optimizers.warmup import warmup


def make_net() -> nn.ModuleDict:
    return nn.ModuleDict(
        {"encoder": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), "head": nn.Linear(4, 2)}
    )


def optimizer_of(module: nn.Module, groups: Any, **options: Any) -> torch.optim.Optimizer:
    config = TrainConfig(**{"optimizer": "sgd", "learning_rate": 0.5, **options},
                         parameter_groups=groups)  # fmt: skip
    trained = [p for p in module.parameters() if p.requires_grad]
    return resolve_optimizer(config, module)(trained)


def described(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[float, list[str]]]:
    names = {id(p): name for name, p in module.named_parameters()}
    return [(g["lr"], [names[id(p)] for p in g["params"]]) for g in optimizer.param_groups]


def test_the_rest_comes_first_and_groups_in_their_order() -> None:
    module = make_net()
    optimizer = optimizer_of(module, {"encoder.1": {"lr": 0.1}, "encoder.0": {"lr": 0.2}})
    assert described(module, optimizer) == [
        (0.5, ["head.weight", "head.bias"]),
        (0.1, ["encoder.1.weight", "encoder.1.bias"]),
        (0.2, ["encoder.0.weight", "encoder.0.bias"]),
    ]


def test_no_group_is_empty() -> None:
    module = make_net()
    optimizer = optimizer_of(module, {"*.weight": {}, "*.bias": {"weight_decay": 0.0}})
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 3]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop", "lars", "lamb", "adagrad"])
def test_groups_suit_every_kind_of_optimizer(name: str) -> None:
    module = make_net()
    groups = {"encoder": {"lr": 0.25, "weight_decay": 0.5}}
    optimizer = optimizer_of(module, groups, optimizer=name)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.25]
    assert [g["weight_decay"] for g in optimizer.param_groups][1] == 0.5
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if name in ("sgd", "adam", "adamw"):
        assert all(group["fused"] for group in optimizer.param_groups)


def test_schedules_scale_every_group() -> None:
    module = make_net()
    optimizer = optimizer_of(module, {"head": {"lr": 5.0}})
    config = TrainConfig(scheduler=warmup(steps=10, start_factor=0.5))
    make_scheduler(config, optimizer, lambda parameters: optimizer, 1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 2.5]


def test_frozen_parameters_belong_to_no_group() -> None:
    module = make_net()
    module["encoder"][0].requires_grad_(False)
    optimizer = optimizer_of(module, {"encoder": {"lr": 0.1}})
    assert described(module, optimizer)[1] == (0.1, ["encoder.1.weight", "encoder.1.bias"])
    with pytest.raises(ConfigError, match=r"parameterGroups: no parameter .* 'encoder\.0'"):
        optimizer_of(module, {"encoder.0": {"lr": 0.1}})


def test_a_parameter_cannot_be_in_two() -> None:
    with pytest.raises(ConfigError, match=r"both 'head' and '\*\.bias' mean 'head.bias'; let each"):
        parameter_groups(make_net(), {"head": {}, "*.bias": {}})


def test_tied_parameters_go_by_any_of_their_names() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4)})
    module["head"].weight = module["embed"].weight
    optimizer = optimizer_of(module, {"head.weight": {"lr": 0.1}})
    assert described(module, optimizer) == [(0.5, ["head.bias"]), (0.1, ["embed.weight"])]


def test_parameters_that_stand_in_for_the_modules_go_by_their_places() -> None:
    module = make_net()
    twins = [nn.Parameter(p.detach().clone()) for p in module.parameters()]
    groups = parameter_groups(module, {"head": {"lr": 1.0}})(twins)
    assert groups[1]["params"][0] is twins[4]
    with pytest.raises(ConfigError, match=r"the 6 parameters that train, .* optimizer of 5"):
        parameter_groups(module, {"head": {}})(twins[:5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "refused .*parameterGroups: Invalid learning rate"),
        ({"learning_rate": 1.0}, "refused .*parameterGroups: .*'learning_rate'"),
        ({"weight_decay": -0.1}, "refused .*parameterGroups: Invalid weight_decay"),
    ],
)
@pytest.mark.parametrize("name", ["sgd", "lamb"])
def test_options_are_checked_which_torch_does_not(name: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"refused .*parameterGroups: "):
        optimizer_of(make_net(), {"head": options}, optimizer=name)
    if name == "sgd":
        with pytest.raises(ConfigError, match=message):
            optimizer_of(make_net(), {"head": options}, optimizer=name)


def test_an_optimizer_of_ones_own_making_takes_no_groups() -> None:
    with pytest.raises(ConfigError, match="a callable makes its optimizer itself; set the para"):
        optimizer_of(make_net(), {"head": {}}, learning_rate=None, optimizer=lambda p: p)

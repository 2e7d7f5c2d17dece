"""What a search may vary, and the estimators that follow from it."""

from __future__ import annotations

import functools
from typing import Any

import optuna
import pytest
from torch import nn

from sparkdl import AllReduce, Around, EarlyStopping, LocalSGD, Range, TorchRegressor
from sparkdl.errors import ConfigError
from sparkdl.tuning.space import Chooser, with_values


def net(width: int = 3, *, depth: int = 1) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def estimator(**params: Any) -> TorchRegressor:
    return TorchRegressor(module=net, **params)


def drawn(space: Any, of: Any = None, *, seed: int = 1, trials: int = 12) -> list[dict[str, Any]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    choose = Chooser(space, of)
    return [dict(choose(study.ask())) for _ in range(trials)]


def test_params_entries_fields_and_arguments_are_set_in_a_copy() -> None:
    own = estimator(
        optimizerParams={"momentum": 0.5, "nesterov": True},
        syncStrategy=LocalSGD(averaging_period=4),
        earlyStopping=EarlyStopping(patience=2),
    )
    made = with_values(
        own,
        {
            "learningRate": 0.1,
            "optimizerParams.momentum": 0.9,
            "syncStrategy.averaging_period": 8,
            "earlyStopping.patience": 5,
            "module.width": 7,
            "module.depth": 2,
        },
    )
    assert made.getLearningRate() == 0.1
    assert made.getOptimizerParams() == {"momentum": 0.9, "nesterov": True}
    assert made.getSyncStrategy() == LocalSGD(averaging_period=8)
    assert made.getEarlyStopping().patience == 5
    assert [layer.in_features for layer in made.getModule()()] == [7, 7]
    assert own.getOptimizerParams()["momentum"] == 0.5
    assert own.getModule() is net


def test_a_whole_param_comes_before_its_parts() -> None:
    own = estimator(syncStrategy=AllReduce())
    values = {"syncStrategy.averaging_period": 8, "syncStrategy": LocalSGD()}
    assert with_values(own, values).getSyncStrategy() == LocalSGD(averaging_period=8)
    given = with_values(own, {"module": functools.partial(net, 5), "module.depth": 2})
    assert len(given.getModule()()) == 2


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("learnigRate", 0.1, "TorchRegressor has no Param 'learnigRate'; did you mean 'learningR"),
        ("module.widht", 3, "has no argument 'widht'; did you mean 'width'"),
        ("syncStrategy.period", 3, "has no field 'period'"),
        ("syncStrategy.averaging_period", 0, "averaging_period must be a number of steps"),
        ("epochs.more", 3, "epochs.more cannot be varied, since epochs is 2"),
        ("epochs", "many", "epochs"),
    ],
)
def test_what_cannot_be_set_is_named(key: str, value: Any, message: str) -> None:
    own = estimator(epochs=2, syncStrategy=LocalSGD())
    with pytest.raises(ConfigError, match=message):
        with_values(own, {key: value})


def test_a_module_that_is_there_already_has_no_arguments() -> None:
    with pytest.raises(ConfigError, match="pass the function or class that makes it"):
        with_values(TorchRegressor(module=nn.Linear(3, 1)), {"module.out_features": 2})


def test_values_come_from_ranges_and_lists() -> None:
    space = {
        "learningRate": Range(1e-4, 1e-1, log=True),
        "batchSize": Range(16, 64, step=16),
        "optimizer": ["sgd", "adam"],
        "syncStrategy": (AllReduce(), LocalSGD(averaging_period=2)),
    }
    found = drawn(space)
    assert all(1e-4 <= values["learningRate"] <= 1e-1 for values in found)
    assert {values["batchSize"] for values in found} <= {16, 32, 48, 64}
    assert {values["optimizer"] for values in found} == {"sgd", "adam"}
    strategies = {values["syncStrategy"] for values in found}
    assert strategies == {AllReduce(), LocalSGD(averaging_period=2)}
    assert Chooser(space).described()["optimizer"] == ["sgd", "adam"]


def test_around_goes_by_the_value_that_the_estimator_has() -> None:
    own = estimator(learningRate=0.1, optimizerParams={"weight_decay": 1e-3})
    space = {"learningRate": Around(2), "optimizerParams.weight_decay": Around()}
    found = drawn(space, own)
    assert all(0.05 <= values["learningRate"] <= 0.2 for values in found)
    assert all(1e-4 <= values["optimizerParams.weight_decay"] <= 1e-2 for values in found)
    with pytest.raises(
        ConfigError, match="'learningRate' has values Around its own, which is None"
    ):
        Chooser(space, estimator())


def test_a_function_may_make_one_value_depend_on_another() -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        values: dict[str, Any] = {"optimizer": trial.suggest_categorical("kind", ["sgd", "adam"])}
        if values["optimizer"] == "sgd":
            values["optimizerParams.momentum"] = trial.suggest_float("momentum", 0.1, 0.9)
        return values

    found = drawn(space)
    assert {len(values) for values in found} == {1, 2}
    assert Chooser(space).described() == "a function"
    with pytest.raises(ConfigError, match="must return a dict from Params to values"):
        drawn(lambda trial: 3)


def test_a_finished_trial_gives_its_values_again() -> None:
    study = optuna.create_study()
    choose = Chooser({"module": [net, nn.Identity], "epochs": Range(1, 3)})
    trial = study.ask()
    values = choose(trial)
    study.tell(trial, 1.0)
    assert choose(study.best_trial) == values
    assert values["module"] in (net, nn.Identity)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "the space is empty"),
        ({"epochs": []}, "must be a sparkdl.Range, a sparkdl.Around or a list"),
        ({"epochs": 3}, "must be a sparkdl.Range"),
        ({"optimizer": "adam"}, "must be a sparkdl.Range"),
        ({"epochs": [3, 3]}, "must differ"),
        ({"module": [lambda: 1, lambda: 2]}, "must differ, also as text"),
        (3, "space must be a dict"),
    ],
)
def test_spaces_that_mean_nothing(space: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Chooser(space)

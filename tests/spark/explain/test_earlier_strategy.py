"""A strategy that is "auto" is that of the fit which initialState goes on from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from sparkdl import (
    AllReduce,
    ConfigError,
    LocalSGD,
    ParameterAveraging,
    PowerSGD,
    TorchRegressor,
)
from sparkdl.spark.explain.choose_values import start_of, strategy_of
from sparkdl.sync import known_strategies
from sparkdl.sync.population.population import Competition
from sparkdl.train.training_state import TrainingMethod, TrainingState


def request(strategy: str, mode: Any = "gang", **params: Any) -> Any:
    method = TrainingMethod(
        mode=mode, strategy=strategy, optimizer="sgd", scheduler=None, trained=(), options=()
    )
    state = TrainingState(epoch=2, step=8, rows_seen=64, method=method, parts={})
    earlier = SimpleNamespace(trainingState=state, module=nn.Linear(3, 1))
    estimator = TorchRegressor(
        module=nn.Linear(3, 1), syncStrategy="auto", initialState=earlier, **params
    )
    return start_of(None, estimator._request())  # type: ignore[arg-type] # no row is looked at


def test_it_is_taken_and_nothing_is_measured_for_it() -> None:
    found = request(repr(LocalSGD(averaging_period=6)))
    assert found.config.sync_strategy == LocalSGD(averaging_period=6)
    assert found.automatic == ()
    assert found.execution_mode == "gang"
    assert found.chosen["syncStrategy"]["value"] == "LocalSGD(averaging_period=6)"
    assert "the fit that initialState goes on from" in found.chosen["syncStrategy"]["reason"]
    assert request(repr(AllReduce()), numWorkers="auto").automatic == ("numWorkers",)
    averaged = ParameterAveraging(averaging_period="auto", target_share=0.05)
    found = request(repr(averaged), "rounds")
    assert (found.config.sync_strategy, found.execution_mode) == (averaged, "rounds")


def test_every_form_of_the_packages_own_strategies_comes_back() -> None:
    own = AllReduce(compression=PowerSGD(rank=2))
    forms = [form for kind in known_strategies() for form in kind.examples()]
    # Of a population no fit goes on.
    for one in (own, *(form for form in forms if not isinstance(form, Competition))):
        assert strategy_of(repr(one)) == one


@pytest.mark.parametrize("text", ["Mine(x=3)", "Mine", "LocalSGD(", "Range(low=1, high=2)", "3"])
def test_another_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ConfigError, match="set syncStrategy to the strategy of the earlier fit"):
        strategy_of(text)

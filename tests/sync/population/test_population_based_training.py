"""Who copies whom, and what becomes of hyperparameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.serialization.json_objects import describe, restore
from sparkdl.sync.population.population import drawn
from sparkdl.sync.population.population_based_training import PopulationBasedTraining
from sparkdl.sync.population.ranges import Around, Range
from tests.sync.population.test_population import plan_of

OWN = {"learning_rate": 0.1, "momentum": 0.9}
RATE = Range(0.01, 1.0, log=True)
STRATEGY = PopulationBasedTraining(
    period=4, mutations={"learning_rate": RATE, "momentum": [0.0, 0.5, 0.9]}
)


def but(**changes: Any) -> PopulationBasedTraining:
    return PopulationBasedTraining(
        **{"period": 4, "mutations": dict(STRATEGY.mutations), **changes}
    )


def test_the_worst_quarter_copies_the_best() -> None:
    losses = [5.0, 1.0, 7.0, 3.0, 8.0, 2.0, 4.0, 6.0]
    for step in (4, 8, 12):
        donors = STRATEGY.donors(losses, 0, step)
        assert donors.keys() == {2, 4}
        assert set(donors.values()) <= {1, 5}
    chosen = {STRATEGY.donors(losses, 0, step)[4] for step in range(4, 80, 4)}
    assert chosen == {1, 5}


@pytest.mark.parametrize(
    ("count", "fraction", "copying"),
    [(1, 0.25, 0), (2, 0.25, 1), (3, 0.25, 1), (3, 0.5, 1), (5, 0.25, 2), (8, 0.5, 4)],
)
def test_how_many_copy(count: int, fraction: float, copying: int) -> None:
    donors = but(exploit_fraction=fraction).donors([float(i) for i in range(count)], 0, 4)
    assert donors.keys() == set(range(count - copying, count))
    assert set(donors.values()) <= set(range(copying))


def test_who_has_diverged_always_copies() -> None:
    losses = [math.nan, 1.0, math.inf, 2.0, math.nan, 3.0, 4.0, 5.0]
    donors = STRATEGY.donors(losses, 0, 4)
    assert donors.keys() == {0, 2, 4}
    assert set(donors.values()) <= {1, 3}
    assert STRATEGY.donors([math.nan, math.nan], 0, 4) == {}


def test_member_0_begins_as_the_user_says_and_others_at_random() -> None:
    assert STRATEGY.first(0, OWN, 5) == OWN
    others = [STRATEGY.first(member, OWN, 5) for member in range(1, 200)]
    rates = [values["learning_rate"] for values in others]
    assert all(0.01 <= rate <= 1.0 for rate in rates)
    assert len(set(rates)) == len(rates)
    assert 0.35 < sum(rate < 0.1 for rate in rates) / len(rates) < 0.65  # even in the logarithm
    assert {values["momentum"] for values in others} == {0.0, 0.5, 0.9}
    assert STRATEGY.first(3, OWN, 5) == others[2]
    assert STRATEGY.first(3, OWN, 6) != others[2]


def test_exploring_multiplies_or_moves_on() -> None:
    strategy = but(resample_probability=0.0)
    values = {"learning_rate": 0.1, "momentum": 0.5}
    found = [strategy.explored(values, OWN, seed=0, step=4, member=m) for m in range(40)]
    assert {round(value["learning_rate"], 9) for value in found} == {0.08, 0.12}
    assert {value["momentum"] for value in found} == {0.0, 0.9}
    edge = {"learning_rate": 0.95, "momentum": 0.9}
    found = [strategy.explored(edge, OWN, seed=0, step=4, member=m) for m in range(40)]
    assert {round(value["learning_rate"], 9) for value in found} == {0.76, 1.0}
    assert {value["momentum"] for value in found} == {0.5, 0.9}


def test_exploring_draws_anew_with_its_probability() -> None:
    values = {"learning_rate": 0.1, "momentum": 0.5}
    found = [STRATEGY.explored(values, OWN, seed=0, step=4, member=m) for m in range(400)]
    drawn_anew = sum(round(value["learning_rate"], 9) not in (0.08, 0.12) for value in found)
    assert 70 < drawn_anew < 130
    always = but(resample_probability=1.0)
    rates = [
        always.explored(values, OWN, seed=0, step=4, member=m)["learning_rate"] for m in range(40)
    ]
    assert len(set(rates)) == 40
    assert STRATEGY.explored(values, OWN, seed=0, step=4, member=7) == found[7]
    assert STRATEGY.explored(values, OWN, seed=0, step=8, member=7) != found[7]


def test_a_value_that_is_not_in_the_list_is_left_for_one_that_is() -> None:
    strategy = but(resample_probability=0.0)
    values = {"learning_rate": 0.1, "momentum": 0.7}
    found = {
        strategy.explored(values, OWN, seed=0, step=4, member=m)["momentum"] for m in range(40)
    }
    assert found == {0.0, 0.5, 0.9}


def test_around_is_about_the_users_own_value() -> None:
    strategy = PopulationBasedTraining(mutations={"learning_rate": Around(factor=4)})
    assert strategy.domains(OWN) == {"learning_rate": Range(0.025, 0.4, log=True)}
    with pytest.raises(ConfigError, match=r"Around its own, which is 0\.0, .* give a"):
        strategy.domains({"learning_rate": 0.0})


def test_ranges_may_be_even_and_reach_below_zero() -> None:
    generator = drawn(0, 9)
    even = Range(-1.0, 1.0)
    values = [even.sample(generator) for _ in range(100)]
    assert 30 < sum(value < 0 for value in values) < 70
    assert even.perturbed(-0.9, [1.2], generator) == -1.0


def test_every_member_sees_every_shard_and_each_shard_one_member() -> None:
    plan = plan_of(4, 0, 4, 4)
    by_round = [
        [STRATEGY.shard_of(plan, member, step) for member in range(3)] for step in (0, 4, 8, 12)
    ]
    assert by_round == [[0, 2, 3], [2, 3, 0], [3, 0, 2], [0, 2, 3]]
    assert STRATEGY.shard_of(plan, 1, 7) == STRATEGY.shard_of(plan, 1, 4)


def test_check_knows_the_optimizers_numbers() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    adam = torch.optim.Adam(parameters)
    STRATEGY.check_optimizer(sgd)
    PopulationBasedTraining(mutations={"weight_decay": [0.0, 0.01]}).check_optimizer(adam)
    with pytest.raises(ConfigError, match=r"Adam has no number called 'momentum' .* weight_decay"):
        STRATEGY.check_optimizer(adam)
    with pytest.raises(ConfigError, match="has no number called 'nesterov'"):
        but(mutations={"nesterov": [0, 1]}).check_optimizer(sgd)
    with pytest.raises(ConfigError, match=r"which is 0(\.0)?, .* give a Range"):
        but(mutations={"weight_decay": Around()}).check_optimizer(sgd)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exploit_fraction": 0.6}, r"exploit_fraction must be in \(0, 0.5\]; received 0.6"),
        ({"resample_probability": 2}, r"resample_probability must be in \[0, 1\]; received 2"),
        ({"factors": ()}, r"factors must be positive numbers; received \(\)"),
        ({"factors": (0, 2)}, "factors must be positive numbers"),
        ({"mutations": {}}, "mutations must name at least one"),
        ({"mutations": {"lr": "0.1"}}, r"mutations\['lr'\] must be a Range, an Around or a list"),
        ({"mutations": {"lr": []}}, "must be a Range"),
        ({"mutations": {"lr": [True]}}, "must be a Range"),
    ],
)
def test_wrong_options(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        but(**changes)


def test_it_is_saved_without_pickle() -> None:
    assert restore(describe(STRATEGY)) == STRATEGY
    assert restore(describe(PopulationBasedTraining())) == PopulationBasedTraining()

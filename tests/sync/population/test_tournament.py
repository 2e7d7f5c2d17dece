"""Who meets whom, and who wins."""

from __future__ import annotations

import logging
import math
from collections import Counter

import pytest
import torch

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.sync.population.ranges import Around
from sparkdl.sync.population.tournament import Tournament, has_won
from tests.sync.population.test_population import plan_of

EVERY_5 = Tournament(period=5)


@pytest.mark.parametrize("num_members", [1, 2, 3, 4, 7])
def test_everybody_meets_one_other_but_an_odd_one_out(num_members: int) -> None:
    plan = plan_of(*[4] * num_members)
    for step in (5, 10, 15):
        rivals = EVERY_5.rivals(plan, 3, step)
        assert len(rivals) == num_members // 2 * 2
        assert all(rivals[rivals[member]] == member != rivals[member] for member in rivals)


def test_pairs_follow_from_seed_and_step() -> None:
    plan = plan_of(*[4] * 12)
    assert EVERY_5.rivals(plan, 3, 10) == EVERY_5.rivals(plan, 3, 10)
    assert EVERY_5.rivals(plan, 3, 10) != EVERY_5.rivals(plan, 3, 15)
    assert EVERY_5.rivals(plan, 3, 10) != EVERY_5.rivals(plan, 4, 10)


def test_in_time_everybody_meets_everybody() -> None:
    plan = plan_of(*[4] * 4)
    met = Counter(
        pair for step in range(5, 1505, 5) for pair in EVERY_5.rivals(plan, 0, step).items()
    )
    assert len(met) == 12
    assert all(60 < count < 140 for count in met.values())  # 100 expected, deviation 8


def test_nobody_meets_between_contests_or_at_the_start() -> None:
    plan = plan_of(4, 4)
    assert [step for step in range(11) if EVERY_5.rivals(plan, 0, step)] == [5, 10]


@pytest.mark.parametrize(
    ("rival", "own", "won"),
    [
        (1.0, 2.0, True),
        (2.0, 1.0, False),
        (1.0, 1.0, False),
        (1.0, math.nan, True),
        (1.0, math.inf, True),
        (math.nan, 1.0, False),
        (math.nan, math.nan, False),
        (math.inf, math.nan, False),
    ],
)
def test_the_smaller_loss_wins_and_a_draw_changes_nothing(
    rival: float, own: float, won: bool
) -> None:
    assert has_won(rival, own) is won


def test_a_tournament_needs_judges(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match="no shard has both training rows and validation rows"):
        Tournament().hold_out(plan_of(5, 0, validation=(0, 3)))
    plan = plan_of(5, 5, 0, validation=(2, 0, 0))
    with caplog.at_level(logging.WARNING):
        assert Tournament().hold_out(plan) is plan
    assert "shard(s) [1] have no validation rows" in caplog.text


def test_trainers_draw_hyperparameters_of_their_own() -> None:
    plain = Tournament()
    assert plain.first(3, {}, seed=1) == {}
    strategy = Tournament(mutations={"learning_rate": Around(4), "momentum": [0.0, 0.9]})
    own = {"learning_rate": 0.1, "momentum": 0.5}
    assert strategy.first(0, own, seed=1) == own
    drawn = [strategy.first(member, own, seed=1) for member in range(1, 9)]
    assert len({values["learning_rate"] for values in drawn}) == 8
    assert all(0.025 <= values["learning_rate"] <= 0.4 for values in drawn)
    assert {values["momentum"] for values in drawn} == {0.0, 0.9}
    with pytest.raises(ConfigError, match="has no number called 'momentm'"):
        adam = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
        Tournament(mutations={"momentm": [0.1]}).check_optimizer(adam)


def test_any_metric_may_judge_if_it_is_measured() -> None:
    config = TrainConfig(task=CLASSIFICATION, metrics={"accuracy": lambda: None})
    strategy = Tournament(monitor="val_accuracy", mode="max")
    strategy.check(config, 2)
    assert strategy.cost({"val_accuracy": 0.75, "val_loss": 3.0}) == -0.75
    Tournament(monitor="val_loss_first").check(config, 2)  # the loss of one label
    with pytest.raises(ConfigError, match=r"'val_f1', which is not measured.*val_loss, val_accur"):
        Tournament(monitor="val_f1").check(config, 2)
    with pytest.raises(ConfigError, match="'val_f1', which is not measured; measured are val_loss"):
        Tournament(monitor="val_f1").cost({"val_loss": 1.0})
    with pytest.raises(ConfigError, match="mode must be 'auto', 'min' or 'max'"):
        Tournament(mode="best")  # type: ignore[arg-type]


def test_wrong_exchange() -> None:
    with pytest.raises(ConfigError, match="exchange must be 'weights' or 'all'; received 'model'"):
        Tournament(exchange="model")  # type: ignore[arg-type]

"""What populations share: rows set aside, who is best, draws that repeat."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.errors import ConfigError, DataError
from sparkdl.sync.population.population import Competition, best_first, drawn, members_of
from sparkdl.sync.population.population_based_training import PopulationBasedTraining
from sparkdl.sync.population.tournament import Tournament

X = Column(name="x", role="feature", dtype="float32", shape=(2,))


def plan_of(*rows: int, validation: tuple[int, ...] = (), batch_size: int = 4) -> TrainPlan:
    held = validation or (0,) * len(rows)
    shards = [
        Shard(
            shard_id=i, host="", path="", num_rows=n, num_validation_rows=v, fingerprint=str(i),
            num_bytes=0,
        )
        for i, (n, v) in enumerate(zip(rows, held, strict=True))
    ]  # fmt: skip
    return make_plan(
        columns=[X], shards=shards, world_size=len(rows), batch_size=batch_size, epochs=1
    )


def test_the_last_rows_of_every_shard_are_set_aside() -> None:
    before = plan_of(40, 11, 2, 1, 0)
    plan = Competition(holdout_fraction=0.25).hold_out(before)
    assert [shard.num_rows for shard in plan.shards] == [30, 8, 1, 1, 0]
    assert [shard.num_validation_rows for shard in plan.shards] == [10, 3, 1, 0, 0]
    assert (before.steps_per_epoch, plan.steps_per_epoch) == (10, 8)
    assert [plan.rows_of(rank) for rank in range(5)] == [30, 8, 1, 1, 0]


def test_a_small_fraction_still_leaves_one_row_to_measure() -> None:
    plan = Competition(holdout_fraction=0.01).hold_out(plan_of(5))
    assert (plan.num_rows, plan.num_validation_rows) == (4, 1)


def test_marked_rows_are_enough() -> None:
    plan = plan_of(9, 9, validation=(0, 3))
    assert Competition().hold_out(plan) is plan


@pytest.mark.parametrize("strategy", [Tournament(), PopulationBasedTraining()])
def test_nothing_to_set_aside_is_refused(strategy: Competition) -> None:
    name = type(strategy).__name__
    with pytest.raises(DataError, match=f"{name} measures models on rows .* lower numWorkers"):
        strategy.hold_out(plan_of(1, 1, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"period": 0}, "period must be a number of steps of at least 1; received 0"),
        ({"period": "auto"}, "period must be a number"),
        ({"holdout_fraction": 0}, r"holdout_fraction must be in \(0, 0.5\]; received 0"),
        ({"holdout_fraction": 0.6}, "holdout_fraction must be in"),
    ],
)
def test_wrong_options(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Competition(**changes)


def test_competitions_are_due_every_period() -> None:
    strategy = Competition(period=3)
    assert [step for step in range(10) if strategy.is_due(step)] == [3, 6, 9]


def test_in_a_gang_there_is_no_population() -> None:
    with pytest.raises(ConfigError, match="Tournament does not run in a gang: its members never"):
        Tournament().setup(None, None, LocalCommunicator())  # type: ignore[arg-type]


def test_members_are_the_shards_with_rows() -> None:
    assert members_of(plan_of(3, 0, 5)) == [0, 2]


def test_what_is_not_finite_comes_last() -> None:
    assert best_first([3.0, math.nan, -1.0, math.inf, 3.0, -math.inf]) == [2, 0, 4, 1, 3, 5]


def test_draws_follow_from_the_numbers() -> None:
    first = drawn(7, 1, 30).random(4)
    assert (first == drawn(7, 1, 30).random(4)).all()
    for other in (drawn(8, 1, 30), drawn(7, 2, 30), drawn(7, 1, 31)):
        assert (first != other.random(4)).all()
    assert drawn(-1, 1).random() < 1

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.sync.own_weights.elastic_averaging import ElasticAveraging
from tests.gang import Gang
from tests.sync.apart import ROWS, SGD, Replicas, assert_close, make_net, train_on_rank
from tests.train.runs import Keeper, but, make_data, run, weights

NESTEROV = but(SGD, optimizer_params={"momentum": 0.9})


def own_weights(state: dict[str, Any]) -> torch.Tensor:
    return torch.cat([one.flatten() for one in state["rank"]["strategy"]["own"]])


@pytest.mark.gang
@pytest.mark.parametrize("elasticity", [None, 0.1])
@pytest.mark.parametrize("rows", [ROWS, [9, 0, 33]])
def test_follows_the_paper(gang3: Gang, rows: list[int], elasticity: float | None) -> None:
    """Zhang et al. 2015: x <- x - a (x - c) and c <- c + a sum(x - c), all from the old values."""
    a = 0.3 if elasticity is None else elasticity
    reference = Replicas(NESTEROV, rows, momentum=0.9)
    center = reference.x[0].clone()
    for _ in range(3):
        for _ in range(3):
            reference.step()
        pull = a * (reference.x - center)
        reference.x -= pull
        center = center + pull[reference.rows > 0].sum(0)  # who has trained on nothing follows
        reference.rows.zero_()
    strategy = ElasticAveraging(averaging_period=3, elasticity=elasticity)
    results = gang3.run(train_on_rank, but(NESTEROV, sync_strategy=strategy), rows)
    for rank, (mine, state, _) in enumerate(results):
        assert_close(mine, center)
        assert_close(own_weights(state), reference.x[rank])


@pytest.mark.gang
def test_without_elasticity_runs_are_independent(gang3: Gang) -> None:
    reference = Replicas(SGD, ROWS)
    begin = reference.x[0].clone()
    for _ in range(9):
        reference.step()
    strategy = ElasticAveraging(averaging_period=2, elasticity=0.0)
    results = gang3.run(train_on_rank, but(SGD, sync_strategy=strategy), ROWS)
    for rank, (mine, state, _) in enumerate(results):
        assert torch.equal(mine, begin)
        assert_close(own_weights(state), reference.x[rank])


@pytest.mark.gang
def test_what_is_evaluated_is_the_center_and_training_does_not_notice(gang: Gang) -> None:
    strategy = ElasticAveraging(averaging_period=4)
    config = but(SGD, sync_strategy=strategy, epochs=2)
    undisturbed = gang.run(train_on_rank, config, [22, 17])[0][0]
    mine, point = gang.run(train_with_checkpoints, config, [22, 17])[0]
    assert torch.equal(mine, undisturbed)
    for parameter, center in zip(
        point.shared["model"].values(), point.shared["strategy"]["center"], strict=True
    ):
        assert torch.equal(parameter, center)


def train_with_checkpoints(comm: Any, config: TrainConfig, rows: list[int]) -> tuple[Any, Any]:
    sink, net = Keeper(steps=(1, 2, 3, 4, 5, 7)), make_net()
    run(net, config, make_data(rows), comm=comm, sink=sink)
    return weights(net), sink.points[5]


def test_a_center_that_would_swing_is_refused() -> None:
    ElasticAveraging(elasticity=0.3).check(SGD, 3)
    ElasticAveraging().check(SGD, 100)
    with pytest.raises(ConfigError, match=r"0.5 times 2 replicas is 1, .* less than 1"):
        ElasticAveraging(elasticity=0.5).check(SGD, 2)


def test_it_needs_a_gang() -> None:
    assert "weights of its own" in ElasticAveraging().why_not_rounds()


@pytest.mark.parametrize(
    "options", [{"averaging_period": 0}, {"elasticity": 1.0}, {"elasticity": -0.1}]
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ElasticAveraging(**options)

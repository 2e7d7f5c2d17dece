"""Whoever holds which shard, and however many workers there are: the mathematics is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import TrainConfig
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.train.rank_state import ResumePoint, united
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, Keeper, but, make_data, plan_for, run, seeded, weights

pytestmark = pytest.mark.gang

ROWS = [23, 7, 16, 0, 11]


class Net(nn.Module):
    """Linear layers with a normalization between them that may talk to the other ranks."""

    def __init__(self, *, is_normalized: bool) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 5, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64) if is_normalized else nn.Tanh()
        self.last = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def train_on_rank(
    comm: Any,
    config: TrainConfig,
    shards_by_rank: Sequence[Sequence[int]],
    save_at: int | None = None,
    before: Sequence[ResumePoint] = (),
) -> tuple[torch.Tensor, list[dict[str, float]], dict[int, ResumePoint]]:
    """Train this rank's shards, from where the ranks of another gang have stopped."""
    data, validation = make_data(ROWS), make_data([3, 0, 4, 2, 1])
    plan = plan_for(data, config, validation=validation, world_size=comm.world_size, weighted=True)
    plan = replace(plan, shards_by_rank=tuple(map(tuple, shards_by_rank)))
    net = seeded(lambda: Net(is_normalized=config.sync_batch_norm))
    resume = None
    if before:
        state = united([point.rank_state or {} for point in before])
        resume = replace(before[0], rank_state=state)
    sink = Keeper((save_at,)) if save_at is not None else None
    config = config if save_at is None else but(config, max_steps=save_at + 1)
    outcome = run(net, config, data, validation=validation, comm=comm, plan=replace(
        plan, max_steps=config.max_steps), sink=sink, resume=resume)  # fmt: skip
    return weights(net), outcome.history, sink.points if sink is not None else {}


def united_run(config: TrainConfig) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """One process that has all shards."""
    found, history, _ = train_on_rank(LocalCommunicator(), config, [range(len(ROWS))])
    return found, history


def assert_equal(found: Any, expected: Any) -> None:
    weights_found, history = found[:2]
    assert torch.allclose(weights_found, expected[0], rtol=1e-12, atol=1e-12)
    assert len(history) == len(expected[1])
    for own, other in zip(history, expected[1], strict=True):
        assert own.keys() == other.keys()
        for name in own.keys() - {"seconds"}:
            assert own[name] == pytest.approx(other[name], rel=1e-12)


CASES: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adamw", "learning_rate": 0.01, "batch_size": 1},  # several norms
    "momentum clipped": {"optimizer": "sgd", "learning_rate": 0.05, "gradient_clip_norm": 0.2,
                         "optimizer_params": {"momentum": 0.9}},
    "double buffering": {"sync_strategy": AllReduce(double_buffering=True), "learning_rate": 0.01},
    "batch norm": {"sync_batch_norm": True, "learning_rate": 0.01},
    "accumulated": {"gradient_accumulation_steps": 3, "learning_rate": 0.01},
}  # fmt: skip
ASSIGNED: dict[int, list[list[int]]] = {
    2: [[0, 3], [1, 2, 4]],
    3: [[4, 1], [0], [2, 3]],
    4: [[3], [2, 0], [1], [4]],
}


def config_of(case: str) -> TrainConfig:
    return TrainConfig(**{"epochs": 3, "batch_size": 4, **CASES[case]})


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_workers_learns_the_same(
    gang: Gang, gang3: Gang, gang4: Gang, case: str
) -> None:
    expected = united_run(config_of(case))
    for world_size, started in ((2, gang), (3, gang3), (4, gang4)):
        for found in started.run(train_on_rank, config_of(case), ASSIGNED[world_size]):
            assert_equal(found, expected)


@pytest.mark.parametrize("case", CASES)
def test_the_number_of_workers_changes_within_epochs(
    gang: Gang, gang3: Gang, gang4: Gang, case: str
) -> None:
    config = config_of(case)
    before: list[ResumePoint] = []
    for world_size, started, stop in ((4, gang4, 4), (2, gang, 8), (3, gang3, 9)):
        run_by = started.run(train_on_rank, config, ASSIGNED[world_size], stop, before)
        before = [points[stop] for _, _, points in run_by]
    everything = [list(range(len(ROWS)))]
    found = train_on_rank(LocalCommunicator(), config, everything, None, before)
    assert_equal(found, united_run(config))

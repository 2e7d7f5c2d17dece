"""Strategies between divided replicas do what they do between workers that have whole ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.config import TrainConfig
from sparkdl.mesh import Mesh
from sparkdl.sync.averaging.block_momentum import BlockMomentum
from sparkdl.sync.averaging.diloco import DiLoCo
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.averaging.slowmo import SlowMo
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.own_weights.elastic_averaging import ElasticAveraging
from sparkdl.sync.own_weights.gossip import Gossip
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.rank_state import ResumePoint
from tests.gang import Gang
from tests.sync.divided.test_mesh_training import (
    LAYOUT,
    ROWS,
    assert_equal,
    config_of,
    one_process,
    train_on_rank,
)

pytestmark = pytest.mark.gang

SHARD = Mesh(data=2, shard=2, smallest_unit=1)
TENSOR = Mesh(data=2, tensor=2, layout=LAYOUT)
PIPELINE = Mesh(data=2, pipeline=2)
STRATEGIES: dict[str, tuple[SyncStrategy, Mesh]] = {
    "averaging": (ParameterAveraging(averaging_period=2), SHARD),
    "averaging, new optimizers": (
        ParameterAveraging(averaging_period=2, average_optimizer_state=False),
        PIPELINE,
    ),
    "local": (LocalSGD(averaging_period=2), SHARD),
    "local, adaptive": (LocalSGD(averaging_period="adaptive", first_period=3), TENSOR),
    "local, warm": (LocalSGD(averaging_period=2, warmup_steps=2), SHARD),
    "block momentum": (BlockMomentum(averaging_period=2), PIPELINE),
    "slow momentum": (SlowMo(averaging_period=2), TENSOR),
    "outer": (DiLoCo(averaging_period=2), SHARD),
    "streaming": (DiLoCo(averaging_period=3, num_fragments=2, overlap_steps=1), SHARD),
    "elastic": (ElasticAveraging(averaging_period=2), SHARD),
    "gossip": (Gossip(probability=0.6), PIPELINE),
    "double buffering": (AllReduce(double_buffering=True), SHARD),
}
FEW = (23, 7, 1, 0)
"""Rows of shards, so that one replica has none in most steps."""


def case_of(name: str, *, divided: bool = True, **other: Any) -> TrainConfig:
    strategy, mesh = STRATEGIES[name]
    case, mesh = "adam, clipped, in two parts", mesh if divided else None
    return config_of(case, mesh, **{"sync_strategy": strategy, "epochs": 2, **other})


def train_on_rows(comm: Communicator, config: TrainConfig, rows: Sequence[int]) -> Any:
    return train_on_rank(comm, config, rows=rows)


@pytest.mark.parametrize("name", ["local", "elastic"])
def test_replicas_of_one_worker_each_are_as_without_a_mesh(gang: Gang, name: str) -> None:
    along = dataclasses.replace(case_of(name), parallelism=Mesh(data=2))
    found = gang.run(train_on_rows, along, FEW)
    for own, other in zip(found, gang.run(train_on_rows, case_of(name, divided=False), FEW),
                          strict=True):  # fmt: skip
        assert_equal(own, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_divided_replicas_are_as_those_of_one_worker_each(
    gang: Gang, gang4: Gang, name: str
) -> None:
    rows = FEW if name in ("local", "outer", "gossip", "averaging") else ROWS
    expected = gang.run(train_on_rows, case_of(name, divided=False), rows)[0]
    for found in gang4.run(train_on_rows, case_of(name), rows):
        assert_equal(found, expected)


@pytest.mark.slow
def test_the_mean_after_each_step_of_sgd_is_the_sum_of_gradients(gang4: Gang) -> None:
    plain: dict[str, Any] = {"optimizer": "sgd", "optimizer_params": {}, "learning_rate": 0.05}
    config = config_of("momentum, the best", SHARD, early_stopping=None, **plain)
    each = dataclasses.replace(config, sync_strategy=ParameterAveraging(averaging_period=1))
    expected, _, _ = one_process(config)
    for weights, _, _ in gang4.run(train_on_rank, each):
        for name, value in expected.items():
            assert torch.allclose(weights[name], value, rtol=1e-12, atol=1e-12), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["local", "local, warm", "slow momentum", "streaming", "gossip", "double buffering"]
)
def test_a_run_goes_on_with_the_same_bits(gang4: Gang, name: str) -> None:
    config = case_of(name)
    whole = gang4.run(save_on_rank, config)
    again = gang4.run(resume_on_rank, config, [found[2] for found in whole])
    for own, other in zip(whole, again, strict=True):
        assert all(torch.equal(own[0][key], value) for key, value in other[0].items())


def save_on_rank(comm: Communicator, config: TrainConfig) -> Any:
    """Train to the end, with a checkpoint under way."""
    weights, history, points = train_on_rank(comm, config, save_at=4)
    (point,) = points.values()
    return weights, history, point


def resume_on_rank(comm: Communicator, config: TrainConfig, saved: Sequence[ResumePoint]) -> Any:
    """Go on with this rank's own file, and the part of the first replica's."""
    of_first = saved[comm.rank % (comm.world_size // 2)]
    part = (of_first.rank_state or {})["divided"]
    own = dataclasses.replace(saved[comm.rank], shared=saved[0].shared, parts=lambda: iter([part]))
    return train_on_rank(comm, config, own=own)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["outer", "elastic"])
def test_a_run_goes_on_elsewhere_from_what_all_agreed_on(
    gang: Gang, gang4: Gang, name: str
) -> None:
    """Along another mesh what a strategy remembers begins anew, where the weights are."""
    saved = [found[2] for found in gang4.run(save_on_rank, case_of(name))]
    parts = [(point.rank_state or {})["divided"] for point in saved]
    assert [part is None for part in parts] == [False, False, True, True]
    along = dataclasses.replace(case_of(name), parallelism=Mesh(data=2))
    for config in (along, case_of(name, divided=False)):
        first, second = gang.run(go_on_without_own, config, saved)
        assert_equal(first, second)
        assert first[1][-1]["loss"] < first[1][0]["loss"]


def go_on_without_own(comm: Communicator, config: TrainConfig, saved: Sequence[ResumePoint]) -> Any:
    parts = [(point.rank_state or {})["divided"] for point in saved]
    own = dataclasses.replace(
        saved[0], rank_state=None, parts=lambda: iter([part for part in parts if part])
    )
    return train_on_rank(comm, config, own=own)
